"""Who may act, told by a Lease: what its holder may believe of itself, and how long others must wait.

No clock of another machine is trusted. A holder counts from before the request by which it renewed; the others count
from after they saw the record change; both by their own monotonic clocks. So a holder that acts no more after
RENEW_DEADLINE_S has stopped before anybody may take over, whatever the network did to its requests.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

DURATION_S = 9.0  # that others wait after the last sign of a holder
RENEW_DEADLINE_S = (
    6.0  # after its last renewal a holder acts no more; the rest is for clocks that run apart, and for ends
)
PERIOD_S = 2.0  # between renewals, and between looks of those who wait
LONGEST_DURATION_S = 60.0  # that is believed of a record


@dataclass(frozen=True)
class LeaseRecord:
    """What a Lease says. Times are for people to read, and to tell one record from the next."""

    holder: str = ""
    duration_s: float = DURATION_S
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""

    @classmethod
    def of(cls, lease: dict[str, Any]) -> "LeaseRecord":
        """Of an object as the API server has it."""
        spec = lease.get("spec") or {}
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=float(spec.get("leaseDurationSeconds") or DURATION_S),
            transitions=int(spec.get("leaseTransitions") or 0),
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
        )

    def spec(self) -> dict[str, Any]:
        """As the API server takes it."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": max(1, round(self.duration_s)),
            "leaseTransitions": self.transitions,
            "acquireTime": self.acquired or None,
            "renewTime": self.renewed or None,
        }


def held_by(identity: str, before: LeaseRecord, now: datetime) -> LeaseRecord:
    """The next record of who takes the Lease or renews it."""
    stamp = micro_time(now)
    is_renewal = before.holder == identity
    return LeaseRecord(
        holder=identity,
        duration_s=DURATION_S,
        transitions=before.transitions if is_renewal or not before.acquired else before.transitions + 1,
        acquired=before.acquired if is_renewal and before.acquired else stamp,
        renewed=stamp,
    )


def released(before: LeaseRecord, now: datetime) -> LeaseRecord:
    """The record of who goes: nobody has to wait for it."""
    return LeaseRecord("", 1.0, before.transitions, before.acquired, micro_time(now))


def micro_time(now: datetime) -> str:
    """As metav1.MicroTime is written."""
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Rival:
    """What one who waits knows of the holder. Seconds are of its own monotonic clock."""

    def __init__(self) -> None:
        self._record: LeaseRecord | None = None
        self._seen_s = 0.0

    def saw(self, record: LeaseRecord, now_s: float) -> None:
        """Take in what was read; only a change is a sign of life."""
        if record != self._record:
            self._record, self._seen_s = record, now_s

    def free_in(self, identity: str, now_s: float) -> float:
        """Seconds until the Lease may be taken; 0: now. Nobody else can be in the pod that the identity names."""
        if self._record is None or self._record.holder in ("", identity):
            return 0.0
        waits_s = max(DURATION_S, min(self._record.duration_s, LONGEST_DURATION_S))
        return max(0.0, self._seen_s + waits_s - now_s)
