"""Leases of the fleets' trainers, as the watch tells them, and since when each says what it says.

A renewal changes nothing that a pass would do, so it is noted and no news: a thousand trainers that renew every few
seconds cost no pass. That one stopped is found by the pass that is woken when its Lease runs out; that pass reads the
Lease itself, as a watch may be late.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from rollfleet_operator.api.meta import LABEL_COMPONENT, LABEL_FLEET
from rollfleet_operator.core.leases import LeaseRecord
from rollfleet_operator.core.objects.common import COMPONENT_SENDER
from rollfleet_operator.core.objects.sender import sender_view
from rollfleet_operator.core.observed import SenderView
from rollfleet_operator.core.sender import LONGEST_S
from rollfleet_operator.ports import Manifest
from rollfleet_operator.runtime.store import key_of, revision
from rollfleet_protocol.senders import sender_lease


@dataclass(frozen=True)
class _Known:
    view: SenderView
    renew_time: str
    revision: int


def _utc_now() -> datetime:
    return datetime.now(UTC)


class SenderStore:
    """By the fleet's key. All of it can be lost: a Lease that is seen anew counts as renewed when it is seen."""

    def __init__(self, clock: Callable[[], datetime] = _utc_now) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def told(self, lease: Manifest, *, deleted: bool = False) -> str | None:
        """Take a newer state of a Lease in. The fleet's key where it says something else than before."""
        metadata = lease["metadata"]
        labels = metadata.get("labels") or {}
        fleet = labels.get(LABEL_FLEET)
        # Labels are anybody's: who may make Leases of other names could speak for a fleet's trainer by them.
        if labels.get(LABEL_COMPONENT) != COMPONENT_SENDER or not fleet or metadata["name"] != sender_lease(fleet):
            return None
        key = key_of(metadata["namespace"], fleet)
        known = self._known.get(key)
        if deleted:
            return key if self._known.pop(key, None) else None
        if known is not None and revision(lease) <= known.revision:
            return None
        new = self._newer(lease, known)
        self._known[key] = new
        return key if known is None or replace(new.view, renewed=None) != replace(known.view, renewed=None) else None

    def _newer(self, lease: Manifest, known: _Known | None) -> _Known:
        record, view = LeaseRecord.of(lease), sender_view(lease, self._clock())
        if known is not None and known.view.holder == view.holder:
            if known.view.offers == view.offers:  # each offer is looked at anew: the account may be a new one by then
                view = replace(view, uid=known.view.uid)
            if known.renew_time == record.renewed:
                view = replace(view, renewed=known.view.renewed)
        return _Known(view, record.renewed, revision(lease))

    def view(self, key: str) -> SenderView:
        """What is known of the fleet's trainer."""
        known = self._known.get(key)
        return SenderView() if known is None else known.view

    def is_stale(self, key: str) -> bool:
        """Whether the Lease must be read before anybody is called gone."""
        view = self.view(key)
        return view.renewed is None or self._clock() >= view.renewed + timedelta(
            seconds=min(view.duration_s, LONGEST_S)
        )

    def identified(self, key: str, holder: str, uid: str) -> None:
        """The uid of the holder's ServiceAccount was read."""
        known = self._known.get(key)
        if known is not None and known.view.holder == holder:
            self._known[key] = replace(known, view=replace(known.view, uid=uid))

    def forget(self, key: str) -> None:
        """The fleet is gone."""
        self._known.pop(key, None)
