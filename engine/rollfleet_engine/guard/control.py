"""The control port: who may, what is asked, what came of it. TLS and the listener are the lifecycle's."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollfleet_engine.guard.answers import STATUS_OF, Answer, Receive, Scope, Send, refusal
from rollfleet_engine.guard.audit import NATIVE, OPERATOR, STATE, TRAINER, UNKNOWN, Audit, Call
from rollfleet_engine.guard.bodies import BodyError, GoneError, read_body
from rollfleet_engine.guard.doors import welcome
from rollfleet_engine.guard.identity import Caller, Verifier
from rollfleet_engine.guard.keys import IdentityError
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.native import PATHS, NativeRoutes
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
    Sleep,
    Transfer,
    Verify,
    Wake,
)
from rollfleet_protocol.engine_config import OperatorIdentity
from rollfleet_protocol.pushes import HOLDER_HEADER
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import EngineState
from rollfleet_protocol.words import fitted

LARGEST_BODY = 1 << 20  # bytes
BODY_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 55.0
REQUEST_TIMEOUT_S = 75.0  # the longest poll, the longest wait for a Cancel, and some
LONGEST_HOLDER = 512  # characters
LONGEST_MESSAGE = 1000  # characters of a validation error
_CALLER = "rollfleet.caller"  # in the scope: who was let in
GONE = "Gone"  # the caller went away before it had said all

COMMANDS: dict[str, type[Command]] = {
    "prepare": Prepare,
    "close": Close,
    "arm": Arm,
    "transfer": Transfer,
    "verify": Verify,
    "open": Open,
    "cancel": Cancel,
    "sleep": Sleep,
    "wake": Wake,
}
_DONE_AT_ONCE = (Arm, Open, Cancel)


@dataclass(frozen=True)
class Told:
    """What is answered, and what the audit says of it."""

    response: Response
    outcome: str
    command: Command | None = None


class ControlApp:
    """The ASGI application of port 8001. Nothing is read of a request before its caller is known."""

    def __init__(self, service: GuardService, verifier: Verifier, operator: OperatorIdentity, log: GuardLog) -> None:
        self._service = service
        self._verifier = verifier
        self._operator = Caller(operator.subject, operator.uid)
        self._log = log
        self._audit = Audit(log, service.tallies)
        self._native = NativeRoutes(service)
        self._api = Starlette(
            routes=[
                Route(STATE_PATH, self._endpoint(STATE, self._state), methods=["GET"]),
                Route(PROBE_PATH, self._endpoint("probe", self._probe), methods=["POST"]),
                *(
                    Route(f"{PREFIX}/{name}", self._endpoint(name, self._obeying(model)), methods=["POST"])
                    for name, model in COMMANDS.items()
                ),
                *(Route(path, self._for_sender(path), methods=["POST"]) for path in PATHS),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self._api.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S) as limit:
                denied = await self._deny(scope)
                if denied is None:
                    if scope["path"] in PATHS:
                        limit.reschedule(None)  # the transfer's own deadline bounds them
                    await self._api(scope, receive, send)
                else:
                    await denied(send)
        except TimeoutError:
            self._log.write("control.timeout", path=fitted(scope["path"], 200), seconds=REQUEST_TIMEOUT_S)

    def close(self) -> None:
        """The process ends: what the audit holds back is written."""
        self._audit.close()

    async def _deny(self, scope: Scope) -> Answer | None:
        try:
            caller = await self._verifier.verify(_bearer(scope))
        except IdentityError as error:
            return self._denied(scope, RefusalReason.UNAUTHENTICATED, str(error), (b"www-authenticate", b"Bearer"))
        if caller != self._operator and not self._native.takes(caller, scope["path"]):
            message = f"{caller.subject} (uid {caller.uid}) does not control this engine"
            return self._denied(scope, RefusalReason.FORBIDDEN, message)
        if not welcome(scope, as_guest=caller != self._operator):
            message = "too many calls of this push's sender run: send this again when one of them has ended"
            return self._denied(scope, RefusalReason.BUSY, message)
        scope[_CALLER] = caller
        return None

    def _denied(self, scope: Scope, reason: RefusalReason, message: str, *headers: tuple[bytes, bytes]) -> Answer:
        """Counted and told first: whatever becomes of the answer."""
        self._audit.denied(scope, Call(_command_of(scope["path"]), reason, STATUS_OF[reason]), message)
        return refusal(reason, message, *headers)

    def _for_sender(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """To the operator these are closed as the engine's other control routes are."""

        async def answer(request: Request) -> Told:
            async def read(largest: int) -> bytes:
                return await read_body(request.receive, largest, BODY_TIMEOUT_S)

            try:
                return Told(await self._native.answer(request.scope[_CALLER], path, read), "Answered")
            except RejectedError as error:
                return _refused(error.rejection.reason, error.rejection.message)

        open_to_sender = self._endpoint(NATIVE, answer)

        async def endpoint(request: Request) -> Response:
            if not self._native.takes(request.scope[_CALLER], path):
                return await self._no_route(request, HTTPException(404))
            if words := self._native.stranger(request.headers.get(HOLDER_HEADER, "")[:LONGEST_HOLDER]):
                told = _refused(RefusalReason.FORBIDDEN, words)
                self._tell(request, _command_of(path), told, 0.0)
                return told.response
            return await open_to_sender(request)

        return endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Also for a route of ours asked by another method."""
        path = request.url.path
        if is_control(path):
            message = f"{path} of the engine is closed to everybody: {cure_of(path)}"
            told = _refused(RefusalReason.ORDER_VIOLATION, message)
        else:
            told = _refused(RefusalReason.NOT_FOUND, f"no such route: {request.method} {path[:200]}")
        self._tell(request, _command_of(path), told, 0.0)
        return told.response

    async def _state(self, request: Request) -> Told:
        if request.query_params.get("look") == "true":
            return _state_told(200, self._service.state(), "Answered")
        try:
            after = _integer(request.query_params.get("after"))
            wait_s = float(request.query_params.get("waitSeconds", "0"))
        except ValueError as error:
            return _refused(RefusalReason.INVALID_REQUEST, f"after, waitSeconds: {error}")
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            message = f"waitSeconds: {wait_s:g} is not between 0 and {LONGEST_WAIT_S:g}"
            return _refused(RefusalReason.INVALID_REQUEST, message)
        following = asyncio.create_task(self._service.follow(after, wait_s))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
            state = following.result() if following.done() else self._service.state()
            return _state_told(200, state, "Answered")
        finally:  # a follower that went away must not take the place of one that came
            following.cancel()
            gone.cancel()

    def _obeying(self, model: type[Command]) -> Callable[[Request], Awaitable[Told]]:
        async def obey(request: Request) -> Told:
            command = model.model_validate_json(await read_body(request.receive, LARGEST_BODY, BODY_TIMEOUT_S))
            try:
                state = await self._service.command(command)
            except RejectedError as error:
                return _refused(error.rejection.reason, error.rejection.message, command)
            status = 200 if isinstance(command, _DONE_AT_ONCE) else 202
            return _state_told(status, state, "Accepted", command)

        return obey

    async def _probe(self, request: Request) -> Told:
        body = await read_body(request.receive, LARGEST_BODY, BODY_TIMEOUT_S)
        try:
            report = await self._service.probe(Probe.model_validate_json(body))
        except RejectedError as error:
            return _refused(error.rejection.reason, error.rejection.message)
        return Told(Response(report.model_dump_json(by_alias=True), 200, media_type="application/json"), "Answered")

    def _endpoint(
        self, name: str, act: Callable[[Request], Awaitable[Told]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                told = await act(request)
            except ValidationError as error:
                told = _refused(RefusalReason.INVALID_REQUEST, _explain(error))
            except BodyError as error:
                told = Told(_response(error.answer), error.reason)
            except GoneError:
                told = Told(Response(status_code=400), GONE)
            self._tell(request, name, told, time.perf_counter() - began)
            return told.response

        return endpoint

    def _tell(self, request: Request, name: str, told: Told, seconds: float) -> None:
        command = told.command
        call = Call(
            name,
            told.outcome,
            None if told.outcome == GONE else told.response.status_code,
            None if command is None else command.epoch,
            None if command is None else command.incarnation,
        )
        caller = request.scope[_CALLER]
        self._audit.called(request.scope, caller, call, seconds, OPERATOR if caller == self._operator else TRAINER)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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


def _command_of(path: str) -> str:
    """One word of a fixed set for any path."""
    if path == STATE_PATH:
        return STATE
    name = path.removeprefix(f"{PREFIX}/")
    if path == PROBE_PATH or (name != path and name in COMMANDS):
        return name
    return NATIVE if is_control(path) else UNKNOWN


def _state_told(status: int, state: EngineState, outcome: str, command: Command | None = None) -> Told:
    return Told(Response(state.model_dump_json(by_alias=True), status, media_type="application/json"), outcome, command)


def _refused(reason: RefusalReason, message: str, command: Command | None = None) -> Told:
    return Told(_response(refusal(reason, message)), reason, command)


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")
