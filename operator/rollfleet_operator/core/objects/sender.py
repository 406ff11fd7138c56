"""The Lease by which one trainer at a time sends weights. Its content is the trainers'; ours are name and owner."""

from datetime import datetime

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.leases import LeaseRecord
from rollfleet_operator.core.objects.common import COMPONENT_SENDER, Manifest, metadata
from rollfleet_operator.core.observed import SenderView
from rollfleet_protocol.senders import MESSAGE_ANNOTATION, OFFERS_ANNOTATION, sender_lease

LONGEST_TEXT = 512  # characters of what a trainer writes into its Lease


def build_sender_lease(fleet: RolloutEngine) -> Manifest:
    """Made beforehand: an update of a named object can be granted by RBAC, a creation cannot."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata(fleet, sender_lease(fleet.metadata.name), COMPONENT_SENDER),
    }


def sender_view(lease: Manifest, renewed: datetime, uid: str = "") -> SenderView:
    """What a Lease says. `renewed`: when its newest renewal was seen; `uid`: of its holder's account, where known."""
    record, annotations = LeaseRecord.of(lease), lease["metadata"].get("annotations") or {}
    return SenderView(
        holder=record.holder[:LONGEST_TEXT],
        duration_s=record.duration_s,
        renewed=renewed,
        offers=str(annotations.get(OFFERS_ANNOTATION) or "")[:LONGEST_TEXT],
        message=str(annotations.get(MESSAGE_ANNOTATION) or "")[:LONGEST_TEXT],
        uid=uid,
    )
