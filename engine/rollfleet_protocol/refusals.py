"""Refusals: the error body of the guard, and why a gate is closed."""

from enum import StrEnum

from rollfleet_protocol.base import Answer
from rollfleet_protocol.words import Words


class RefusalReason(StrEnum):
    """Why a guard refused. The HTTP status that goes with it stands beside."""

    UNAUTHENTICATED = "Unauthenticated"  # 401
    FORBIDDEN = "Forbidden"  # 403
    NOT_FOUND = "NotFound"  # 404
    INVALID_REQUEST = "InvalidRequest"  # 400
    TOO_SLOW = "TooSlow"  # 408
    TOO_LARGE = "TooLarge"  # 413; 431 where it is the head
    BUSY = "Busy"  # 429: the same is asked for by another call that runs, or too many calls do
    PROBE_FAILED = "ProbeFailed"  # 502: the engine's own text
    TRANSFER_FAILED = "TransferFailed"  # 502: the engine's own text
    WRONG_INCARNATION = "WrongIncarnation"  # 409: the process was restarted since
    STALE_EPOCH = "StaleEpoch"  # 409: a newer epoch was seen
    ORDER_VIOLATION = "OrderViolation"  # 409: the message names the right order
    NOT_VERIFIED = "NotVerified"  # 409
    WRONG_VERSION = "WrongVersion"  # 409: the request demands another version
    CLOSED = "Closed"  # 503 with Retry-After


class ClosedReason(StrEnum):
    """Why the gate is closed, as clients see it."""

    STARTING = "Starting"  # never opened in this incarnation
    UPDATING = "Updating"
    UNCERTAIN = "Uncertain"
    ASLEEP = "Asleep"
    WEIGHTS_ABSENT = "WeightsAbsent"  # dropped by sleep level 2, and not loaded since
    DRAINING = "Draining"
    ENGINE_DEAD = "EngineDead"


class RefusalDetail(Answer):
    """OpenAI-style error object, so that existing clients show the message."""

    message: Words  # cause and remedy
    type: str = "rollfleet"
    code: int
    reason: RefusalReason
    closed_reason: ClosedReason | None = None


class Refusal(Answer):
    """Body of every answer of the guard's own that is not 2xx."""

    error: RefusalDetail


class VersionSpan(Answer):
    """Part of an answer that was kept over a change of weights."""

    version: int
    # Output tokens that each choice already had when this version began; None: that choice had ended before.
    from_token: tuple[int | None, ...]


WEIGHT_VERSION_HEADER = "X-Weight-Version"
# Of an answer over several versions only: a JSON list of VersionSpan, oldest first. An event stream that had begun
# tells it in a comment, ": x-weight-version-spans [...]", before its last event.
SPANS_HEADER = "X-Weight-Version-Spans"
ENGINE_HEADER = "X-Rollfleet-Engine"  # of an answer: the engine's host name, which a router in between would hide
REQUIRED_HEADER = "X-Weight-Version-Required"
MINIMUM_HEADER = "X-Weight-Version-Min"
