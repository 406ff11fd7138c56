"""Answers of the guard's own, as ASGI messages made once and sent many times."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rollfleet_protocol.refusals import ClosedReason, Refusal, RefusalDetail, RefusalReason

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

STATUS_OF = {
    RefusalReason.INVALID_REQUEST: 400,
    RefusalReason.UNAUTHENTICATED: 401,
    RefusalReason.FORBIDDEN: 403,
    RefusalReason.NOT_FOUND: 404,
    RefusalReason.TOO_SLOW: 408,
    RefusalReason.WRONG_INCARNATION: 409,
    RefusalReason.STALE_EPOCH: 409,
    RefusalReason.ORDER_VIOLATION: 409,
    RefusalReason.NOT_VERIFIED: 409,
    RefusalReason.WRONG_VERSION: 409,
    RefusalReason.TOO_LARGE: 413,
    RefusalReason.BUSY: 429,
    RefusalReason.PROBE_FAILED: 502,
    RefusalReason.TRANSFER_FAILED: 502,
    RefusalReason.CLOSED: 503,
}
# Seconds. An update of the whole fleet is meant to take less; a client that comes back too early is refused in 1 ms.
RETRY_AFTER_S = 1


class Answer:
    """A complete HTTP answer."""

    __slots__ = ("_start", "body", "reason", "status")

    def __init__(
        self, status: int, body: bytes, *headers: tuple[bytes, bytes], media: bytes = b"application/json"
    ) -> None:
        self.status = status
        self.reason = ""  # in one word, for who counts
        fixed = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
        self._start = {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}
        self.body = body

    async def __call__(self, send: Send) -> None:
        # A copy of the headers: servers and middlewares in between may add to the list.
        await send({**self._start, "headers": list(self._start["headers"])})  # type: ignore[call-overload]
        await send({"type": "http.response.body", "body": self.body})


def refusal(
    reason: RefusalReason, message: str, *headers: tuple[bytes, bytes], closed_reason: ClosedReason | None = None
) -> Answer:
    """A refusal in the form of an OpenAI error."""
    code = STATUS_OF[reason]
    body = Refusal(error=RefusalDetail(message=message, code=code, reason=reason, closed_reason=closed_reason))
    answer = Answer(code, body.model_dump_json(by_alias=True, exclude_none=True).encode(), *headers)
    answer.reason = reason.value if closed_reason is None else closed_reason.value
    return answer


_CLOSED_MESSAGES = {
    ClosedReason.STARTING: "this engine has not been verified at the fleet's version yet",
    ClosedReason.UPDATING: "the fleet's weights are being changed",
    ClosedReason.UNCERTAIN: "this engine's weights are not known to be good; it waits to be reloaded",
    ClosedReason.ASLEEP: "this engine is asleep",
    ClosedReason.WEIGHTS_ABSENT: "this engine's weights are absent: dropped in its sleep and not loaded since",
    ClosedReason.DRAINING: "this engine is shutting down",
    ClosedReason.ENGINE_DEAD: "this engine has died and will be restarted",
}


def closed(reason: ClosedReason) -> Answer:
    """503 of a closed gate."""
    retry = (b"retry-after", str(RETRY_AFTER_S).encode())
    message = f"{_CLOSED_MESSAGES[reason]}; send the request again after {RETRY_AFTER_S} s"
    return refusal(RefusalReason.CLOSED, message, retry, closed_reason=reason)


def document(status: int, content: Any) -> Answer:
    """Any JSON."""
    return Answer(status, json.dumps(content).encode())


NOT_FOUND = refusal(RefusalReason.NOT_FOUND, "no such route on this port")
