"""What the operator would do now: its own `plan`, run on what can be seen from here, written in plain words.

An operator knows a little more than its objects and engines tell: which commands were refused before and when it may
repeat them, since when it and the API server are up, what the API server would not take. And how it was started is its
own affair. `assumed` says what stands in for that.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rollfleet_cli.asking import Answer, engine_config
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.accept import LONG_AGO
from rollfleet_operator.core.actions import (
    Action,
    ApplyObject,
    CreatePod,
    Decision,
    DeleteObject,
    DeletePod,
    GuardCall,
    LabelPod,
    StopPod,
)
from rollfleet_operator.core.leases import LeaseRecord
from rollfleet_operator.core.objects.common import content_of, says
from rollfleet_operator.core.objects.network_policy import KIND as NETWORK_POLICY
from rollfleet_operator.core.objects.network_policy import NAMESPACE_LABEL, network_policy_name
from rollfleet_operator.core.objects.router import router_name
from rollfleet_operator.core.objects.sender import sender_view
from rollfleet_operator.core.observed import GuardView, NodeView, Observed, SenderView, Settings
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.plan_children import plan_children
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.vanished import suspect_nodes
from rollfleet_operator.ports import Manifest
from rollfleet_protocol.senders import sender_lease
from rollfleet_protocol.state import EngineState

ReadNode = Callable[[str], NodeView | None]  # None: it cannot be read
MEMORY = "the operator has refused commands and failed attempts in its memory, and may wait before it repeats one"


@dataclass(frozen=True)
class Seen:
    """What a plan is made of."""

    fleet: RolloutEngine
    versions: tuple[WeightVersion, ...]
    pods: tuple[Manifest, ...]
    answers: tuple[Answer[EngineState], ...]
    children: dict[str, Manifest]  # live, by "Kind/name"
    closed_kinds: tuple[str, ...]  # of children, which could not be read
    now: datetime
    read_node: ReadNode = lambda _: None


@dataclass(frozen=True)
class Change:
    """A field of a status that would be written."""

    object: str  # Kind/name
    field: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Planned:
    """A decision in plain words."""

    actions: tuple[str, ...]
    changes: tuple[Change, ...]
    events: tuple[str, ...]
    notes: tuple[str, ...]
    wake_at: datetime | None
    why: tuple[str, ...]  # conditions as they would be: what the operator thinks of the fleet
    assumed: tuple[str, ...]
    unreachable: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For `-o json`."""
        changes = [{"object": c.object, "field": c.field, "old": c.old, "new": c.new} for c in self.changes]
        return {
            "actions": list(self.actions),
            "status_changes": changes,
            "events": list(self.events),
            "notes": list(self.notes),
            "wake_at": self.wake_at,
            "why": list(self.why),
            "assumed": list(self.assumed),
            "unreachable": list(self.unreachable),
        }


def foresee(seen: Seen) -> Planned:
    """The operator's next decision."""
    observed, assumed = observe(seen)
    decision = plan(observed, seen.now)
    return Planned(
        actions=tuple(describe(action) for action in decision.actions),
        changes=tuple(_changes(seen, decision)),
        events=tuple(f"{e.type} {e.reason} on {e.kind}/{e.name}: {e.message}" for e in decision.events),
        notes=decision.notes,
        wake_at=decision.wake_at,
        why=tuple(_why(seen, decision)),
        assumed=assumed,
        unreachable=tuple(f"{answer.pod}: {answer.error}" for answer in seen.answers if answer.error),
    )


def observe(seen: Seen) -> tuple[Observed, tuple[str, ...]]:
    """As the operator would see it, and what was assumed to get there."""
    settings, assumed = _settings(seen)
    bare = Observed(
        fleet=seen.fleet,
        weight_versions=seen.versions,
        pods=tuple(sorted((pod_view(pod) for pod in seen.pods), key=lambda v: (v.ordinal, v.created, v.name))),
        guards={answer.uid: _view(answer, seen.now) for answer in seen.answers},
        ca_bundle=seen.fleet.status.ca_bundle,
        settings=settings,
        sender=_sender(seen),
    )
    nodes = {name: seen.read_node(name) for name in sorted(suspect_nodes(bare))}
    known = {name: view for name, view in nodes.items() if view is not None}
    whole = replace(bare, children=_applied(bare, seen), nodes=known)
    return whole, (*assumed, *_gaps(seen, nodes), MEMORY)


def _gaps(seen: Seen, nodes: dict[str, NodeView | None]) -> Iterator[str]:
    """Whose word is missing."""
    unread = [name for name, view in nodes.items() if view is None]
    if unread:
        yield f"nothing is known of nodes {', '.join(unread)}: you may not read them"
    present = {pod["metadata"]["uid"] for pod in seen.pods}
    gone = [member.name for member in seen.fleet.status.members if member.uid not in present]
    if gone:
        yield f"engines that vanished were not asked, the operator may reach them: {', '.join(gone)}"


def _view(answer: Answer[EngineState], now: datetime) -> GuardView:
    if answer.said is None:
        return GuardView(None, reachable=False, last_contact=None, error=answer.error, disowned=answer.disowned)
    return GuardView(answer.said, reachable=True, last_contact=now)


def _settings(seen: Seen) -> tuple[Settings, tuple[str, ...]]:
    """How the operator was started, as far as its work shows it."""
    configs = [config for pod in seen.pods if (config := engine_config(pod)) is not None]
    subject, uid = (configs[-1].operator.subject, configs[-1].operator.uid) if configs else ("", "")
    router = seen.children.get(f"Deployment/{router_name(seen.fleet.metadata.name)}") or {}
    containers = ((router.get("spec") or {}).get("template") or {}).get("spec", {}).get("containers") or [{}]
    accepted = next((c for c in seen.fleet.status.conditions if c.type == "Accepted"), None)
    allowed = accepted is None or accepted.reason != Reason.HOST_PATH_NOT_ALLOWED
    assumed = [f"host paths are {'allowed' if allowed else 'not allowed'}, as the condition Accepted has it"]
    assumed.append("the operator and the API server have been up since before the phase began")
    if not configs:
        assumed.append("no engine tells which operator it obeys, so new pods are shown without")
    if seen.fleet.spec.trainers:
        assumed.append("the trainer's ServiceAccount exists, and its Lease was renewed when it says so")
    if seen.closed_kinds:
        assumed.append(f"{', '.join(seen.closed_kinds)} of the fleet are as they should be: you may not list them")
    settings = Settings(
        operator_subject=subject,
        operator_uid=uid,
        router_image=containers[0].get("image", ""),
        host_path_allowed=allowed,
        **_network_policy(seen),
    )
    return settings, tuple(assumed)


def _sender(seen: Seen) -> SenderView:
    """The trainer, as its Lease has it."""
    lease = seen.children.get(f"Lease/{sender_lease(seen.fleet.metadata.name)}")
    if lease is None:
        return SenderView()
    try:
        renewed = min(datetime.fromisoformat(LeaseRecord.of(lease).renewed), seen.now)
    except ValueError:  # never renewed, or somebody wrote something else there
        renewed = LONG_AGO
    known = next((each.status.sender for each in seen.versions if each.status.sender is not None), None)
    view = sender_view(lease, renewed)
    uid = known.uid if known is not None and known.holder == view.holder else "as the API server has it"
    return replace(view, uid=uid)


def _network_policy(seen: Seen) -> dict[str, Any]:
    """Which pods the operator told the fleet's NetworkPolicy to let in; nothing where there is none."""
    policy = seen.children.get(f"{NETWORK_POLICY}/{network_policy_name(seen.fleet.metadata.name)}")
    rules = ((policy or {}).get("spec") or {}).get("ingress") or []
    peers = (peer for rule in rules for peer in rule.get("from") or () if "namespaceSelector" in peer)
    try:
        peer = next(peers)  # the operator's is the only one of another namespace
        namespace = peer["namespaceSelector"]["matchLabels"][NAMESPACE_LABEL]
        return {"operator_namespace": namespace, "operator_pods": tuple(peer["podSelector"]["matchLabels"].items())}
    except (KeyError, StopIteration):  # none, or somebody has changed it: it is shown as one that will be deleted
        return {}


def _applied(observed: Observed, seen: Seen) -> dict[str, Any]:
    """Hashes of the children that say what they should; nothing for those that exist and do not."""
    applied: dict[str, Any] = dict.fromkeys(seen.children, "")
    for action in plan_children(observed):
        if isinstance(action, ApplyObject):
            kind, name = action.manifest["kind"], action.manifest["metadata"]["name"]
            live = seen.children.get(f"{kind}/{name}")
            unknown = kind in seen.closed_kinds
            if unknown or (live is not None and says(live, content_of(action.manifest))):
                applied[f"{kind}/{name}"] = action.content_hash
    return applied


def describe(action: Action) -> str:
    """An action for a person."""
    if isinstance(action, ApplyObject):
        return f"apply {action.manifest['kind']} {action.manifest['metadata']['name']}"
    if isinstance(action, DeleteObject):
        return f"delete {action.kind} {action.name}"
    if isinstance(action, CreatePod):
        return f"create pod {action.manifest['metadata']['name']}"
    if isinstance(action, DeletePod | StopPod):
        what = "delete" if isinstance(action, DeletePod) else "stop, and keep,"
        return f"{what} pod {action.name}: {action.why}"
    if isinstance(action, LabelPod):
        return f"{'add' if action.serving else 'take off'} the serving label of pod {action.name}"
    return f"command {_command(action)} to {action.pod}"


def _command(action: GuardCall) -> str:
    said = action.command.model_dump(mode="json", exclude={"incarnation"}, exclude_none=True)
    parts = [f"{name}={value['path'] if isinstance(value, dict) else value}" for name, value in said.items()]
    return f"{type(action.command).__name__} {' '.join(parts)}"


def _changes(seen: Seen, decision: Decision) -> Iterator[Change]:
    if decision.fleet_status is not None:
        name = f"RolloutEngine/{seen.fleet.metadata.name}"
        yield from differences(name, seen.fleet.status.dump(), decision.fleet_status.status.dump())
    known = {version.metadata.name: version.status.dump() for version in seen.versions}
    for write in decision.weight_version_statuses:
        yield from differences(f"WeightVersion/{write.name}", known[write.name], write.status.dump())


def differences(where: str, old: Any, new: Any, field: str = "") -> Iterator[Change]:
    """Leaf by leaf; conditions and engines are told apart by their names, other lists by place."""
    old, new = _by_name(old), _by_name(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(where, old.get(key), new.get(key), f"{field}.{key}" if field else str(key))
    elif old != new:
        yield Change(where, field, old, new)


def _by_name(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    items = [item if isinstance(item, dict) else {} for item in value]
    for key in ("type", "name"):
        if items and all(key in item for item in items):
            return {str(item[key]): item for item in items}
    return {str(place): item for place, item in enumerate(value)}


def _why(seen: Seen, decision: Decision) -> Iterator[str]:
    """Conditions after the decision: of the fleet, and of the WeightVersions' acceptance and end."""
    fleet = seen.fleet.status if decision.fleet_status is None else decision.fleet_status.status
    yield from _told(f"RolloutEngine/{seen.fleet.metadata.name}", fleet.conditions)
    written = {write.name: write.status for write in decision.weight_version_statuses}
    for version in seen.versions:
        name = version.metadata.name
        yield from _told(f"WeightVersion/{name}", written.get(name, version.status).conditions)


def _told(name: str, conditions: Iterable[Any]) -> Iterator[str]:
    for condition in conditions:
        yield f"{name} {condition.type}={condition.status.value} ({condition.reason}): {condition.message}"
