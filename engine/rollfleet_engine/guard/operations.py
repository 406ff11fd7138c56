"""Operations: what a command makes the engine do, step by step, under one deadline. The machine decides, this acts."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rollfleet_engine.guard.checkpoints import Stager
from rollfleet_engine.guard.deadline import Deadline
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.ports import EngineAdapter, EngineError
from rollfleet_engine.guard.progress import Teller
from rollfleet_engine.guard.pushing import PushSession
from rollfleet_engine.guard.states import (
    Ended,
    Event,
    Failed,
    GuardState,
    OperationRecord,
    Paused,
    Resumed,
    Slept,
    Touching,
    Woken,
)
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_protocol.commands import Close, PauseMode, Prepare, Push, Sleep, Transfer, Verify, Wake
from rollfleet_protocol.state import (
    Failure,
    FailureReason,
    OperationName,
    ProbeResult,
    Staged,
    Transferred,
    WeightsState,
)

Result = Staged | Transferred | ProbeResult | None

REOPEN_DEADLINE_S = 15.0
# An adapter keeps its deadline by itself; past so much more the guard stops waiting for it.
ADAPTER_GRACE_S = 2.0
# A client that is slow to read its answer, or to send its request, is waited for at most so long.
PATIENCE_S = 5.0
FIRST_LOOK_S = 0.01
LONGEST_LOOK_S = 0.25

# What an error that no adapter foresaw counts as.
_UNFORESEEN = {
    OperationName.PREPARE: FailureReason.CHECKPOINT_INVALID,
    OperationName.CLOSE: FailureReason.PAUSE_FAILED,
    OperationName.TRANSFER: FailureReason.TRANSFER_FAILED,
    OperationName.VERIFY: FailureReason.PROBE_FAILED,
    OperationName.SLEEP: FailureReason.SLEEP_FAILED,
    OperationName.WAKE: FailureReason.SLEEP_FAILED,
    OperationName.REOPEN: FailureReason.PAUSE_FAILED,
}


class Operations:
    """Runs one operation at a time and reports to the machine through `report`."""

    def __init__(
        self,
        adapter: EngineAdapter,
        stager: Stager,
        turnstile: Turnstile,
        log: GuardLog,
        state: Callable[[], GuardState],
        report: Callable[[Event], None],
        require_no_crash: Callable[[asyncio.Task[None]], None],
        backend: str = "",
        unpickles: bool = False,
    ) -> None:
        self._adapter = adapter
        self._backend = backend  # the one that pushes may come by; empty: none, weights come by checkpoints only
        self._unpickles = unpickles  # the spec consents to handles that a trainer pickled
        self._stager = stager
        self._turnstile = turnstile
        self._log = log
        self._state = state
        self._report = report
        self._require_no_crash = require_no_crash
        self._staged: StagedCheckpoint | None = None
        self._task: asyncio.Task[None] | None = None
        self._task_of = 0  # operation id
        self._unfinished: set[asyncio.Task[None]] = set()  # that task, and those given up that have not ended yet
        self._expiry: asyncio.TimerHandle | None = None  # of requests that are kept
        self._pushes: dict[int, PushSession] = {}  # by operation; told how it ended
        self.push: PushSession | None = None  # while a trainer's push is waited for or received

    def start(self, operation: OperationRecord, probe: asyncio.Task[Any] | None = None) -> None:
        """Begin, once every task before has ended, and a probe that gives way has left the engine.

        Every one: who is given up while it waits for its turn ends at once, and the one it waited for is still there.
        """
        before = tuple(task for task in (*self._unfinished, probe) if task is not None and not task.done())
        self._task = asyncio.create_task(self._run(operation, before), name=f"rollfleet-{operation.name}")
        self._unfinished.add(self._task)
        self._task.add_done_callback(self._unfinished.discard)
        self._task.add_done_callback(self._require_no_crash)
        self._task_of = operation.id

    def cancel(self, operation_id: int) -> None:
        """Stop this operation; a call to the engine that changes its scheduler is waited for first."""
        if self._task is not None and self._task_of == operation_id:
            if self.push is not None:
                self.push.refuse()  # now: the task hears of its end only in the next turn of the loop
            self._task.cancel()

    def abandon_push(self, why: str) -> None:
        """Wait for the trainer no longer."""
        if self.push is not None:
            self.push.abandon(why)

    def release(self) -> None:
        """Close the staged checkpoint, after every task that may still read from it."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        readers = {task for task in self._unfinished if not task.done()}
        if not readers:
            staged.close()
            return

        def ended(task: asyncio.Task[None]) -> None:
            readers.discard(task)
            if not readers:
                staged.close()

        for task in tuple(readers):
            task.add_done_callback(ended)

    async def stop(self, timeout_s: float) -> None:
        """End whatever runs; for the end of the process."""
        if self._expiry is not None:
            self._expiry.cancel()
        left = {task for task in self._unfinished if not task.done()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=timeout_s)
        self.release()

    async def _run(self, operation: OperationRecord, before: tuple[asyncio.Task[Any], ...]) -> None:
        taken = False
        try:
            if before:
                await asyncio.wait(before)
            event = await self._event_of(operation)
            taken = isinstance(event, Ended) and self._counts(operation)
            self._report(event)
        finally:
            session = self._pushes.pop(operation.id, None)
            if session is not None:
                session.conclude(taken=taken)

    def _counts(self, operation: OperationRecord) -> bool:
        """Whether its end is waited for: not of one that was given up, nor of an older epoch's that runs out."""
        state = self._state()
        running = state.running is not None and state.running.id == operation.id
        return running and getattr(operation.command, "epoch", state.epoch) == state.epoch

    async def _event_of(self, operation: OperationRecord) -> Event:
        """Its end, whatever it is."""
        try:
            return Ended(operation.id, await self._perform(operation))
        except EngineError as error:
            failure = Failure(reason=error.reason, message=error.message)
            return Failed(operation.id, failure, error.touched, error.unreset)
        except TimeoutError:
            message = f"the engine did not come back within {_deadline_s(operation):g} s"
            return _failed(operation, FailureReason.DEADLINE_EXCEEDED, message, touched=True)
        except Exception as error:  # noqa: BLE001 - the one place: whatever an engine raises becomes the operation's end
            self._log.write("operation.crashed", operation=operation.name, trace=traceback.format_exc())
            reason = _UNFORESEEN[operation.name]
            return _failed(operation, reason, f"{type(error).__name__}: {error}", touched=True)

    async def _perform(self, operation: OperationRecord) -> Result:
        deadline = Deadline(_deadline_s(operation))
        async with asyncio.timeout(deadline.seconds + ADAPTER_GRACE_S):
            match operation.command:
                case Prepare() as command:
                    return await self._prepare(operation, command, deadline)
                case Close() as command:
                    return await self._close(command, deadline)
                case Transfer() as command:
                    return await self._transfer(operation, command, deadline)
                case Verify() as command:
                    return await self._verify(command, deadline)
                case Sleep() as command:
                    await self._sleep(command, deadline)
                case Wake() as command:
                    await self._wake(command, deadline)
                case _:
                    await self._resume(deadline)
        return None

    async def _prepare(self, operation: OperationRecord, command: Prepare, deadline: Deadline) -> Staged:
        began = asyncio.get_running_loop().time()
        tell = Teller(operation.id, self._report)
        try:
            async with asyncio.timeout(deadline.left()):
                staged = await self._stager.stage(command.source, tell)
        except TimeoutError:
            message = f"checkpoint {command.source.path!r}: not staged within {deadline.seconds:g} s{tell.last}"
            raise EngineError(FailureReason.DEADLINE_EXCEEDED, message) from None
        try:
            await self._adapter.share(staged, deadline.left())
        except BaseException:
            staged.close()
            raise
        self.release()
        self._staged = staged
        return Staged(
            epoch=command.epoch,
            version=command.version,
            path=staged.path,
            digest=staged.digest,
            tensors=len(staged.tensors),
            bytes=staged.nbytes,
            seconds=asyncio.get_running_loop().time() - began,
        )

    async def _close(self, command: Close, deadline: Deadline) -> Result:
        if command.mode is PauseMode.WAIT and not self._turnstile.kept:
            # The scheduler runs on meanwhile: a request that is on its way to it would otherwise never end.
            await self._turnstile.wait_empty(min(command.drain_timeout_seconds, _for_draining(deadline)))
        mode = PauseMode.KEEP if command.mode is PauseMode.KEEP else PauseMode.ABORT

        async def pause() -> None:
            await self._adapter.pause(mode, deadline.left())
            self._report(Paused())

        await _to_its_end(pause(), deadline)
        keep = mode is PauseMode.KEEP and not self._state().draining
        if keep:
            self._keep(command.keep_seconds)
        else:
            self._turnstile.let_go()
        await self._empty(deadline, self._abort_rest if keep else self._adapter.abort_all)
        return None

    def _keep(self, seconds: float) -> None:
        self._turnstile.keep(self._adapter.tokens())
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        """The update that they were kept for ended badly, or nobody ended it."""
        if self._turnstile.kept:
            self._log.write("kept.expired", count=self._turnstile.cut_kept(), seconds=seconds)

    async def _abort_rest(self, deadline_s: float) -> None:
        await self._adapter.abort(self._turnstile.requests_in_flight(), deadline_s)

    async def _empty(self, deadline: Deadline, abort: Callable[[float], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        cut_at = loop.time() + min(PATIENCE_S, deadline.left() / 2)
        look_s = FIRST_LOOK_S
        while True:
            # Again and again: a request between the gate and the scheduler arrives there after the pause.
            await abort(deadline.left())
            if await self._turnstile.wait_empty(min(look_s, self._left(deadline))):
                return
            look_s = min(2 * look_s, LONGEST_LOOK_S)
            if loop.time() >= cut_at:
                self._turnstile.cut_all()

    def _left(self, deadline: Deadline) -> float:
        try:
            return deadline.left()
        except EngineError as error:
            message = f"{self._turnstile.in_flight} requests are still in flight after {deadline.seconds:g} s"
            raise EngineError(error.reason, message) from None

    async def _transfer(self, operation: OperationRecord, command: Transfer, deadline: Deadline) -> Transferred:
        staged = self._staged
        if command.push is not None:
            return await self._take_push(operation, command, command.push, deadline)
        if staged is None:
            raise EngineError(FailureReason.CHECKPOINT_CHANGED, "the staged files were let go: Prepare again")
        if self._state().needs_recovery:
            await self._adapter.recover(deadline.left())
        transferred = await self._adapter.apply(staged, command.epoch, command.version, deadline.left())
        self.release()
        return transferred

    async def _take_push(
        self, operation: OperationRecord, command: Transfer, push: Push, deadline: Deadline
    ) -> Transferred:
        if push.backend != self._backend:
            wanted = f"backend is {self._backend}" if self._backend else "names no backend: checkpoints only"
            message = (
                f"the push comes by {push.backend}, and spec.weightTransfer{'.' if self._backend else ' '}{wanted}"
            )
            raise EngineError(FailureReason.TRANSFER_FAILED, message)
        workers = self._adapter.facts().world_size
        if workers != push.workers:
            message = f"this engine has {workers} workers, the ranks were numbered for {push.workers}"
            raise EngineError(FailureReason.TRANSFER_FAILED, message)
        adapter, judge = self._adapter, self._stager.judge
        session = PushSession(adapter, command, push, deadline, lambda: self._touch(operation), judge, self._unpickles)
        self.push = self._pushes[operation.id] = session
        try:
            return await session.run(recover=self._state().needs_recovery)
        finally:
            self.push = None

    def _touch(self, operation: OperationRecord) -> bool:
        """Whether the state has taken it: of an operation that was given up it takes nothing."""
        self._report(Touching(operation.id))
        state = self._state()
        running = state.running is not None and state.running.id == operation.id
        return running and state.weights.state is WeightsState.UPDATING

    async def _verify(self, command: Verify, deadline: Deadline) -> ProbeResult:
        try:
            return await self._reset_and_probe(command, deadline)
        except BaseException:
            self._turnstile.cut_tainted()
            raise

    async def _reset_and_probe(self, command: Verify, deadline: Deadline) -> ProbeResult:
        loop = asyncio.get_running_loop()
        await self._adapter.reset_caches(deadline.left(), kept=self._turnstile.kept > 0)
        self._turnstile.taint_kept()
        await self._resume(deadline)
        began = loop.time()
        logprobs, *other_ranks = await self._adapter.probe(command.probe_tokens, deadline.left())
        return ProbeResult(
            epoch=command.epoch,
            version=command.version,
            tokens=command.probe_tokens,
            logprobs=logprobs,
            other_ranks=tuple(other_ranks),
            seconds=loop.time() - began,
        )

    async def _sleep(self, command: Sleep, deadline: Deadline) -> None:
        if self._turnstile.kept:
            message = (
                f"{self._turnstile.kept} requests are kept, whose cache would be gone: Close in mode abort comes first"
            )
            raise EngineError(FailureReason.SLEEP_FAILED, message)
        await self._adapter.sleep(command.level, deadline.left())
        self._report(Slept(command.level))

    async def _wake(self, command: Wake, deadline: Deadline) -> None:
        tags = tuple(tag for tag in self._state().asleep if tag in command.tags)
        await self._adapter.wake(tags, deadline.left())
        self._report(Woken(tags))

    async def _resume(self, deadline: Deadline) -> None:
        """Exactly once per pause: a second resume can block the ranks of a data-parallel engine (reported by verl)."""
        if not self._state().paused:
            return

        async def resume() -> None:
            await self._adapter.resume(deadline.left())
            self._report(Resumed())

        await _to_its_end(resume(), deadline)


def _for_draining(deadline: Deadline) -> float:
    """Time to wait for requests that end by themselves; what is left is for aborting and cutting the others."""
    return max(0.0, deadline.left() - min(2 * PATIENCE_S, deadline.seconds / 2))


def _deadline_s(operation: OperationRecord) -> float:
    command = operation.command
    return (
        command.deadline_seconds if command is not None and hasattr(command, "deadline_seconds") else REOPEN_DEADLINE_S
    )


def _failed(operation: OperationRecord, reason: FailureReason, message: str, *, touched: bool) -> Failed:
    return Failed(operation.id, Failure(reason=reason, message=message), touched)


async def _to_its_end(work: Coroutine[Any, Any, None], deadline: Deadline) -> None:
    """Not cancelled half-way: whether the scheduler is paused must be known afterwards."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task}, timeout=deadline.rest() + ADAPTER_GRACE_S)
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()  # seen: nobody waits for it any more
        raise
