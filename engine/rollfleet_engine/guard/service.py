"""The guard as a service in the engine's event loop: the machine's state, its timers, its followers, its operations."""

import asyncio
import os
import time
import uuid
from contextlib import suppress

from rollfleet_engine.guard.adapting import on_host, with_backend
from rollfleet_engine.guard.checkpoints import Stager
from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.machine import decide
from rollfleet_engine.guard.operations import REOPEN_DEADLINE_S, Operations
from rollfleet_engine.guard.ports import EngineAdapter, EngineError
from rollfleet_engine.guard.probing import Probing
from rollfleet_engine.guard.pushing import PushSession
from rollfleet_engine.guard.states import (
    AbandonPush,
    CancelOperation,
    DrainBegan,
    Effect,
    EngineDied,
    Event,
    GuardState,
    Heard,
    OperationRecord,
    Rejection,
    ReleaseStaged,
    Start,
    Tick,
    to_wire,
)
from rollfleet_engine.guard.tallies import Tallies
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_engine.guard.waiting import WaitingRoom
from rollfleet_protocol.commands import Cancel, Command, Probe, Push
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import EngineState, Gate, OperationName, ProbeReport

ALIVE_EVERY_S = 0.25  # how soon the death of the core closes the gate
# Long polls that are held at once; more are answered at once. One operator needs one, during its replacement two.
MOST_FOLLOWERS = 16
# While the operator's silence would reopen the gate, a poll is held for at most this part of it: the next is a word.
POLL_SHARE_OF_SILENCE = 1 / 3
ABORT_BUDGET_S = 5.0  # after the drain timeout
ABORT_KEPT_BUDGET_S = 2.0  # before it


# Of requests that are kept: the weights that they began under, or were to go on under, are gone.
_HOPELESS = (ClosedReason.UNCERTAIN, ClosedReason.ENGINE_DEAD)


class RejectedError(Exception):
    """A command was refused; nothing was changed by it."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class GuardService:
    """Everything that control port, serving port and preStop hook share. Lives in one event loop."""

    def __init__(
        self,
        adapter: EngineAdapter,
        stager: Stager,
        turnstile: Turnstile,
        log: GuardLog,
        waiting: WaitingRoom | None = None,
        pod_uid: str = "",
        backend: str = "",
        unpickles: bool = False,
    ) -> None:
        self._pod_uid = pod_uid
        self._adapter = adapter
        self._facts = on_host(with_backend(adapter.facts(), backend), os.environ)
        self._turnstile = turnstile
        self._waiting = waiting or WaitingRoom(turnstile, None)
        self._log = log
        self.tallies = Tallies(time.monotonic())
        self._state = GuardState(incarnation=uuid.uuid4().hex)
        self._operations = Operations(
            adapter,
            stager,
            turnstile,
            log,
            lambda: self._state,
            self._report,
            self._require_no_crash,
            backend,
            unpickles,
        )
        self._probing = Probing(adapter, lambda: self._state)
        self._changed = asyncio.Event()
        self._followers = 0
        self._timer: asyncio.Task[None] | None = None
        self._stager = stager
        self._reads_ahead = bool(backend)  # the first push must not wait for it, with the fleet closed
        self._reading: asyncio.Task[None] | None = None
        self._broken = ""  # why the process must be restarted though its core lives

    # --- life

    def start(self) -> None:
        """Begin to watch the clock and the core."""
        self._timer = asyncio.create_task(self._watch(), name="rollfleet-guard-timer")
        self._timer.add_done_callback(self._require_no_crash)
        if self._reads_ahead:
            self._reading = asyncio.create_task(self._read_ahead(), name="rollfleet-guard-reading")

    async def stop(self) -> None:
        """The process ends."""
        tasks = {task for task in (self._timer, self._reading) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._operations.stop(timeout_s=1.0)

    async def _read_ahead(self) -> None:
        """What the model's own tensors are. Where they cannot be read a push will say so."""
        with suppress(EngineError):
            await self._stager.judge({}, whole=False)

    def break_down(self, why: str) -> None:
        """The guard can no longer be controlled: let the kubelet restart the container."""
        self._broken = why
        self._log.write("guard.broken", why=why)

    def _require_no_crash(self, task: asyncio.Task[None]) -> None:
        """A guard that has lost its timer, or the end of an operation, keeps no promise any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.break_down(f"{task.get_name()} crashed: {type(error).__name__}: {error}")

    async def _watch(self) -> None:
        while True:
            if self._state.alive and not self._adapter.alive():
                self._apply(EngineDied())
            self._apply(Tick())
            await asyncio.sleep(ALIVE_EVERY_S)

    # --- what the ports ask

    @property
    def incarnation(self) -> str:
        """New at each start of the process."""
        return self._state.incarnation

    def state(self) -> EngineState:
        """All that a follower is told."""
        told = to_wire(self._state, self._facts, self._turnstile.in_flight, _now())
        more = {"kept": self._turnstile.kept, "held": self._waiting.held, "pod_uid": self._pod_uid}
        return told.model_copy(update=more)

    def why_not_live(self) -> str:
        """For /livez; never asks the core."""
        return self._broken or ("" if self._adapter.alive() else "the engine core is dead")

    def why_not_ready(self) -> str:
        """For /readyz: out of the serving set, which an ordinary update is not."""
        if self._state.member:
            return ""
        return f"not in the serving set: {self._state.closed_reason}"

    async def follow(self, after: int | None, wait_s: float) -> EngineState:
        """The state once its sequence differs from `after`, at the latest after `wait_s`. A word of the operator."""
        self._apply(Heard())
        if self._state.silence_s is not None:
            wait_s = min(wait_s, self._state.silence_s * POLL_SHARE_OF_SILENCE)
        if after is None or self._followers >= MOST_FOLLOWERS:
            return self.state()
        self._followers += 1
        try:
            async with asyncio.timeout(wait_s):
                while self._state.sequence == after:
                    await self._changed.wait()
        except TimeoutError:
            pass  # nothing changed, which is an answer too
        finally:
            self._followers -= 1
        return self.state()

    async def command(self, command: Command) -> EngineState:
        """Obey, or raise RejectedError. What takes time goes on after the answer, but Cancel is waited for."""
        rejection = self._apply(command)
        if rejection is not None:
            raise RejectedError(rejection)
        if isinstance(command, Cancel):
            await self._wait_for_reopening()
        return self.state()

    def is_sender(self, caller: Caller) -> bool:
        """Whether an armed update of this epoch names this account as the one that sends the weights.

        Not before its Transfer has begun: it waits for the operations before it, and a call would find no push.
        """
        push, running = self._state.push, self._state.running
        if running is not None and running.name is OperationName.TRANSFER and self.push is None:
            return False
        return self._state.armed and push is not None and Caller(push.sender.subject, push.sender.uid) == caller

    def state_of_push(self) -> Push | None:
        """As the operator's Transfer of this epoch named it."""
        return self._state.push

    @property
    def push(self) -> PushSession | None:
        """The trainer's push that is waited for or received."""
        return self._operations.push

    async def probe(self, command: Probe) -> ProbeReport:
        """What the engine says to these tokens now, or RejectedError. Changes nothing; no word of the operator."""
        answer = await self._probing.probe(command)
        if isinstance(answer, Rejection):
            raise RejectedError(answer)
        return answer

    async def _wait_for_reopening(self) -> None:
        with suppress(TimeoutError):  # the state tells that it still runs
            async with asyncio.timeout(REOPEN_DEADLINE_S):
                while self._state.running is not None and self._state.running.name is OperationName.REOPEN:
                    await self._changed.wait()

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing more, wait for what runs, then end it. Returns how many did not end by themselves."""
        self._apply(DrainBegan())
        if self._turnstile.kept:
            self._turnstile.let_go()
            await self._abort_all(ABORT_KEPT_BUDGET_S)  # frozen, they would never end by themselves
        if await self._turnstile.wait_empty(timeout_s):
            return 0
        left = self._turnstile.in_flight
        await self._abort_all(ABORT_BUDGET_S)
        self._turnstile.cut_all()
        await self._turnstile.wait_empty(1.0)
        return left

    async def _abort_all(self, budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await self._adapter.abort_all(budget_s)
                await self._turnstile.wait_empty(budget_s / 2)
        except (EngineError, TimeoutError) as error:
            self._log.write("drain.abort_failed", error=str(error) or type(error).__name__)

    # --- the machine

    def _report(self, event: Event) -> None:
        self._apply(event)

    def _apply(self, event: Event) -> Rejection | None:
        """One event, start to end, without giving way to anything else in the loop."""
        before = self._state
        decision = decide(before, event, _now(), self._turnstile.in_flight)
        self._state = decision.state
        if self._state is not before:
            self._move_gate(before)
            self._log_operation(before.operation)
            if self._state.sequence != before.sequence:
                self._wake_followers()
        for effect in decision.effects:
            self._begin(effect)
        return decision.rejection

    def _begin(self, effect: Effect) -> None:
        match effect:
            case Start(operation):
                probe = None if operation.name is OperationName.PREPARE else self._probing.give_way()
                self._operations.start(operation, probe)
            case CancelOperation(operation_id):
                self._operations.cancel(operation_id)
            case AbandonPush():
                self._operations.abandon_push("a newer epoch began")
            case ReleaseStaged():
                self._operations.release()

    def _wake_followers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _move_gate(self, before: GuardState) -> None:
        state, turnstile = self._state, self._turnstile
        self.tallies.closed.move(None if state.gate is Gate.OPEN else state.closed_reason, time.monotonic())
        if state.gate is Gate.OPEN:
            if before.gate is Gate.CLOSED:
                self._open_gate()
            return
        reason = state.closed_reason
        if before.gate is Gate.OPEN:
            moment = time.time_ns()
            turnstile.close(reason)
            self._log.write(
                "gate.closed",
                time_ns=moment,
                version=turnstile.version,
                epoch=state.epoch,
                reason=reason,
                admitted=turnstile.admitted,
                firstAdmissionNs=turnstile.first_admission_ns,
                lastAdmissionNs=turnstile.last_admission_ns,
                inFlight=turnstile.in_flight,
            )
        elif reason is not before.closed_reason:
            turnstile.close(reason)
        if reason in _HOPELESS and turnstile.kept:
            self._log.write("kept.cut", count=turnstile.cut_kept(), reason=reason)

    def _open_gate(self) -> None:
        """The moment is taken before the first admission, so that by the log alone none of this version is earlier."""
        weights, refused, moment = self._state.weights, self._turnstile.refused, time.time_ns()
        self._turnstile.open(weights.version or 0)
        self._log.write(
            "gate.opened",
            time_ns=moment,
            version=weights.version,
            digest=weights.digest,
            epoch=self._state.epoch,
            refused=refused,
        )

    def _log_operation(self, before: OperationRecord | None) -> None:
        now = self._state.operation
        if now is None or (before is not None and (before.id, before.status) == (now.id, now.status)):
            return
        details: dict[str, object] = {"operation": now.name, "epoch": now.epoch, "version": now.version}
        if now.ended is not None:
            details["seconds"] = round(now.ended - now.started, 6)
            self.tallies.operation(now.name, now.status, now.ended - now.started)
        if now.failure is not None:
            details |= {"reason": now.failure.reason, "message": now.failure.message}
        self._log.write("operation", time_ns=None, status=now.status, **details)


def _now() -> float:
    """Monotonic seconds of the loop, which tests can run faster."""
    return asyncio.get_running_loop().time()
