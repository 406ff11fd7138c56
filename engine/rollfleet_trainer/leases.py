"""The sender's Lease as a record: what its holder may believe of itself, and how long others must wait.

As between two operators (ADR 0010) no clock of another machine is trusted. A holder counts from before the request by
which it renewed, those who wait from after they saw the record change, both by their own monotonic clocks. So a holder
that sends nothing more after RENEW_SHARE of the duration has stopped before anybody may take over.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollfleet_protocol.senders import (
    LONGEST_LEASE_S,
    LONGEST_MESSAGE,
    MESSAGE_ANNOTATION,
    OFFERS_ANNOTATION,
    SHORTEST_LEASE_S,
)
from rollfleet_protocol.words import fitted

DURATION_S = 15  # that others wait after the last sign of a holder
PERIOD_SHARE = 1 / 3  # of the duration: between renewals
RENEW_SHARE = (
    2 / 3
)  # of the duration: after its last renewal a holder sends no more; the rest is for clocks that differ


@dataclass(frozen=True)
class LeaseRecord:
    """What a Lease says. Times are for people to read, and to tell one record from the next."""

    holder: str = ""
    duration_s: float = DURATION_S
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""
    offers: str = ""
    version: str = ""  # the object's resourceVersion

    @classmethod
    def of(cls, lease: dict[str, Any]) -> LeaseRecord:
        """Of an object as the API server has it."""
        spec, metadata = lease.get("spec") or {}, lease["metadata"]
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=float(spec.get("leaseDurationSeconds") or DURATION_S),
            transitions=int(spec.get("leaseTransitions") or 0),
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
            offers=str((metadata.get("annotations") or {}).get(OFFERS_ANNOTATION) or ""),
            version=str(metadata["resourceVersion"]),
        )


def holding(before: LeaseRecord, holder: str, duration_s: int, now: datetime, offers: str, message: str) -> Any:
    """Merge patch of who takes the Lease or renews it, over exactly what was read."""
    stamp, renewal = micro_time(now), before.holder == holder
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": duration_s,
        "leaseTransitions": before.transitions if renewal or not before.acquired else before.transitions + 1,
        "acquireTime": before.acquired if renewal and before.acquired else stamp,
        "renewTime": stamp,
    }
    return {"metadata": _metadata(before, offers, message), "spec": spec}


def releasing(before: LeaseRecord, now: datetime, message: str) -> Any:
    """Merge patch of who goes: nobody has to wait for it."""
    return {"metadata": _metadata(before, "", message), "spec": {"holderIdentity": "", "renewTime": micro_time(now)}}


def _metadata(before: LeaseRecord, offers: str, message: str) -> dict[str, Any]:
    words = fitted(message, LONGEST_MESSAGE) if message else None
    annotations = {OFFERS_ANNOTATION: offers or None, MESSAGE_ANNOTATION: words}
    return {"resourceVersion": before.version, "annotations": annotations}


def micro_time(now: datetime) -> str:
    """As metav1.MicroTime is written."""
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Rival:
    """What one who waits knows of the holder. Seconds are of its own monotonic clock."""

    def __init__(self, holder: str) -> None:
        self._own = holder
        self._sign: tuple[str, str] | None = None
        self._seen_s = 0.0
        self.lives = False  # it was seen to renew

    def saw(self, record: LeaseRecord, now_s: float) -> float:
        """Take in what was read; seconds until the Lease may be taken, 0: now."""
        sign = (record.holder, record.renewed)
        if sign != self._sign:
            self.lives = self._sign is not None  # a change that was watched is a sign of life
            self._sign, self._seen_s = sign, now_s
        if record.holder in ("", self._own):
            return 0.0
        waits_s = min(max(SHORTEST_LEASE_S, record.duration_s), LONGEST_LEASE_S)
        return max(0.0, self._seen_s + waits_s - now_s)
