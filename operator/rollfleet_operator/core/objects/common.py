"""What all children share: names, labels, owner reference, hashes, and the safe security context."""

import hashlib
import json
from typing import Any

from rollfleet_operator.api.meta import API_VERSION, LABEL_COMPONENT, LABEL_FLEET
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.actions import ApplyObject

Manifest = dict[str, Any]

COMPONENT_ENGINE = "engine"
COMPONENT_ROUTER = "router"
COMPONENT_SENDER = "sender"
SERVING_PORT = 8000
CONTROL_PORT = 8001
HASH_LENGTH = 16  # characters; enough to tell templates of one fleet apart

SAFE_POD: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
SAFE_CONTAINER: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def labels(fleet: RolloutEngine, component: str) -> dict[str, str]:
    """Of a child, and what selects it."""
    return {LABEL_FLEET: fleet.metadata.name, LABEL_COMPONENT: component}


def metadata(fleet: RolloutEngine, name: str, component: str) -> Manifest:
    """Name, labels and owner. The owner does not block its own deletion: there are no finalizers of ours."""
    marks = {"app.kubernetes.io/managed-by": "rollfleet", **labels(fleet, component)}
    return {
        "name": name,
        "namespace": fleet.metadata.namespace,
        "labels": marks,
        "ownerReferences": [owner_reference(fleet)],
    }


def owner_reference(fleet: RolloutEngine) -> Manifest:
    """That the fleet controls an object."""
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutEngine",
        "name": fleet.metadata.name,
        "uid": fleet.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def content_hash(manifest: Manifest) -> str:
    """Equal for equal content, whatever the order of keys."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def apply_object(manifest: Manifest) -> ApplyObject:
    """Server-side apply of a child."""
    return ApplyObject(manifest, content_hash(manifest))


def key_of(manifest: Manifest) -> str:
    """As Observed.children names it."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def content_of(manifest: Manifest) -> Manifest:
    """Without apiVersion and kind, which items of a list do not carry."""
    return {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")}


def says(live: object, wanted: object) -> bool:
    """Whether an object says all that was applied; what others added to it is theirs."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            name in live and says(live[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(live, list | tuple)
            and len(live) == len(wanted)
            and all(says(mine, theirs) for mine, theirs in zip(live, wanted, strict=True))
        )
    return live == wanted
