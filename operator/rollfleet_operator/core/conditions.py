"""Conditions: merging keeps lastTransitionTime unless the status changes, so that an idle object is never written."""

import re
from dataclasses import dataclass
from datetime import datetime

from rollfleet_operator.api.meta import MAX_MESSAGE, Condition, ConditionStatus
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.words import visible

ELLIPSIS = "…"
LINE_ENDS = re.compile(r"[\n\r\f\v\x85\u2028\u2029]+")


@dataclass(frozen=True)
class Claim:
    """What a condition says, before it is merged with what it said."""

    type: str
    holds: bool | None  # None: unknown
    reason: str
    message: str = ""

    @property
    def status(self) -> ConditionStatus:
        """As Kubernetes writes it."""
        if self.holds is None:
            return ConditionStatus.UNKNOWN
        return ConditionStatus.TRUE if self.holds else ConditionStatus.FALSE


def claim(kind: str, holds: bool | None, reason: Reason, message: str = "") -> Claim:
    """A claim with the reason's own sentence where there is nothing more to say."""
    return Claim(kind, holds, reason.value, clip(message or reason.sentence))


def merge(
    old: tuple[Condition, ...], claims: tuple[Claim, ...], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The new list in the order of the claims, then conditions that others wrote."""
    known = {condition.type: condition for condition in old}
    merged = [_merge_one(known.get(each.type), each, generation, now) for each in claims]
    ours = {each.type for each in claims}
    return tuple(merged) + tuple(condition for condition in old if condition.type not in ours)


def _merge_one(old: Condition | None, new: Claim, generation: int, now: datetime) -> Condition:
    kept = old is not None and old.status is new.status
    return Condition(
        type=new.type,
        status=new.status,
        reason=new.reason,
        message=new.message,
        last_transition_time=old.last_transition_time if old is not None and kept else now.replace(microsecond=0),
        observed_generation=generation,
    )


def find(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """The condition of a type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def clip(text: str, limit: int = MAX_MESSAGE) -> str:
    """Text that fits a message, in one line: kubectl cuts a column at the end of its first."""
    first, *others = LINE_ENDS.split(text[: 4 * limit])
    text = visible(" ".join((first.rstrip(), *(part.strip() for part in others))) if others else first)
    return text if len(text) <= limit else text[: limit - 1] + ELLIPSIS
