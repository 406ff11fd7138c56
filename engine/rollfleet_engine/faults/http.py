"""Faults of calls over HTTP: an application in front of a port, whose calls it counts and strikes."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from rollfleet_engine.faults.injector import Injector, Strike
from rollfleet_engine.faults.orders import Orders
from rollfleet_engine.faults.plan import Call, FaultType
from rollfleet_engine.guard.answers import Answer, AsgiApp, Message, Receive, Scope, Send, document
from rollfleet_engine.guard.control import BODY_TIMEOUT_S, LARGEST_BODY
from rollfleet_engine.guard.routes import RouteClass, classify
from rollfleet_protocol.commands import PREFIX, PROBE_PATH, STATE_PATH

_COMMANDS = (Call.PREPARE, Call.CLOSE, Call.ARM, Call.TRANSFER, Call.VERIFY, Call.OPEN, Call.CANCEL)
_CONTROL = {("POST", f"{PREFIX}/{call.value}"): call for call in _COMMANDS} | {
    ("GET", STATE_PATH): Call.STATE,
    ("POST", PROBE_PATH): Call.PROBE,
}
_SERVING = {("GET", "/health"): Call.HEALTH, ("GET", "/livez"): Call.LIVEZ}
_ORDERS = frozenset({Call.PREPARE, Call.TRANSFER})  # whose bodies say which checkpoint

BAD_GATEWAY = Answer(502, b"502 Bad Gateway\n", media=b"text/plain")
# An answer that never comes to its end: the server closes the connection when the application leaves it there.
_UNFINISHED = {"type": "http.response.start", "status": 502, "headers": [(b"content-length", b"1")]}


class Port(Enum):
    """Which of the engine's two ports."""

    CONTROL = "control"
    SERVING = "serving"


class Hands(Protocol):
    """What can be done to the engine as a whole."""

    async def die(self) -> None:
        """Kill it."""
        ...

    async def hang(self, seconds: float) -> None:
        """Let it stand still for so long. May return at once."""
        ...

    async def restart(self) -> None:
        """Kill it and start it anew."""
        ...


def _is_canary(scope: Scope) -> bool:
    """The operator's question whether there is a guard, which is none of the commands that a plan counts."""
    return all(name != b"authorization" for name, _ in scope["headers"])


def call_of(port: Port, method: str, path: str) -> Call | None:
    """What is counted; None for what never fails."""
    if port is Port.CONTROL:
        return _CONTROL.get((method, path))
    if classify(method, path) is RouteClass.INFERENCE:
        return Call.INFERENCE
    return _SERVING.get((method, path))


class FaultyApp:
    """An ASGI application whose calls fail as the plan says."""

    def __init__(self, app: AsgiApp, port: Port, injector: Injector, hands: Hands, orders: Orders) -> None:
        self._app = app
        self._port = port
        self._injector = injector
        self._hands = hands
        self._orders = orders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(self._port, scope["method"], scope["path"]) if scope["type"] == "http" else None
        if call is None or (call is Call.OPEN and _is_canary(scope)):
            await self._app(scope, receive, send)
            return
        strike = self._injector.strike(call)
        if strike is None:
            await self._pass(call, None, scope, receive, send)
        else:
            await self._fail(call, strike, scope, receive, send)

    async def _pass(self, call: Call, strike: Strike | None, scope: Scope, receive: Receive, send: Send) -> None:
        """An order goes on with the checkpoint that it is to have."""
        if call not in _ORDERS or not self._orders.wanted(self._injector.plan, strike):
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        if body is not None:
            plan = self._injector.plan
            changed = await asyncio.to_thread(self._orders.rewrite, call, body, plan, strike)
            await self._app(_with_length(scope, len(changed)), _replaying(changed, receive), send)

    async def _fail(self, call: Call, strike: Strike, scope: Scope, receive: Receive, send: Send) -> None:
        rule = strike.rule
        match rule.fault:
            case FaultType.REFUSE:
                detail = {"message": rule.words, "type": "InternalServerError", "code": rule.answer_status}
                await document(rule.answer_status, {"error": detail})(send)
            case FaultType.BAD_GATEWAY:
                await BAD_GATEWAY(send)
            case FaultType.DELAY:
                late = await self._held_back(receive)
                await asyncio.sleep(rule.duration_s)
                await self._pass(call, None, scope, late, send)
            case FaultType.CUT:
                await self._pass(call, None, scope, receive, _cutting(send))
            case FaultType.CORRUPT | FaultType.SKIP:
                await self._pass(call, strike, scope, receive, send)
            case FaultType.HANG:
                await self._hands.hang(rule.duration_s)
                await self._pass(call, None, scope, receive, send)
            case FaultType.DIE:
                await self._hands.die()
                await send(dict(_UNFINISHED))
            case FaultType.RESTART:
                await self._hands.restart()
                await send(dict(_UNFINISHED))

    async def _held_back(self, receive: Receive) -> Receive:
        """An order arrives though its sender has given up meanwhile. A client's request does not."""
        if self._port is Port.SERVING:
            return receive
        body = await _whole_body(receive)
        return receive if body is None else _replaying(body, _silence)


async def _silence() -> Message:
    """Nothing more is heard of the sender."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


def _cutting(send: Send) -> Send:
    """Passes an answer on but for its end, so that the server has to close the connection."""

    async def pass_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send({**message, "headers": [_longer(header) for header in message["headers"]]})
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            whole = message.get("more_body", False)
            await send({**message, "body": body if whole else body[: len(body) // 2], "more_body": True})
        else:
            await send(message)

    return pass_on


def _longer(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """More is promised than comes, so that an answer without a body is cut too."""
    name, value = header
    return (name, str(int(value) + 1).encode()) if name.lower() == b"content-length" else header


async def _whole_body(receive: Receive) -> bytes | None:
    """An order's body as far as a guard would read it; None where the caller went away."""
    body = bytearray()
    async with asyncio.timeout(BODY_TIMEOUT_S):
        while len(body) <= LARGEST_BODY:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
    return bytes(body)


def _with_length(scope: Scope, length: int) -> Scope:
    kept = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*kept, (b"content-length", str(length).encode())]}


def _replaying(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
