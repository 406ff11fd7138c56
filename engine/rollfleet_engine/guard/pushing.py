"""A trainer's push, from the operator's Transfer to its end: the trainer calls the four phases, this keeps their order.

The transfer's operation waits here for the trainer; the calls of the native routes run in tasks of their own, one at a
time, so that a trainer that hangs up does not stop an engine half-way. Whatever fails in a phase ends the transfer, and
is told to both: to the trainer as the answer to its call, to the operator as the operation's failure.

Layers give up their tensors with the first update call, once what it announces is known to fit the model: until then
a push that comes to nothing leaves the engine as it was. A task begins in a later turn of the loop than the call was
taken in, and waits for that judgement, and a command may come in between. So the task looks again whether the transfer
goes on, and the weights count as touched in the turn in which the engine is first asked.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rollfleet_engine.guard.adapting import timed
from rollfleet_engine.guard.deadline import Deadline
from rollfleet_engine.guard.ports import EngineAdapter, EngineError, Received
from rollfleet_engine.weights.coverage import Form
from rollfleet_protocol.commands import Push, Transfer
from rollfleet_protocol.pushes import TensorList, UpdateInfo
from rollfleet_protocol.state import DigestSource, FailureReason, Transferred


class OutOfOrderError(Exception):
    """A call of the trainer's that does not belong here now; the message names the right order. Nothing was done."""


class SupersededError(OutOfOrderError):
    """A newer epoch has begun, and nothing of this transfer counts any more."""


class Judge(Protocol):
    """As Stager.judge."""

    def __call__(self, tensors: Mapping[str, Form], *, whole: bool) -> Coroutine[Any, Any, None]: ...


JUDGES_LEAD_S = 1.0
LONGEST_GIVEN = 100  # characters of a trainer's own words in a refusal
_ENDED = "this transfer has ended"
_PICKLED = (
    "ipc_handles_pickled is refused: reading a pickle may run any code. Send ipc_handles as JSON, as rollfleet_trainer "
    "does (IpcSender, or GuardClient in place of vLLM's HTTP client), or consent to pickles by "
    "spec.weightTransfer.insecureSerialization: Allowed"
)


def _nothing() -> None:
    """After a phase that is not the last."""


class PushSession:
    """One push. `touch` is called before the first call that may put old tensors away; False: it must not be made.

    `judge` raises EngineError where tensors do not fit the model. `unpickles`: the spec consents to what a trainer
    pickled (insecureSerialization).
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        command: Transfer,
        push: Push,
        deadline: Deadline,
        touch: Callable[[], bool],
        judge: Judge,
        unpickles: bool = False,
    ) -> None:
        self._unpickles = unpickles
        self._judge = judge
        self._adapter = adapter
        self._command = command
        self._push = push
        self._deadline = deadline
        self._touch = touch
        self._began = time.monotonic()
        self._outcome: asyncio.Future[Transferred] = asyncio.get_running_loop().create_future()
        self._call: asyncio.Task[None] | None = None
        self._started = False
        self._begun = False  # the workers were told to make ready for tensors
        self._updates = 0
        self._over = False
        self._superseded = ""  # by what
        self._concluded = asyncio.Event()
        self._taken = False
        self._broke_off = ""  # what the trainer says of it
        self._reading = ""  # the phase whose call's body is on its way
        self._ready = asyncio.Event()  # the workers are where an update can start
        self._seconds: dict[str, float] = {}
        self._judging: asyncio.Task[None] | None = None

    async def run(self, *, recover: bool) -> Transferred:
        """Wait for the trainer's last call. Raises EngineError as its calls do, or that it has not come.

        `recover`: an update before left the workers half-way; the trainer's first call waits until they are put back.
        """
        try:
            if recover:
                await self._adapter.recover(self._deadline.left())
            self._ready.set()
            async with asyncio.timeout(self._deadline.left()):
                return await asyncio.shield(self._outcome)
        except TimeoutError:
            message = f"the trainer did not {self._next()} within {self._deadline.seconds:g} s"
            raise await self._failed(EngineError(FailureReason.DEADLINE_EXCEEDED, message)) from None
        except EngineError as error:
            raise await self._failed(error) from error
        finally:
            await self._end()
            if self._outcome.done():
                self._outcome.exception()  # seen, also where nobody waits for it any more

    def _next(self) -> str:
        if self._call is not None and not self._call.done():
            return f"come to the end of {self._call.get_name()}"
        if not self._started:
            return "call start_weight_update"
        return "call finish_weight_update" if self._updates else "call update_weights"

    async def _failed(self, error: EngineError) -> EngineError:
        """Until the third phase no tensor was loaded, and a reset gives the layers back what they had.

        It also leaves the trainer's group: what a trainer forms next may have the same name.
        """
        await self._end()
        if self._updates > 0:
            error.touched = True
        else:
            error.unreset = not await self._put_back()
            error.touched = error.unreset and self._begun
        return error

    async def _put_back(self) -> bool:
        left_s = self._deadline.rest()
        if left_s <= 0:
            return False
        recovering = asyncio.create_task(self._adapter.recover(left_s))
        try:
            await asyncio.shield(recovering)
        except EngineError:
            return False  # the failure that led here is the one to tell
        except asyncio.CancelledError:
            await asyncio.wait({recovering}, timeout=left_s)  # what comes next is for whole workers
            if not recovering.done():
                recovering.cancel()
            elif not recovering.cancelled():
                recovering.exception()  # seen: nobody waits for it any more
            raise
        return True

    async def _end(self) -> None:
        """No call is taken any more, and the one that runs has ended: it keeps the deadline by itself."""
        self.refuse()
        self._ready.set()  # who waits for it is refused
        if self._call is not None and not self._call.done():
            await asyncio.wait({self._call})

    def refuse(self) -> None:
        """Take no call any more, and begin none that was taken but has not begun."""
        self._over = True
        self._judge_no_more()

    def _judge_no_more(self) -> None:
        """Nothing has been asked of the engine by then, so nobody needs to wait for the file system."""
        if self._judging is not None:
            self._judging.cancel()

    def abandon(self, why: str) -> None:
        """Wait for the trainer no longer: something newer has begun."""
        self._superseded = why
        self._settle(EngineError(FailureReason.CANCELLED, why))
        self._judge_no_more()

    def conclude(self, *, taken: bool) -> None:
        """The operation has ended; whether the guard's state has taken the weights as this transfer's."""
        self._taken = taken
        self._concluded.set()

    def _settle(self, outcome: Transferred | EngineError) -> None:
        if self._outcome.done():
            return
        if isinstance(outcome, EngineError):
            self._outcome.set_exception(outcome)
        else:
            self._outcome.set_result(outcome)

    # --- the trainer's calls

    @contextmanager
    def taking(self, phase: str) -> Iterator[None]:
        """While the body of this phase's call is read: nothing is read of a call that would be refused anyway.

        Raises OutOfOrderError.
        """
        self._require_turn(phase)
        self._reading = phase
        try:
            yield
        finally:
            self._reading = ""

    def _require_turn(self, phase: str) -> None:
        """The call belongs here now, as far as can be told without its body."""
        started, updated = self._started, self._updates > 0
        holds, otherwise = {
            "init": (not started, "finish_weight_update comes before another init_weight_transfer_engine"),
            "start": (not started, "the update was started: update_weights comes next"),
            "update": (started, "start_weight_update comes before update_weights"),
            "finish": (updated, "start_weight_update and update_weights come before finish_weight_update"),
        }[phase]
        self._require(holds, otherwise)

    async def init(self, info: Mapping[str, Any]) -> None:
        """Phase 1. Not needed where the group is the one of the update before."""
        self._require_turn("init")
        for name, wanted in (("rank_offset", self._push.rank_offset), ("world_size", self._push.world_size)):
            given = info.get(name, wanted)
            self._require(given == wanted, f"{name} is {wanted} in this update, not {repr(given)[:LONGEST_GIVEN]}")
        await self._perform("init", lambda left_s: self._adapter.push_init(self._push.backend, info, left_s))

    async def start(self, tensors: TensorList | None = None, *, whole: bool = False) -> None:
        """Phase 2. What the trainer says that it will send is compared with the model; nothing is touched."""
        self._require_turn("start")
        self._started = True

        async def start(left_s: float) -> None:
            if tensors is not None:
                await self._require_fit(tensors, left_s, whole=whole)

        await self._perform("start", start)

    async def update(self, info: UpdateInfo) -> None:
        """Phase 3, as often as the trainer likes."""
        self._require_turn("update")

        async def update(left_s: float) -> None:
            if info.ipc_handles_pickled is not None and not self._unpickles:
                raise EngineError(FailureReason.TRANSFER_FAILED, _PICKLED)
            if not self._begun:
                await self._require_fit(info, left_s)
                await self._begin()
                self._require_unbroken()
            self._updates += 1
            await self._adapter.push_update(info.model_dump(exclude_unset=True), self._deadline.left())

        await self._perform("update", update)

    async def _require_fit(self, tensors: TensorList, left_s: float, *, whole: bool = False) -> None:
        forms = {each.name: (each.dtype, each.shape) for each in tensors.tensors()}
        own_s = left_s - min(JUDGES_LEAD_S, left_s / 4)  # so that the transfer ends by these words and no others
        self._judging = asyncio.create_task(self._judge(forms, whole=whole))
        try:
            async with asyncio.timeout(own_s):
                await self._judging
        except TimeoutError:
            message = f"the model's own tensors could not be read within {own_s:g} s: does its file system answer?"
            raise EngineError(FailureReason.DEADLINE_EXCEEDED, message) from None
        except asyncio.CancelledError:
            self._require_unbroken()  # by whoever ended the transfer
            raise
        finally:
            self._judging = None

    async def _begin(self) -> None:
        """The engine's own second phase, in the turn in which the transfer is seen to go on."""
        self._require_unbroken()
        if not self._touch():
            self.refuse()
            raise OutOfOrderError(_ENDED)
        self._begun = True
        seconds: dict[str, float] = {}
        try:
            with timed(seconds, "start"):
                await self._adapter.push_start(self._deadline.left())
        finally:
            self._count("start", seconds["start"])
            self._count("update", -seconds["start"])  # of the call that it is part of

    async def finish(self, weight_version: str | None, digest: str | None) -> None:
        """Phase 4. A label that is not this update's version is refused: it would name weights that are not these."""
        self._require_turn("finish")
        version = self._command.version
        self._require(
            weight_version in (None, str(version)), f"weight_version is {str(version)!r} here, not {weight_version!r}"
        )

        expected = digest or self._command.digest
        received: list[Received] = []

        async def finish(left_s: float) -> None:
            received.append(await self._adapter.push_finish(expected, version, left_s))

        await self._perform("finish", finish, lambda: self._settle(self._transferred(received[0], expected)))
        await self._concluded.wait()  # in the next turns of the loop, and a command may come before
        if not self._taken:
            raise self._ended()

    def abort(self, why: str) -> None:
        """The trainer breaks off. At any time: a call of its that runs comes to its end, and is no success any more.

        What that call fails with may be why the trainer broke off, and it may have heard of it first.
        """
        self._require_goes_on()
        self._broke_off = f'the trainer broke off: "{why}"'
        self._judge_no_more()
        if self._call is None or self._call.done():
            self._end_broken_off()

    def _end_broken_off(self) -> None:
        if self._broke_off:
            self._settle(EngineError(FailureReason.TRANSFER_FAILED, self._broke_off))

    def _require_unbroken(self) -> None:
        self._end_broken_off()
        self._require_goes_on()

    def _require(self, holds: bool, otherwise: str) -> None:
        self._require_goes_on()
        if self._reading:
            raise OutOfOrderError(f"the body of {self._reading} is on its way: one call at a time")
        if self._call is not None and not self._call.done():
            raise OutOfOrderError(f"{self._call.get_name()} is running: one call at a time")
        if not holds:
            raise OutOfOrderError(otherwise)

    def _require_goes_on(self) -> None:
        if self._over or self._broke_off or self._outcome.done():
            raise self._ended()

    def _ended(self) -> OutOfOrderError:
        return SupersededError(f"{_ENDED}: {self._superseded}") if self._superseded else OutOfOrderError(_ENDED)

    async def _perform(
        self, phase: str, call: Callable[[float], Coroutine[Any, Any, None]], then: Callable[[], None] = _nothing
    ) -> None:
        self._call = asyncio.create_task(self._guarded(phase, call, then), name=phase)
        await asyncio.shield(self._call)

    async def _guarded(
        self, phase: str, call: Callable[[float], Coroutine[Any, Any, None]], then: Callable[[], None]
    ) -> None:
        await self._ready.wait()
        self._require_unbroken()
        seconds: dict[str, float] = {}
        try:
            with timed(seconds, phase):
                await call(self._deadline.left())
        except EngineError as error:
            self._settle(self._with_words(error))
            raise
        except OutOfOrderError:
            raise  # the transfer has ended already
        except Exception as error:
            self._settle(EngineError(FailureReason.TRANSFER_FAILED, f"{phase}: {type(error).__name__}: {error}"))
            raise
        finally:
            self._count(phase, seconds[phase])
        self._require_unbroken()  # what came to its end for nobody is no success
        then()

    def _count(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _with_words(self, error: EngineError) -> EngineError:
        """A transfer that failed on the way may have been broken off at the other end; a wrong tensor was not."""
        words = self._broke_off
        if words and error.reason is FailureReason.TRANSFER_FAILED and words not in error.message:
            error.message += f"; {words}"
        return error

    def _transferred(self, received: Received, expected: str | None) -> Transferred:
        return Transferred(
            epoch=self._command.epoch,
            version=self._command.version,
            digest=received.digest,
            tensors=received.tensors,
            bytes=received.bytes,
            layers=received.layers,
            seconds=time.monotonic() - self._began,
            phase_seconds=dict(self._seconds),
            digest_source=DigestSource.ENGINES_ONLY if expected is None else DigestSource.TRAINER,
        )
