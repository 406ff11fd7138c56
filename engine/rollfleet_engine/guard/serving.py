"""The serving port: default deny, the gate, and the version on every answer.

No task, no lock and no parsing per request: a dictionary look-up, a flag, and a set to be in while the answer runs.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol

from rollfleet_engine.guard.answers import NOT_FOUND, Answer, AsgiApp, Receive, Scope, Send, document, refusal
from rollfleet_engine.guard.bodies import BodyError, Bounded, declared_too_large
from rollfleet_engine.guard.metrics import PATH as METRICS_PATH
from rollfleet_engine.guard.routes import ROUTES, RouteClass
from rollfleet_engine.guard.tallies import Tallies
from rollfleet_engine.guard.turnstile import Header, Passage, Turnstile, version_header
from rollfleet_engine.guard.versioned import Versioned
from rollfleet_engine.guard.waiting import Held, WaitingRoom
from rollfleet_protocol.refusals import ENGINE_HEADER, MINIMUM_HEADER, REQUIRED_HEADER, RefusalReason

_REQUIRED = REQUIRED_HEADER.lower().encode()
_MINIMUM = MINIMUM_HEADER.lower().encode()
_RANK = b"x-data-parallel-rank"  # vLLM's own header
_DEMANDS = frozenset((_REQUIRED, _MINIMUM, _RANK))
_LONGEST_RANK = 4  # digits
_LONGEST_VERSION = len(str(2**63 - 1))
_PASSED = (RouteClass.INFERENCE, RouteClass.PROBE)
# Bytes of a body. Prompts of a million tokens as JSON are some 8 MiB, images and sounds are sent in base64.
LARGEST_INFERENCE = 64 << 20
LARGEST_PROBE = 16 << 20  # text to tokens, and back
BODY_TIMEOUT_S = 60.0  # that its sender may let us wait for it, over all its parts


class Vitals(Protocol):
    """What the kubelet's probes want to know; answered from memory."""

    def why_not_live(self) -> str:
        """Empty while the process need not be restarted."""
        ...

    def why_not_ready(self) -> str:
        """Empty while the engine belongs to the serving set."""
        ...


class Serving:
    """What port 8000 is, in front of the engine's own application."""

    def __init__(
        self,
        app: AsgiApp,
        turnstile: Turnstile,
        vitals: Vitals,
        waiting: WaitingRoom,
        ranks: int = 1,
        tallies: Tallies | None = None,
        metrics: AsgiApp | None = None,
        name: str = "",
    ) -> None:
        self._app = app
        self._tallies = tallies or Tallies(time.monotonic())
        self._metrics = metrics or app  # answers /metrics
        self._turnstile = turnstile
        self._vitals = vitals
        self._waiting = waiting
        self._ranks = ranks  # data-parallel
        self._engine = (ENGINE_HEADER.lower().encode(), name.encode("ascii", "replace")) if name else None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """As ASGI wants it; what is returned is to be awaited."""
        route = ROUTES.get((scope["method"], scope["path"]))
        if scope.get("root_path"):  # the engine would strip it from the path, and another route would match
            return self._refuse(NOT_FOUND, send)
        if route is RouteClass.INFERENCE:
            return self._bounded(self._infer, LARGEST_INFERENCE, scope, receive, send)
        if route is RouteClass.PROBE or self._is_preflight(scope):
            app = self._metrics if scope["path"] == METRICS_PATH else self._app
            return self._bounded(app, LARGEST_PROBE, scope, receive, send)
        return self._own(scope, send)

    async def _refuse(self, answer: Answer, send: Send) -> None:
        self._tallies.refused[answer.reason] += 1
        await answer(send)

    async def _bounded(self, app: AsgiApp, largest: int, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, with a body of at most so many bytes that comes in time."""
        too_large = declared_too_large(scope["headers"], largest)
        if too_large is not None:
            await self._refuse(too_large.answer, send)
            return
        body = Bounded(receive, send, largest, BODY_TIMEOUT_S)
        try:
            await app(scope, body.receive, body.send)
        except BodyError:
            pass  # answered below, whatever became of it on its way through the application
        finally:
            if body.error is not None:
                self._tallies.refused[body.error.reason] += 1
                await body.answer()

    @staticmethod
    def _is_preflight(scope: Scope) -> bool:
        """Browsers ask by OPTIONS before they post: answered by the engine's CORS settings, never by its weights."""
        path = scope["path"]
        return scope["method"] == "OPTIONS" and any(ROUTES.get((method, path)) in _PASSED for method in ("GET", "POST"))

    async def _own(self, scope: Scope, send: Send) -> None:
        if scope["method"] != "GET" or scope["path"] not in ("/livez", "/readyz"):
            await self._refuse(NOT_FOUND, send)
            return
        why = self._vitals.why_not_live() if scope["path"] == "/livez" else self._vitals.why_not_ready()
        await document(503 if why else 200, {"status": why or "ok"})(send)

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        turnstile = self._turnstile
        demands = [header for header in scope["headers"] if header[0] in _DEMANDS]
        if not turnstile.is_open and self._waiting.admits and self._demand_refusal(demands, only=400) is None:
            held = Held(receive)
            receive = held.receive
            try:
                await self._waiting.wait(held)
            finally:
                await held.stop()
            if held.gone.is_set():
                return
        refused = self._refusal(demands)
        if refused is not None:
            turnstile.refused += 1
            await self._refuse(refused, send)
            return
        self._tallies.admitted += 1
        passage = turnstile.enter(pinned=bool(demands) and any(name == _REQUIRED for name, _ in demands))
        try:
            await self._app(scope, receive, Versioned(send, passage, self._engine).send)
        except asyncio.CancelledError:
            if not passage.cut:
                raise
        finally:
            turnstile.leave(passage)
        if passage.cut:
            await self._after_cut(passage, send)

    def _refusal(self, demands: list[Header]) -> Answer | None:
        if not self._turnstile.is_open:
            return self._demand_refusal(demands, only=400) or self._turnstile.answer
        return self._demand_refusal(demands) if demands else None

    def _demand_refusal(self, demands: list[Header], only: int = 0) -> Answer | None:
        """Of a version that is asked for; `only` of this status: at a closed gate nobody knows which one it will be."""
        for name, value in demands:
            refused = self._rank_refusal(value) if name == _RANK else self._version_refusal(name, value)
            if refused is not None and only in (0, refused.status):
                return refused
        return None

    def _rank_refusal(self, value: bytes) -> Answer | None:
        """vLLM takes a rank that is no number for none at all, and the request lands where nobody meant it to."""
        if value.isdigit() and len(value) <= _LONGEST_RANK and int(value) < self._ranks:
            return None
        message = f"{_RANK.decode()}: {value!r} is no rank of this engine: they are 0 to {self._ranks - 1}"
        return refusal(RefusalReason.INVALID_REQUEST, message)

    def _version_refusal(self, name: bytes, value: bytes) -> Answer | None:
        """A client that demands a version gets that one or an error, never another."""
        held = self._turnstile.version
        told = name.decode("ascii")
        if not (value.isdigit() and len(value) <= _LONGEST_VERSION):
            return refusal(RefusalReason.INVALID_REQUEST, f"{told}: {value!r} is not a version (a whole number)")
        wanted = int(value)
        if held == wanted or (name == _MINIMUM and held >= wanted):
            return None
        message = f"{told}: {wanted} is asked for, this fleet serves version {held}"
        return refusal(RefusalReason.WRONG_VERSION, message, version_header(held))

    async def _after_cut(self, passage: Passage, send: Send) -> None:
        """Cut by the guard: a refusal where nothing was sent yet, else the server ends the connection."""
        if passage.task is not None:
            passage.task.uncancel()
        if not passage.started:
            await self._refuse(self._turnstile.answer, send)
