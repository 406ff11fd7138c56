"""The Lease by which one trainer at a time sends weights. Its content is the trainers'; ours are name and owner."""

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.objects.common import COMPONENT_SENDER, Manifest, metadata
from rollfleet_protocol.senders import sender_lease


def build_sender_lease(fleet: RolloutEngine) -> Manifest:
    """Made beforehand: an update of a named object can be granted by RBAC, a creation cannot."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata(fleet, sender_lease(fleet.metadata.name), COMPONENT_SENDER),
    }
