"""Errors of the outside world, named by what a caller can do about them. This is the one place that maps.

RollfleetError
├── Retryable (after)       try again later, nothing was decided
│   ├── Unreachable         no answer: connection, TLS, deadline, 5xx
│   ├── Busy                the other side asks to wait: 429, 503
│   ├── Conflict            somebody else wrote first: look again at once, no event
│   ├── NotLeading          our own fence: another process may act by now, this one must not
│   └── Terminating         the namespace is being deleted, and all in it
├── Rejected                the same request will never be taken
│   ├── InvalidSpec         the content is wrong: 400, 413, 422
│   ├── Unsupported         the other side does not know this: 405, 406, 415, an answer that is not of the protocol
│   ├── Denied              identity or permission: 401, 403
│   │   └── Disowned        a guard knows who we are, and obeys another operator
│   ├── Unguarded           an engine lets callers without identity in: whatever answers there is no guard
│   └── Refused             a guard's own refusal, with its reason
├── NotFound                404
├── AlreadyExists           409 on create
└── StaleAttempt            a guard has seen a newer epoch or is a newer incarnation
"""

import json
import os
import ssl
from typing import Any

import aiohttp
from pydantic import ValidationError

from rollfleet_protocol.refusals import Refusal, RefusalReason
from rollfleet_protocol.words import visible

MAX_TEXT = 1024  # characters kept of the other side's words


class RollfleetError(Exception):
    """Anything that the outside world did to us."""


class Retryable(RollfleetError):  # noqa: N818 - named by cause
    """Nothing was decided; `after` is the wait in seconds that the other side asked for."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Unreachable(Retryable):
    """No answer."""


class Busy(Retryable):
    """Asked to wait."""


class Conflict(Retryable):
    """Somebody else wrote first."""


class NotLeading(Retryable):
    """Another process may act by now, so this one must not."""


class Terminating(Retryable):
    """The namespace is going, and takes no new objects."""


class Rejected(RollfleetError):  # noqa: N818 - named by cause
    """The same request will never be taken."""


class InvalidSpec(Rejected):
    """The content is wrong."""


class Unsupported(Rejected):
    """The other side does not know this."""


class Denied(Rejected):
    """Identity or permission."""


class Disowned(Denied):
    """A guard knows who we are, and obeys another operator."""


class Unguarded(Rejected):
    """An engine lets callers without identity in."""


class Refused(Rejected):
    """A guard refused; its words are the message."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason = reason


class NotFound(RollfleetError):  # noqa: N818 - named by cause
    """No such object."""


class AlreadyExists(RollfleetError):  # noqa: N818 - named by cause
    """An object of that name exists."""


class StaleAttempt(RollfleetError):  # noqa: N818 - named by cause
    """A guard has seen a newer epoch or was restarted since."""


def from_transport(error: Exception, what: str) -> RollfleetError:
    """A failure below HTTP: connection, TLS, deadline."""
    if isinstance(error, TimeoutError):
        return Unreachable(f"{what}: no answer within the deadline")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | ssl.SSLCertVerificationError):
        return Unreachable(f"{what}: the certificate was not accepted: {clipped(str(error))}")
    return Unreachable(f"{what}: {clipped(_cause(error))}")


def _cause(error: Exception) -> str:
    """What aiohttp says of a connection names objects in memory, and the address, which is told already."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLError) or not cause.errno:
            return str(cause) or type(cause).__name__
        return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)  # below 0: of a name's look-up
    return str(error) or type(error).__name__


def from_api_server(status: int, body: bytes, what: str, retry_after: str | None = None) -> RollfleetError:
    """An answer of the API server that is not 2xx; the body is a metav1.Status."""
    words = _status_object(body)
    text = f"{what}: {clipped(str(words.get('message') or body[:MAX_TEXT].decode(errors='replace')))} (HTTP {status})"
    if status == 409:
        return AlreadyExists(text) if words.get("reason") == "AlreadyExists" else Conflict(text)
    if status == 404:
        return NotFound(text)
    if status in (401, 403):
        return Terminating(text) if _is_terminating(words) else Denied(text)
    if status in (429, 503):
        return Busy(text, _seconds(retry_after))
    if status >= 500:
        return Unreachable(text)
    return Unsupported(text) if status in (405, 406, 415) else InvalidSpec(text)


def from_guard(status: int, body: bytes, what: str) -> RollfleetError:
    """An answer of a guard that is not 2xx."""
    try:
        detail = Refusal.model_validate_json(body).error
    except ValidationError:
        text = (
            f"{what}: HTTP {status}, not a guard's words: {clipped(body[:MAX_TEXT].decode(errors='replace').strip())}"
        )
        return Unreachable(text) if status >= 500 else Unsupported(text)
    if detail.reason in (RefusalReason.STALE_EPOCH, RefusalReason.WRONG_INCARNATION):
        return StaleAttempt(clipped(detail.message))
    if detail.reason is RefusalReason.FORBIDDEN:
        return Disowned(clipped(detail.message))
    if detail.reason is RefusalReason.UNAUTHENTICATED:
        return Denied(clipped(detail.message))
    return Refused(clipped(detail.message), detail.reason)


def clipped(text: str) -> str:
    """Another side's words, bounded and fit to be shown."""
    text = visible(text[: MAX_TEXT + 1])
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _is_terminating(words: dict[str, Any]) -> bool:
    causes = (words.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)


def _status_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after else None
    except ValueError:  # an HTTP date: the usual back-off will do
        return None
