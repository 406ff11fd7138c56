"""What is sent to an engine and what came back, as data: whoever carries it, a tunnel, a socket or a test that lies."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollfleet_protocol.words import fitted

ANSWER_S = 60.0  # of one call: a probe waits its turn among the requests that an engine serves
MOST_WORDS = 500  # characters of an engine's own text in a verdict
JSON_HEADERS = (("Content-Type", "application/json"),)


class Port(StrEnum):
    """Of an engine's two."""

    SERVING = "serving"
    CONTROL = "control"


class Identity(StrEnum):
    """Who a call on the control port says that it comes from."""

    NOBODY = "no token"
    OPERATOR = "the operator's token"
    GARBAGE = "a token that is none"
    ALG_NONE = "the operator's claims, unsigned (alg none)"
    SHARED_SECRET = "the operator's claims, signed by a shared secret (HS256)"  # noqa: S105 - what it is called
    FORGED_KEY = "the operator's claims, signed by another key under the same name"
    CHANGED_CLAIMS = "the operator's token with a later expiry"
    WRONG_AUDIENCE = "the operator's token for another audience"
    OTHER_ACCOUNT = "a valid token of the engine's own account"


@dataclass(frozen=True)
class Call:
    """One request."""

    port: Port
    method: str
    path: str  # as it goes over the wire, with its query
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    identity: Identity = Identity.NOBODY  # of the control port
    within_s: float = ANSWER_S

    @property
    def words(self) -> str:
        """For a verdict."""
        shown = ", ".join(f"{name}: {value}" for name, value in self.headers if name not in dict(JSON_HEADERS))
        who = f" with {self.identity.value}" if self.port is Port.CONTROL else ""
        return f"{self.method} {self.path} on the {self.port.value} port{who}{f' ({shown})' if shown else ''}"


@dataclass(frozen=True)
class Exchange:
    """A call and what came of it: an answer, or why there was none."""

    call: Call
    status: int = 0  # 0: there was no answer
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    error: str = ""
    began: float = 0.0  # monotonic seconds
    ended: float = 0.0

    def all(self, header: str) -> tuple[str, ...]:
        """Every value of a header."""
        return tuple(value for name, value in self.headers if name.lower() == header.lower())

    @property
    def json(self) -> Any:
        """The body; None where it is no JSON."""
        return parsed(self.body)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")

    @property
    def told(self) -> str:
        """The engine's own words, fit to be shown: the message where the body has one."""
        if not self.status:
            return fitted(self.error or "no answer", MOST_WORDS)
        document = self.json
        error = document.get("error", document) if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return fitted(f"HTTP {self.status}: {message if isinstance(message, str) else self.text.strip()}", MOST_WORDS)


def parsed(content: bytes | str) -> Any:
    """JSON of others; None where it is none, or none that a program reads: too deep, numbers of thousands of digits."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


class Together(tuple[Call, ...]):
    """Calls that are to run at the same time; a plain tuple runs one after the other."""

    __slots__ = ()


def get(path: str, *, port: Port = Port.SERVING, identity: Identity = Identity.NOBODY) -> Call:
    """A GET."""
    return Call(port, "GET", path, identity=identity)


def post(
    path: str,
    document: Any,
    *,
    port: Port = Port.SERVING,
    identity: Identity = Identity.NOBODY,
    headers: Sequence[tuple[str, str]] = (),
) -> Call:
    """A POST of JSON; bytes go as they are."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return Call(port, "POST", path, body, (*JSON_HEADERS, *headers), identity)
