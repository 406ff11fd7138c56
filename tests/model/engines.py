"""An engine's process in the model: the real guard machine, over weights that can be damaged in every way."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollfleet_engine.guard.operations import PATIENCE_S
from rollfleet_engine.guard.states import (
    DrainBegan,
    EngineDied,
    GuardState,
    OperationRecord,
    Rejection,
    Resumed,
    Touching,
)
from rollfleet_protocol.commands import CheckpointRoot, Close, Command, PauseMode, Transfer
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import (
    DigestSource,
    Failure,
    FailureReason,
    Gate,
    OperationName,
    ProbeResult,
    Staged,
    Transferred,
    WeightsState,
)
from tests.model.pushes import MISFIT, Answer, Call, ModelSession, refusal
from tests.model.requests import Crowd, Held
from tests.support.builders import digest_of
from tests.support.simulated_engine import MODEL_DIGEST, EngineProcess, Pending, Store, Temper, fault

LONGEST_STEP_S = 10.0
SILENT = "!"  # appended to what an engine really holds where nothing but the probe can tell
HOPELESS = (ClosedReason.UNCERTAIN, ClosedReason.ENGINE_DEAD)


@dataclass
class Shelf(Store):
    """Checkpoints that vanish, are half-written, and change."""

    changed: dict[str, str] = field(default_factory=dict)  # path -> digest of what is there now

    def read(self, root: CheckpointRoot, path: str) -> str | Failure:
        """Its digest, or what is wrong with it."""
        if root is CheckpointRoot.CHECKPOINTS and path in self.changed and path not in self.faults:
            return self.changed[path]
        return super().read(root, path)

    def heal(self, path: str | None, digest: str | None) -> None:
        """As it was; the committed checkpoint as it was committed."""
        self.faults.clear()
        self.changed.clear()
        if path is not None and digest is not None and digest != digest_of(path):
            self.changed[path] = digest


@dataclass
class Damage(Temper):
    """How the next transfer of an engine goes wrong."""

    wrong_digest: bool = False  # the workers received other bytes than were staged, and say so
    silent: bool = False  # a kernel layout is wrong: digest and coverage hold


class ModelEngine(EngineProcess):
    """One incarnation."""

    resumes_at_end = (OperationName.REOPEN,)

    def __init__(self, incarnation: str, shelf: Shelf, damage: Damage, rng: random.Random) -> None:
        self.crowd = Crowd(incarnation, Held(0, None, MODEL_DIGEST))
        super().__init__(incarnation, shelf, damage, rng)
        self.on_command: Callable[[Command], None] = lambda _: None
        self.on_call: Callable[[Call], None] = lambda _: None  # of a trainer, and taken
        self.session: ModelSession | None = None  # a push that is waited for or received
        self.sent_by: frozenset[str] = frozenset()  # whose bytes the weights are that a trainer sent
        self._shelf = shelf
        self._damage = damage
        self._waiting: tuple[OperationRecord, float] | None = None  # a Close that lets requests end by themselves
        self._not_reset: Failure | None = None  # why a Verify that runs did not reset the caches

    @property
    def open(self) -> bool:
        """Whether it answers clients."""
        return self.state.gate is Gate.OPEN

    def obey(self, command: Command, now: float) -> Rejection | None:
        """A command arrives."""
        self._look(now)
        self.on_command(command)
        return self.command(command, now)

    def unhang(self, now: float) -> None:
        """What would last past every deadline ends."""
        if self.session is not None and self.session.call is not None:
            self.session.ends = min(self.session.ends, now + LONGEST_STEP_S)
        if self._pending is not None and self.session is None:
            self._pending.ends = min(self._pending.ends, now + LONGEST_STEP_S)

    def die(self, now: float) -> None:
        """The core is gone, the guard is not."""
        self._look(now)
        self.apply(EngineDied(), now)
        self.crowd.turnstile.cut_all()
        self._settle()

    def drain(self, now: float) -> None:
        """The preStop hook began: what runs may end by itself, what is frozen never would."""
        self._look(now)
        self.apply(DrainBegan(), now)
        if self.crowd.turnstile.kept:
            self.crowd.turnstile.let_go()
            self.crowd.abort()
        self._settle()

    def next_event(self) -> float | None:
        """When something happens by itself."""
        times = [super().next_event(), self.crowd.next_event(), None if self._waiting is None else self._waiting[1]]
        if self.session is not None and self.session.call is not None:
            times.append(self.session.ends)
        return min((when for when in times if when is not None), default=None)

    def advance(self, now: float) -> None:
        """Let time pass until now."""
        self._look(now)
        waiting = self._waiting
        if waiting is not None and (now >= waiting[1] or not self.in_flight):
            self._waiting = None
            self._pause(waiting[0], now)
        if self.session is not None and now >= self.session.ends:
            self._end_call(self.session, now)
        super().advance(now)
        self._settle()

    # requests -------------------------------------------------------------------------------------------------------

    def admit(self, now: float, seconds: float, *, streams: bool, pinned: bool) -> None:
        """A client's request comes to an open gate."""
        self.crowd.admit(now, seconds, streams=streams, pinned=pinned)
        self._settle()

    def _look(self, now: float) -> None:
        self.crowd.advance(now)
        self.in_flight = self.crowd.turnstile.in_flight

    def _settle(self) -> None:
        self.crowd.settle()
        self.in_flight = self.crowd.turnstile.in_flight

    def empty(self, now: float) -> None:
        """A Close that ends leaves nothing in flight."""
        self.crowd.abort()
        self._settle()

    def moved(self, before: GuardState, now: float) -> None:
        """As the guard's service moves its gate."""
        state, crowd = self.state, self.crowd
        self._hold(now)
        if state.paused is not before.paused:
            (crowd.freeze if state.paused else crowd.resume)(now)
        if state.gate is Gate.OPEN:
            if before.gate is Gate.CLOSED:
                crowd.turnstile.open(state.weights.version or 0)
        elif before.gate is Gate.OPEN or state.closed_reason is not before.closed_reason:
            crowd.turnstile.close(state.closed_reason)
            if state.closed_reason in HOPELESS and crowd.turnstile.kept:
                crowd.turnstile.cut_kept()
        self._settle()

    def _hold(self, now: float) -> None:
        weights = self.state.weights
        held = Held(weights.version or 0, weights.digest, self.resident)
        if held != self.crowd.held:
            self.crowd.hold(now, held)

    # a trainer's calls ----------------------------------------------------------------------------------------------

    def take_call(self, call: Call, now: float, answer: Answer) -> None:
        """One of the four; the answer comes when it has come to its end."""
        self.advance(now)
        session, why = self.session, refusal(self.state, self.session, call)
        if why or session is None:
            answer(why)
            return
        if call.phase == "update" and not (call.misfits or session.touched):
            self.apply(Touching(session.push_id), now)
            if self.state.weights.state is not WeightsState.UPDATING:
                session.refuse()
                answer("this transfer has ended")
                return
            session.touch()
        self.on_call(call)
        if call.phase == "update" and session.touched:
            self.resident = "sha256:garbage"
        session.begin(call, now + self._damage.seconds(OperationName.TRANSFER) / 4, answer)
        if session.ends <= now:
            self._end_call(session, now)

    def _end_call(self, session: ModelSession, now: float) -> None:
        ended = session.end()
        if ended is None:
            return
        call, answer = ended
        if not session.goes_on:
            answer("this transfer has ended")
            return
        failure = MISFIT if call.misfits else None
        if call.phase == "update" and call.part is not None and failure is None:
            failure, session.breaks = session.breaks, None
            session.arrived.parts.append(call.part)
            session.arrived.holders.add(call.holder)
        if call.phase == "finish":
            if self._damage.wrong_digest and session.arrived.is_whole:
                self._damage.wrong_digest = False
                session.arrived.parts = [replace(part, content="sha256:other") for part in session.arrived.parts]
            failure = session.finished(call)
        if failure is None and call.phase != "finish":
            answer("")
            return
        session.refuse()
        if failure is None:
            self._damage.fails.pop(OperationName.TRANSFER, None)
            source = DigestSource.ENGINES_ONLY if call.told is None else DigestSource.TRAINER
            self._sent, self.sent_by = (session.arrived.digest, source), frozenset(session.arrived.holders)
        else:
            self._damage.fails[OperationName.TRANSFER] = failure
        self._pending = Pending(session.operation, now)
        answer("" if failure is None else failure.message)

    def _abandon(self, operation: OperationRecord, now: float) -> None:
        super()._abandon(operation, now)
        session = self.session
        if session is not None:
            session.refuse()
            if session.call is not None:  # it comes to its end first, and keeps the deadline by itself
                left_s = operation.command.deadline_seconds if isinstance(operation.command, Transfer) else 0.0
                self._pending = Pending(operation, max(now, min(session.ends, operation.started + left_s)))

    # operations -----------------------------------------------------------------------------------------------------

    def _begin(self, operation: OperationRecord, now: float) -> None:
        command, crowd = operation.command, self.crowd
        if isinstance(command, Close):
            given_s = command.deadline_seconds
            ends = now + min(command.drain_timeout_seconds, given_s - min(2 * PATIENCE_S, given_s / 2))
            if command.mode is PauseMode.WAIT and self.in_flight and not crowd.turnstile.kept and ends > now:
                self._waiting = operation, ends
            else:
                self._pause(operation, now)
            return
        if isinstance(command, Transfer) and command.push is not None:
            breaks = self._damage.fails.pop(OperationName.TRANSFER, None)
            self.session = ModelSession(operation, command.push, breaks)
        self._not_reset = self._damage.fails.get(OperationName.VERIFY) if self._cannot_reset() else None
        if operation.name is OperationName.VERIFY and self._not_reset is None:
            crowd.reset_caches()
            crowd.turnstile.taint_kept()
            if self.state.paused:
                self.apply(Resumed(), now)
        super()._begin(operation, now)
        self._hold(now)

    def _cannot_reset(self) -> bool:
        failure = self._damage.fails.get(OperationName.VERIFY)
        return failure is not None and failure.reason is FailureReason.CACHE_RESET_FAILED

    def _pause(self, operation: OperationRecord, now: float) -> None:
        command = operation.command
        super()._begin(operation, now)
        if isinstance(command, Close) and command.mode is PauseMode.KEEP and not self.state.draining:
            self.crowd.keep(now, command.keep_seconds)
        else:
            self.crowd.turnstile.let_go()
        self._settle()

    def _give_up(self, operation_id: int) -> None:
        if self._waiting is not None and self._waiting[0].id == operation_id:
            self._waiting = None
        if self._pending is not None and self._pending.operation.id == operation_id:
            self._cut_tainted(self._pending.operation)
        if self.session is not None and self.session.push_id == operation_id:
            self._end_session()
        super()._give_up(operation_id)

    def _end_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.refuse()
            if (ended := session.end()) is not None:
                ended[1]("this transfer has ended")

    def _cut_tainted(self, operation: OperationRecord) -> None:
        if operation.name is OperationName.VERIFY:
            self.crowd.turnstile.cut_tainted()
            self._settle()

    def _finish(self, operation: OperationRecord, now: float) -> None:
        command, source = operation.command, self.state.staged_source
        if isinstance(command, Transfer) and source is not None:
            read = self._shelf.read(source.root, source.path)
            if isinstance(read, str) and read != command.digest:
                text = f"{source.path!r} is not what was staged"
                self._damage.fails[OperationName.TRANSFER] = fault(FailureReason.CHECKPOINT_CHANGED, text)
        if operation.name is OperationName.VERIFY and self._not_reset is not None:
            self._damage.fails[OperationName.VERIFY] = self._not_reset  # whatever was healed since it began
        if operation.name in self._damage.fails:
            self._cut_tainted(operation)
        if self.session is not None and self.session.push_id == operation.id:
            self._end_session()
        super()._finish(operation, now)

    def _result(self, operation: OperationRecord, digest: str) -> Staged | Transferred | ProbeResult | None:
        result = super()._result(operation, digest)
        pushed = isinstance(operation.command, Transfer) and operation.command.push is not None
        if isinstance(result, Transferred) and not pushed:
            self.sent_by = frozenset()
        if isinstance(result, Transferred) and self._damage.wrong_digest and not pushed:
            self._damage.wrong_digest = False
            self.resident = "sha256:other"
            return result.model_copy(update={"digest": self.resident})
        if isinstance(result, Transferred) and self._damage.silent:
            self._damage.silent = False
            self.resident += SILENT
        return result
