"""What a connection may cost before its request is known: the time and the size of a head, and lines in the log.

uvicorn by itself waits for the first request, for the end of a head and for the rest of a body whose answer is already
sent for ever. With httptools, which vLLM's images have, it also takes headers and trailers without end; h11 bounds
them itself. (uvicorn 0.54, protocols/http; llhttp has no bound on headers; httptools 0.9 tells trailers as headers.)
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from rollfleet_protocol.refusals import Refusal, RefusalDetail, RefusalReason

LARGEST_HEAD = 64 << 10  # bytes; h11's own bound
LOGGED_EVERY_S = 1.0
_OF_STRANGERS = (
    "Invalid HTTP request",
    "Unsupported upgrade request",
    "No supported WebSocket library",
    "Exception in ASGI application",  # with a traceback each
)
OnRefusal = Callable[[RefusalReason], None]


class Patient(asyncio.Protocol):
    """To be put before a protocol of uvicorn's: waits `head_s` for a head, and answers as the guard does."""

    head_s: float
    # Of uvicorn's:
    cycle: Any
    loop: asyncio.AbstractEventLoop
    scope: Any
    transport: asyncio.Transport

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time of the first head begins."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Wait on while no request runs: for the rest of a head, or of a body that is answered already."""
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._await_head()
        elif self._head is not None:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in our words."""
        self.refuse(RefusalReason.INVALID_REQUEST, 400, msg)

    def too_late(self) -> None:
        """The head did not come in time."""
        self.refuse(RefusalReason.TOO_SLOW, 408, f"no complete request within {self.head_s:g} s")

    def refuse(self, reason: RefusalReason, status: int, message: str) -> None:
        """Say so, and end the connection; an answer that has begun is not spoilt by words."""
        self._stop_waiting()
        self.on_refusal(reason)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_raw(reason, status, message))
        self.transport.close()

    def on_refusal(self, reason: RefusalReason) -> None:
        """Somebody was refused before there was a request."""

    def _await_head(self) -> None:
        if self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self.head_s, self.too_late)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class PatientHttpTools(Patient):
    """The same for httptools, whose heads and trailers are bounded here.

    Counted is what comes of a message in one piece without any of its body: an unfinished head, or chunk sizes, their
    extensions and trailers. httptools gathers a line until it ends, and tells of it only then, as of a header.
    """

    parser: Any  # of uvicorn's protocol

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_message = False
        self._in_head = True
        self._without_body = 0  # bytes
        self._progressed = False

    def on_headers_complete(self) -> None:
        """What comes from here on as a header is a trailer, which nobody asks for: uvicorn would add it to the headers
        of a request that runs already. Behind a head that asks for another protocol the parser reads no further: the
        answer is the last.
        """
        self._in_head, self._progressed = False, True
        super().on_headers_complete()  # type: ignore[misc]
        self.scope["headers"] = self.scope["headers"].copy()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        self._progressed = True
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """With its trailers; what comes next is a head."""
        self._in_message, self._in_head = False, True
        super().on_message_complete()  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """At most two reads of the transport's more than the bound are ever held."""
        self._in_message, self._progressed = True, False
        super().data_received(data)
        if not self._in_message or self._progressed:
            self._without_body = 0
            return
        self._without_body += len(data)
        if self._without_body > LARGEST_HEAD and not self.transport.is_closing():
            what = "head of the request is" if self._in_head else "trailers of the request are"
            self.refuse(RefusalReason.TOO_LARGE, 431, f"the {what} over {LARGEST_HEAD} bytes")


def patient(protocol: type[asyncio.Protocol], head_s: float, on_refusal: OnRefusal) -> type[asyncio.Protocol]:
    """A protocol class of uvicorn's, bounded. The same class again where it is bounded already."""
    if issubclass(protocol, Patient):
        return protocol
    mixin = PatientHttpTools if hasattr(protocol, "on_headers_complete") else Patient
    members = {"head_s": head_s, "on_refusal": staticmethod(on_refusal)}
    return type(f"Patient{protocol.__name__}", (mixin, protocol), members)


class UnboundedServerError(RuntimeError):
    """The server of the serving port is not where every release of vLLM that is supported leaves it."""


def bound_server(app: Any, head_s: float, on_refusal: OnRefusal) -> None:
    """Bound what the serving port takes; vLLM leaves its server in `app.state.server` (0.23 to 0.32, serve_http).

    The listener does not exist yet while the lifespan starts, and each connection asks the configuration for its class.
    No connection becomes a websocket, with another protocol and other bounds: none of our routes is one, so that who
    asks for it gets the answer of an ordinary request. Raises UnboundedServerError.
    """
    settings = getattr(getattr(getattr(app, "state", None), "server", None), "config", None)
    protocol = getattr(settings, "http_protocol_class", None)
    if settings is None or not isinstance(protocol, type) or not issubclass(protocol, asyncio.Protocol):
        raise UnboundedServerError("the engine's HTTP server is not in app.state.server: nothing would bound a head")
    settings.http_protocol_class = patient(protocol, head_s, on_refusal)
    settings.ws_protocol_class = None


class Rarely(logging.Filter):
    """Lets a line of each kind that requests cause through once a second, with how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next: dict[str, float] = {}  # by kind
        self._more: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        kind = next((each for each in _OF_STRANGERS if str(record.msg).startswith(each)), None)
        if kind is None:
            return True
        now = self._clock()
        if now < self._next.get(kind, now):
            self._more[kind] += 1
            return False
        self._next[kind] = now + LOGGED_EVERY_S
        if more := self._more.pop(kind, 0):
            record.msg = f"{str(record.msg).rstrip()} ({more} more since the last line of this kind)"
        return True


def quieten(logger: str = "uvicorn.error") -> None:
    """A stranger must not fill the container's log with uvicorn's words about what it sends. Once a process."""
    found = logging.getLogger(logger)
    if not any(isinstance(each, Rarely) for each in found.filters):
        found.addFilter(Rarely())


def _raw(reason: RefusalReason, status: int, message: str) -> bytes:
    detail = RefusalDetail(message=message, code=status, reason=reason)
    body = Refusal(error=detail).model_dump_json(by_alias=True, exclude_none=True).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
