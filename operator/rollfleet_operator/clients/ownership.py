"""Whose an object is: server-side apply takes over whatever has the name, and a fleet's name is anybody's choice."""

from rollfleet_operator.api.meta import LABEL_FLEET, ObjectMeta
from rollfleet_operator.clients.errors import InvalidSpec, Unreachable
from rollfleet_operator.ports import Manifest

MANAGED_BY = "app.kubernetes.io/managed-by"
KIND = "RolloutEngine"


def demand_ours(found: Manifest, kind: str, fleet: ObjectMeta) -> None:
    """Refuse to overwrite somebody else's object; wait for one of a deleted fleet of the same name."""
    metadata = found["metadata"]
    where = f"{kind} {metadata['namespace']}/{metadata['name']}"
    cure = "delete it, or give the fleet another name"
    owner = next((one for one in metadata.get("ownerReferences") or () if one.get("controller")), None)
    if owner is None:
        labels = metadata.get("labels") or {}
        if (labels.get(MANAGED_BY), labels.get(LABEL_FLEET)) != ("rollfleet", fleet.name):  # orphaned ones are ours
            raise InvalidSpec(f"{where} is not the operator's: {cure}")
    elif (owner["kind"], owner["name"]) != (KIND, fleet.name):
        raise InvalidSpec(f"{where} belongs to {owner['kind']} {owner['name']!r}: {cure}")
    elif owner["uid"] != fleet.uid:
        raise Unreachable(f"{where} belongs to a deleted fleet of this name, and is not collected yet")
