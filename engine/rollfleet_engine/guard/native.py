"""vLLM's native control routes, as the sender of an armed push may use them.

They carry no epoch and no incarnation, so the caller's identity binds them to the update whose sender it is. The guard
never passes them on: it drives the engine by itself, and reads what every worker says of each phase.

A body takes its time, and another push may have begun when it is there. So the push that a call is for is the one at
its head, and both the push and the caller's right are looked at again before anything is done.

One more path is ours: by /abort_weight_update a trainer that breaks off says why, also while a call of its runs.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.guard.pushing import OutOfOrderError, PushSession, SupersededError
from rollfleet_engine.guard.service import GuardService, RejectedError
from rollfleet_engine.guard.states import Rejection
from rollfleet_protocol.pushes import (
    HOLDER_HEADER,
    MOST_TENSORS,
    AbortCall,
    FinishCall,
    InitCall,
    StartCall,
    UpdateCall,
)
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.words import visible

# Bytes. A tensor's name, dtype and shape take about 100: models of today have up to 140,000 (Kimi K2: 61 layers, 384
# experts, 3 projections with scales). More can come in several update calls.
LARGEST_BODY = 16 << 20
LARGEST_INIT = 64 << 10  # bytes: an address, a port, a few numbers and names
LARGEST_WORD = 1 << 10  # bytes: of calls that say next to nothing
LARGEST_REASON = 8 << 10  # bytes: 1000 characters, each escaped

MOST_VALUES = 6 * MOST_TENSORS  # of an update: a name, a dtype, up to four dimensions of each tensor
MOST_LISTS = MOST_TENSORS + 16  # one shape of each

Read = Callable[[int], Awaitable[bytes]]  # the body, which has at most so many bytes


@dataclass(frozen=True)
class _Phase:
    """One of the four: its name, the bytes of its largest body, what it does, what is answered."""

    name: str
    largest: int
    act: Callable[[PushSession, bytes], Awaitable[None]]
    message: str


async def _init(session: PushSession, body: bytes) -> None:
    await session.init(InitCall.model_validate_json(body).init_info)


async def _start(session: PushSession, body: bytes) -> None:
    _require_few_values(body)
    call = StartCall.model_validate_json(_or_empty(body))
    await session.start(call.tensors, whole=call.whole)


async def _update(session: PushSession, body: bytes) -> None:
    _require_few_values(body)
    await session.update(UpdateCall.model_validate_json(body).update_info)


async def _finish(session: PushSession, body: bytes) -> None:
    call = FinishCall.model_validate_json(_or_empty(body))
    await session.finish(call.weight_version, call.digest)


def _require_few_values(body: bytes) -> None:
    """Counted before they are parsed: 16 MiB of "1,1,1" would take more than 1 GiB (measured, pydantic 2.14)."""
    values, lists = body.count(b","), body.count(b"[") + body.count(b"{")
    if values > MOST_VALUES or lists > MOST_LISTS:
        message = f"{values} commas and {lists} brackets: at most {MOST_VALUES} and {MOST_LISTS} in one call"
        raise _refused(message, RefusalReason.INVALID_REQUEST)


def _or_empty(body: bytes) -> bytes:
    """vLLM's own client sends no body, or null, where there is nothing to say."""
    return b"{}" if body.strip() in (b"", b"null") else body


_PHASES: Mapping[str, _Phase] = {
    "/init_weight_transfer_engine": _Phase("init", LARGEST_INIT, _init, "Weight transfer initialized"),
    "/start_weight_update": _Phase("start", LARGEST_BODY, _start, "Weight update started"),
    "/update_weights": _Phase("update", LARGEST_BODY, _update, "Weights updated"),
    "/finish_weight_update": _Phase("finish", LARGEST_WORD, _finish, "Weight update finished"),
}
_ABORT = "/abort_weight_update"
_TOLD: Mapping[str, str] = {"/pause": "paused", "/resume": "resumed"}
PATHS = frozenset({*_PHASES, *_TOLD, _ABORT})
_NOTHING_DONE = "the guard has paused this engine, and resumes it when the new weights are verified: nothing was done"


class NativeRoutes:
    """What is answered, all by POST. Answers are vLLM's own."""

    def __init__(self, service: GuardService) -> None:
        self._service = service

    def takes(self, caller: Caller, path: str) -> bool:
        """Whether this path is open to this caller now."""
        return path in PATHS and self._service.is_sender(caller)

    def stranger(self, holder: str) -> str:
        """Why this process of the sender's account may not call; empty where it may."""
        push = self._service.state_of_push()
        if push is None or push.holder in ("", holder):
            return ""
        who = f"{holder!r} (header {HOLDER_HEADER})" if holder else f"a call without header {HOLDER_HEADER}"
        return f"the sender of this update is {push.holder!r}, and this is {who}: another process of its account"

    async def answer(self, caller: Caller, path: str, read: Read) -> Response:
        """Of a call whose path is open to the caller. Raises RejectedError, ValidationError, and what `read` raises."""
        if path in _TOLD:
            await read(LARGEST_WORD)
            return JSONResponse({"status": _TOLD[path], "message": _NOTHING_DONE})
        session = self._service.push
        if session is None:
            raise _refused("no transfer of this epoch is running: it has ended")
        try:
            if path == _ABORT:
                call = AbortCall.model_validate_json(await read(LARGEST_REASON))
                self._require_same(session, caller, path)
                session.abort(visible(call.reason))
                return JSONResponse({"message": "Weight update aborted"})
            phase = _PHASES[path]
            with session.taking(phase.name):
                body = await read(phase.largest)
            self._require_same(session, caller, path)
            await phase.act(session, body)
        except SupersededError as error:
            raise _refused(str(error), RefusalReason.STALE_EPOCH) from error
        except OutOfOrderError as error:
            raise _refused(str(error)) from error
        except EngineError as error:
            raise _refused(f"{error.reason}: {error.message}", RefusalReason.TRANSFER_FAILED) from error
        return JSONResponse({"message": phase.message})

    def _require_same(self, session: PushSession, caller: Caller, path: str) -> None:
        if session is not self._service.push or not self.takes(caller, path):
            raise _refused("the transfer of this call has ended while its body was on its way")


def _refused(message: str, reason: RefusalReason = RefusalReason.ORDER_VIOLATION) -> RejectedError:
    return RejectedError(Rejection(reason, message))
