"""What is to be done about an answer, a refusal, or none. Pure: the client does it.

Sent again is only what no engine has begun with: a connection that was never made, a 503 of a guard whose gate is
closed, a router that has no engine, a 409 of a guard that does not serve the version yet. Anything else may have been
processed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from rollfleet_protocol.refusals import (
    MINIMUM_HEADER,
    REQUIRED_HEADER,
    Refusal,
    RefusalDetail,
    RefusalReason,
)
from rollfleet_protocol.words import fitted
from rollfleet_trainer.reading import served_version
from rollfleet_trainer.rollout_errors import (
    BadAnswerError,
    RefusedError,
    RolloutError,
    UnansweredError,
    VersionPassedError,
)

LONGEST_WORDS = 1000
LONGEST_RETRY_AFTER_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
NO_ENGINE = "no available workers"  # vllm-router 0.1.17, text/plain, when every engine is out of its serving set


@dataclass(frozen=True)
class Demand:
    """Which version may answer. At most one of the two is set."""

    required: int | None = None
    minimum: int | None = None

    def __post_init__(self) -> None:
        if self.required is not None and self.minimum is not None:
            raise ValueError("version and min_version: one of them")
        if min(self.required or 0, self.minimum or 0) < 0:
            raise ValueError("versions are not negative")

    @property
    def header(self) -> tuple[str, int] | None:
        """Name and value, as the engine that admits the request is told it; None: any version may answer."""
        if self.required is not None:
            return REQUIRED_HEADER, self.required
        return None if self.minimum is None else (MINIMUM_HEADER, self.minimum)

    def allows(self, version: int) -> bool:
        """Whether it may answer."""
        return self.required in (None, version) and version >= (self.minimum or 0)


@dataclass(frozen=True)
class Answered:
    """Anything that has a status."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)  # by lower-case names
    body: bytes = b""


@dataclass(frozen=True)
class NotSent:
    """No connection: not a byte of the request has left."""

    why: str


@dataclass(frozen=True)
class Unanswered:
    """Sent, in part at least, and the connection ended before there was an answer."""

    why: str


Outcome = Answered | NotSent | Unanswered


@dataclass(frozen=True)
class Take:
    """It is an answer."""


@dataclass(frozen=True)
class Wait:
    """Ask again later, or somebody else."""

    why: str
    after_s: float | None = None  # as the engine said


@dataclass(frozen=True)
class Fail:
    """It never will be."""

    error: RolloutError


def judge(outcome: Outcome, demand: Demand, where: str, *, resend_unanswered: bool = False) -> Take | Wait | Fail:
    """`where`: endpoint and route, for messages."""
    if isinstance(outcome, NotSent):
        return Wait(f"{where}: {outcome.why}")
    if isinstance(outcome, Unanswered):
        return _unanswered(f"{where}: {outcome.why}", resend=resend_unanswered)
    if outcome.status == 200:
        return _answered(outcome, demand, where)
    return _refused(outcome, demand, where, resend=resend_unanswered)


def _answered(outcome: Answered, demand: Demand, where: str) -> Take | Fail:
    """A guard answers by no other version than was demanded, if the demand has reached it."""
    served = served_version(outcome.headers)
    if demand.header is None or served is None or demand.allows(served):
        return Take()
    name, value = demand.header
    told = f"version {served} answered where {name} is {value}: does something on the way drop that header?"
    return Fail(BadAnswerError(f"{where}: {told}"))


def _refused(outcome: Answered, demand: Demand, where: str, *, resend: bool) -> Wait | Fail:
    refusal = _refusal(outcome.body)
    words = refusal.message if refusal is not None else _words(outcome)
    told = f"{where}: HTTP {outcome.status}: {words}"
    closed = refusal is not None and refusal.reason is RefusalReason.CLOSED
    nobody = refusal is None and words.strip().lower() == NO_ENGINE
    if outcome.status == 503 and (closed or nobody):
        return Wait(told, _retry_after(outcome.headers))
    if outcome.status == 409 and refusal is not None and refusal.reason is RefusalReason.WRONG_VERSION:
        return _wrong_version(told, demand, served_version(outcome.headers))
    if outcome.status in (502, 504):  # of a proxy: the engine behind it may have been at work
        return _unanswered(told, resend=resend)
    return Fail(RefusedError(told, outcome.status))


def _unanswered(told: str, *, resend: bool) -> Wait | Fail:
    if resend:
        return Wait(told)
    return Fail(UnansweredError(f"{told}; it may have been processed, so it is not sent again"))


def _wrong_version(told: str, demand: Demand, served: int | None) -> Wait | Fail:
    if demand.required is not None and served is not None and served > demand.required:
        return Fail(VersionPassedError(told))
    return Wait(told)


def _refusal(body: bytes) -> RefusalDetail | None:
    try:
        return Refusal.model_validate_json(body).error
    except ValidationError:
        return None


def _words(outcome: Answered) -> str:
    return fitted(outcome.body[: 4 * LONGEST_WORDS].decode("utf-8", "replace"), LONGEST_WORDS)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; a date, which guards never send, counts for nothing."""
    told = headers.get("retry-after", "")
    return min(float(told), LONGEST_RETRY_AFTER_S) if told.isascii() and told.isdigit() else None


def delay_s(tries: int, after_s: float | None, chance: float) -> float:
    """Before the next try, after `tries` in vain; `chance` in [0, 1) keeps those who wait from coming all at once."""
    own: float = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(tries, 16))
    if after_s is None:
        return own * (0.5 + chance / 2)
    return max(after_s, FIRST_DELAY_S) * (1 + chance / 4)
