"""Time: deadlines, back-off and throttles. Each is a function of recorded times, so it survives a restart."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from rollfleet_operator.api.weightversion import WeightVersionStatus
from rollfleet_protocol.commands import LONGEST_SECONDS

BACKOFF_LONGEST_S = 30
RESEND_S = 2.0  # a command whose effect is not seen after so long is given again; commands may be repeated
PROGRESS_S = 1.0  # between two writes that tell nothing but progress
OPENING_S = 60.0  # after the commit: how long an engine that does not answer keeps the update from being called Active
REOPENING_S = 10.0  # how long a new update lets engines reopen that the one before it closed
LOOK_AGAIN_S = 10.0  # how often nodes are looked at while an engine cannot be fenced
# After so long on a node that stayed Ready the kubelet has learnt that a pod is gone, and begun to stop it. Read in
# Kubernetes 1.36: a node is called not Ready 55 s after its last word (node-monitor-grace-period 50 s, looked at every
# 5 s); a dead watch is noticed after 45 s (HTTP/2 ping after 30 s, given up 15 s later) and begun anew within 60 s
# (reflector's longest back-off); housekeeping comes every 2 s. The pod's own grace period is added.
KUBELET_S = 180
PLACES_S = 30  # how long an engine of several pods may hold some places while one before it lacks some too
EXPONENT_LIMIT = 20  # exponent bound, against absurd powers
MAX_EPOCH_JUMP = 1000  # a guard further ahead than this of all others is not followed
MAX_EPOCH = 2**53  # one a millisecond would take 285 000 years; a guard that names more is not followed either


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures: 1, 2, 4 ... 30."""
    return float(min(BACKOFF_LONGEST_S, 2 ** min(max(failures, 1) - 1, EXPONENT_LIMIT)))


def attempt_wait_s(attempt: int, prepare_seconds: int) -> float:
    """How long an update's attempt waits in Preparing for the fault before it to pass: 1, 2, 4 ... 30 s.

    The wait is part of prepareSeconds, so that no end comes later for it, and leaves the attempt half of them.
    """
    return min(backoff_s(attempt - 1), prepare_seconds / 2)


def attempt_begins(status: WeightVersionStatus, since: datetime, prepare_seconds: int) -> datetime:
    """When this attempt may begin. Nobody waits where a higher version went straight on."""
    last = status.last_attempt
    if last is None or last.attempt == 0:
        return since
    return since + timedelta(seconds=attempt_wait_s(status.attempt, prepare_seconds))


def retry_at(since: datetime, attempt: int) -> datetime:
    """When attempt number `attempt` + 1 may begin, counted from the phase's start: after 1, 3, 7, 15, 31, 61 ... s."""
    return since + timedelta(seconds=sum(backoff_s(number) for number in range(1, attempt + 1)))


def began(since: datetime, now: datetime, up_since: datetime | None) -> datetime:
    """From when a recorded start counts here.

    One in the future was written by another clock, or by ours before it was set back: it may be as far off as it likes,
    and counts from when we could act ourselves.
    """
    ours = now if up_since is None else min(up_since, now)
    if since > now:
        return ours
    return since if up_since is None else max(since, ours)


@dataclass(frozen=True)
class Deadline:
    """A phase's end. Time before `up_since`, and what is `away`, is not counted: nobody could act."""

    ends: datetime

    @classmethod
    def of(
        cls,
        since: datetime,
        seconds: float,
        now: datetime,
        up_since: datetime | None = None,
        away: Iterable[tuple[datetime, datetime]] = (),
    ) -> "Deadline":
        """The deadline of a phase that began at `since`. `away` is in the order of its beginnings."""
        counted = began(since, now, up_since)
        ends = counted + timedelta(seconds=seconds)
        for left, back in away:
            left = max(left, counted)  # noqa: PLW2901 - what overlaps counts once
            if left < back and left < ends:
                ends += back - left
                counted = back
        return cls(ends)

    def passed(self, now: datetime) -> bool:
        """Whether it is over."""
        return now >= self.ends

    def left_s(self, now: datetime) -> float:
        """Seconds left, as an engine is told them: at least one, and no more than a command may say."""
        return min(max(1.0, (self.ends - now).total_seconds()), float(LONGEST_SECONDS))


def seconds_text(begin: datetime | None, end: datetime) -> str:
    """A duration as statuses tell it; empty where the begin is not known."""
    return "" if begin is None else f"{max(0.0, (end - begin).total_seconds()):.3f}"
