"""vLLM's native control routes, as the sender of an armed push may use them.

They carry no epoch and no incarnation, so the caller's identity binds them to the update whose sender it is. The guard
never passes them on: it drives the engine by itself, and reads what every worker says of each phase.
"""

from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse, Response

from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.guard.pushing import OutOfOrderError, PushSession
from rollfleet_engine.guard.service import GuardService, RejectedError
from rollfleet_engine.guard.states import Rejection
from rollfleet_protocol.pushes import FinishCall, InitCall, StartCall, UpdateCall
from rollfleet_protocol.refusals import RefusalReason

LARGEST_BODY = 64 << 20  # bytes: names and shapes of a million tensors

Act = Callable[[bytes], Awaitable[Response]]


class NativeRoutes:
    """Handlers by path, all POST. Answers are vLLM's own; raises RejectedError and pydantic.ValidationError."""

    def __init__(self, service: GuardService) -> None:
        self._service = service
        self.acts: dict[str, Act] = {
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/pause": self._told({"status": "paused"}),
            "/resume": self._told({"status": "resumed"}),
        }

    def takes(self, caller: Caller, path: str) -> bool:
        """Whether this path is open to this caller now."""
        return path in self.acts and self._service.is_sender(caller)

    async def _init(self, body: bytes) -> Response:
        call = InitCall.model_validate_json(body)
        await self._calling(lambda session: session.init(call.init_info))
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start(self, body: bytes) -> Response:
        StartCall.model_validate_json(body.strip() if body.strip() not in (b"", b"null") else b"{}")
        await self._calling(lambda session: session.start())
        return JSONResponse({"message": "Weight update started"})

    async def _update(self, body: bytes) -> Response:
        call = UpdateCall.model_validate_json(body)
        await self._calling(lambda session: session.update(call.update_info))
        return JSONResponse({"message": "Weights updated"})

    async def _finish(self, body: bytes) -> Response:
        call = FinishCall.model_validate_json(body.strip() if body.strip() not in (b"", b"null") else b"{}")
        await self._calling(lambda session: session.finish(call.weight_version, call.digest))
        return JSONResponse({"message": "Weight update finished"})

    def _told(self, answer: dict[str, str]) -> Act:
        message = "the guard has paused this engine, and resumes it when the new weights are verified: nothing was done"

        async def tell(body: bytes) -> Response:
            return JSONResponse(answer | {"message": message})

        return tell

    async def _calling(self, call: Callable[[PushSession], Awaitable[None]]) -> None:
        session = self._service.push
        if session is None:
            message = "no transfer of this epoch is running: it has ended, or the operator has not begun it"
            raise RejectedError(Rejection(RefusalReason.ORDER_VIOLATION, message))
        try:
            await call(session)
        except OutOfOrderError as error:
            raise RejectedError(Rejection(RefusalReason.ORDER_VIOLATION, str(error))) from error
        except EngineError as error:
            raise RejectedError(Rejection(RefusalReason.TRANSFER_FAILED, f"{error.reason}: {error.message}")) from error
