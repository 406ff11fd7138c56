"""The control port: who may, what is asked, what came of it. TLS and the listener are the lifecycle's."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollfleet_engine.guard.answers import Answer, Receive, Scope, Send, refusal
from rollfleet_engine.guard.doors import welcome
from rollfleet_engine.guard.identity import Caller, IdentityError, Verifier
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.routes import cure_of, is_control
from rollfleet_engine.guard.service import GuardService, RejectedError
from rollfleet_protocol.commands import (
    PREFIX,
    PROBE_PATH,
    STATE_PATH,
    Arm,
    Cancel,
    Close,
    Command,
    Open,
    Prepare,
    Probe,
    Transfer,
    Verify,
)
from rollfleet_protocol.engine_config import OperatorIdentity
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import EngineState

LARGEST_BODY = 1 << 20  # bytes
BODY_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 55.0
REQUEST_TIMEOUT_S = 75.0  # the longest poll, the longest wait for a Cancel, and some
LONGEST_MESSAGE = 1000  # characters of a validation error
DENIALS_EVERY_S = 1.0

COMMANDS: dict[str, type[Command]] = {
    "prepare": Prepare,
    "close": Close,
    "arm": Arm,
    "transfer": Transfer,
    "verify": Verify,
    "open": Open,
    "cancel": Cancel,
}
_DONE_AT_ONCE = (Arm, Open, Cancel)


@dataclass(frozen=True)
class Told:
    """What is answered, and what the log says of it."""

    response: Response
    outcome: str
    epoch: int | None = None


class ControlApp:
    """The ASGI application of port 8001. Nothing is read of a request before its caller is known."""

    def __init__(self, service: GuardService, verifier: Verifier, operator: OperatorIdentity, log: GuardLog) -> None:
        self._service = service
        self._verifier = verifier
        self._operator = Caller(operator.subject, operator.uid)
        self._log = log
        self._denials = _Denials(log)
        self._api = Starlette(
            routes=[
                Route(STATE_PATH, self._state, methods=["GET"]),
                Route(PROBE_PATH, self._endpoint("probe", self._probe), methods=["POST"]),
                *(
                    Route(f"{PREFIX}/{name}", self._endpoint(name, self._obeying(model)), methods=["POST"])
                    for name, model in COMMANDS.items()
                ),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self._api.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                denied = await self._deny(scope)
                if denied is None:
                    await self._api(scope, receive, send)
                else:
                    await denied(send)
        except TimeoutError:
            self._log.write("control.timeout", path=scope["path"], seconds=REQUEST_TIMEOUT_S)

    async def _deny(self, scope: Scope) -> Answer | None:
        try:
            caller = await self._verifier.verify(_bearer(scope))
        except IdentityError as error:
            self._denials.tell(scope, 401, str(error))
            challenge = (b"www-authenticate", b"Bearer")
            return refusal(RefusalReason.UNAUTHENTICATED, str(error), challenge)
        if caller != self._operator:
            message = f"{caller.subject} (uid {caller.uid}) does not control this engine"
            self._denials.tell(scope, 403, message)
            return refusal(RefusalReason.FORBIDDEN, message)
        welcome(scope)
        return None

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Also for a route of ours asked by another method."""
        path = request.url.path
        if is_control(path):
            message = f"{path} of the engine is closed to everybody: {cure_of(path)}"
            return _response(refusal(RefusalReason.ORDER_VIOLATION, message))
        return _response(refusal(RefusalReason.NOT_FOUND, f"no such route: {request.method} {path[:200]}"))

    async def _state(self, request: Request) -> Response:
        if request.query_params.get("look") == "true":
            return _state_response(200, self._service.state())
        try:
            after = _integer(request.query_params.get("after"))
            wait_s = float(request.query_params.get("waitSeconds", "0"))
        except ValueError as error:
            return _response(refusal(RefusalReason.INVALID_REQUEST, f"after, waitSeconds: {error}"))
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            message = f"waitSeconds: {wait_s:g} is not between 0 and {LONGEST_WAIT_S:g}"
            return _response(refusal(RefusalReason.INVALID_REQUEST, message))
        following = asyncio.create_task(self._service.follow(after, wait_s))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
            return _state_response(200, following.result() if following.done() else self._service.state())
        finally:  # a follower that went away must not take the place of one that came
            following.cancel()
            gone.cancel()

    def _obeying(self, model: type[Command]) -> Callable[[bytes], Awaitable[Told]]:
        async def obey(body: bytes) -> Told:
            command = model.model_validate_json(body)
            try:
                state = await self._service.command(command)
            except RejectedError as error:
                return Told(_rejected(error), error.rejection.reason, command.epoch)
            status = 200 if isinstance(command, _DONE_AT_ONCE) else 202
            return Told(_state_response(status, state), "Accepted", command.epoch)

        return obey

    async def _probe(self, body: bytes) -> Told:
        try:
            report = await self._service.probe(Probe.model_validate_json(body))
        except RejectedError as error:
            return Told(_rejected(error), error.rejection.reason)
        return Told(Response(report.model_dump_json(by_alias=True), 200, media_type="application/json"), "Answered")

    def _endpoint(self, name: str, act: Callable[[bytes], Awaitable[Told]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                told = await act(await _body(request))
            except ValidationError as error:
                reason = RefusalReason.INVALID_REQUEST
                told = Told(_response(refusal(reason, _explain(error))), reason)
            except _BodyError as error:
                told = Told(_response(refusal(error.reason, str(error))), error.reason)
            self._log.write(
                "control",
                caller=self._operator.subject,
                command=name,
                epoch=told.epoch,
                outcome=told.outcome,
                status=told.response.status_code,
                seconds=round(time.perf_counter() - began, 6),
            )
            return told.response

        return endpoint


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _BodyError(Exception):
    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def _body(request: Request) -> bytes:
    """The body, bounded in size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BODY:
                    raise _BodyError(RefusalReason.TOO_LARGE, f"the body is over {LARGEST_BODY} bytes")
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise _BodyError(RefusalReason.INVALID_REQUEST, message) from None
    return bytes(body)


def _bearer(scope: Scope) -> str:
    found: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) != 1:
        raise IdentityError("send exactly one Authorization header with a Bearer token")
    scheme, _, token = found[0].decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise IdentityError("the Authorization header must be a Bearer token")
    return token.strip()


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text[:20])


def _explain(error: ValidationError) -> str:
    """Field and cause of each mistake."""
    found = (
        f"{'.'.join(str(part) for part in each['loc']) or 'body'}: {each['msg']}"
        for each in error.errors(include_url=False, include_input=False, include_context=False)
    )
    return str("; ".join(found))[:LONGEST_MESSAGE]


def _state_response(status: int, state: EngineState) -> Response:
    return Response(state.model_dump_json(by_alias=True), status, media_type="application/json")


def _rejected(error: RejectedError) -> Response:
    return _response(refusal(error.rejection.reason, error.rejection.message))


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")


class _Denials:
    """Who was turned away, at most a line a second with a count: a stranger must not fill the log."""

    def __init__(self, log: GuardLog) -> None:
        self._log = log
        self._next = float("-inf")
        self._more = 0

    def tell(self, scope: Scope, status: int, message: str) -> None:
        now = time.monotonic()
        if now < self._next:
            self._more += 1
            return
        self._next = now + DENIALS_EVERY_S
        details: dict[str, Any] = {"unreported": self._more} if self._more else {}
        self._more = 0
        peer = scope.get("client")
        self._log.write(
            "control.denied",
            peer=peer[0] if peer else "",
            path=scope["path"][:200],
            status=status,
            message=message,
            **details,
        )
