"""What the watches told, overlaid with what the API server answered to our own writes; repaired by the resync."""

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollfleet_operator.api.meta import LABEL_COMPONENT, LABEL_FLEET
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.objects.common import content_of, says
from rollfleet_operator.core.observed import PodView
from rollfleet_operator.ports import Manifest

MAX_TOMBSTONES = 10_000
ENGINE_NAME = re.compile(r"-[0-9]{1,9}-[0-9]{1,2}-[a-z0-9]+")  # of a pod, after its fleet's name


def key_of(namespace: str, fleet: str) -> str:
    """The queue's key of a fleet."""
    return f"{namespace}/{fleet}"


def split_key(key: str) -> tuple[str, str]:
    """Namespace and name of a key."""
    namespace, _, name = key.partition("/")
    return namespace, name


def revision(manifest: Manifest) -> int:
    """resourceVersion as a number: comparable only between versions of the same object."""
    return int(manifest["metadata"].get("resourceVersion") or 0)


def fleet_of(pod: Manifest) -> tuple[str, str] | None:
    """Name and uid of the RolloutEngine that controls the pod. Labels are edited now and then, owners hardly ever.

    A pod that lost its owner, and is ours by labels and name, may serve all the same: its fleet's uid is then empty.
    """
    metadata = pod["metadata"]
    controller = controller_of(pod)
    if controller is not None:
        return (str(controller["name"]), str(controller["uid"])) if controller.get("kind") == "RolloutEngine" else None
    labels = metadata.get("labels") or {}
    fleet = labels.get(LABEL_FLEET, "")
    ours = labels.get(LABEL_COMPONENT) == "engine" and ENGINE_NAME.fullmatch(metadata["name"].removeprefix(fleet))
    return (fleet, "") if fleet and ours else None


def controller_of(manifest: Manifest) -> Manifest | None:
    """The owner that controls an object."""
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((dict(owner) for owner in owners if owner.get("controller")), None)


def our_labels(fleet: str) -> dict[str, str]:
    """Labels by which watches, Services and people find an engine's pod."""
    return {LABEL_FLEET: fleet, LABEL_COMPONENT: "engine"}


@dataclass(frozen=True)
class _Kept:
    key: str
    owner_uid: str
    view: PodView
    revision: int
    in_doubt: bool  # its labels are not ours any more, or a watch by label lost sight of it


class PodStore:
    """Engine pods, reduced to their views. By uid, since a name may come again."""

    def __init__(self) -> None:
        self._pods: dict[str, _Kept] = {}
        self._by_key: dict[str, set[str]] = {}
        # By uid, whether its containers had ended, as far as it was told. A late answer must not bring a pod back.
        self._gone: OrderedDict[str, bool] = OrderedDict()

    def upsert(self, pod: Manifest) -> str | None:
        """Take a newer version of a pod. The fleet's key where that changed what decisions see, else None."""
        metadata, owner = pod["metadata"], fleet_of(pod)
        uid, known = metadata["uid"], self._pods.get(metadata["uid"])
        if owner is None:
            return None
        if uid in self._gone:
            return self._hear_of_gone(uid, pod, key_of(metadata["namespace"], owner[0]))
        if known is not None and (
            known.revision > revision(pod) or (known.revision == revision(pod) and not known.in_doubt)
        ):
            return None
        labels = metadata.get("labels") or {}
        in_doubt = not owner[1] or any(labels.get(name) != value for name, value in our_labels(owner[0]).items())
        kept = _Kept(key_of(metadata["namespace"], owner[0]), owner[1], pod_view(pod), revision(pod), in_doubt)
        self._pods[uid] = kept
        self._by_key.setdefault(kept.key, set()).add(uid)
        return kept.key if known is None or known.view != kept.view or in_doubt else None

    def _hear_of_gone(self, uid: str, pod: Manifest, key: str) -> str | None:
        """Its last words, where a request has learnt before the watch that it is gone: whether its containers ended."""
        if self._gone[uid] or not pod_view(pod).over:
            return None
        self._gone[uid] = True
        return key

    def doubt(self, uid: str) -> str | None:
        """A watch by label lost sight of the pod: it is gone, or somebody took the label off. The fleet's key."""
        known = self._pods.get(uid)
        if known is None:
            return None
        self._pods[uid] = replace(known, in_doubt=True)
        return known.key

    def doubtful(self, key: str) -> tuple[PodView, ...]:
        """The fleet's pods that must be looked at one by one."""
        return tuple(self._pods[uid].view for uid in self._by_key.get(key, ()) if self._pods[uid].in_doubt)

    def remove(self, uid: str) -> str | None:
        """The pod is gone. The fleet's key where it was known."""
        known = self._pods.pop(uid, None)
        self._gone[uid] = self._gone.get(uid, False) or (known is not None and known.view.over)
        if len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        if known is None:
            return None
        self._by_key[known.key].discard(uid)
        if not self._by_key[known.key]:
            del self._by_key[known.key]
        return known.key

    def terminated(self, uids: Iterable[str]) -> frozenset[str]:
        """Those of these pods that are gone and whose containers had ended by the kubelet's word."""
        return frozenset(uid for uid in uids if self._gone.get(uid, False))

    def pods(self, key: str, owner_uid: str) -> tuple[PodView, ...]:
        """The fleet's pods in a stable order; not those of a deleted fleet of the same name."""
        kept = [self._pods[uid] for uid in self._by_key.get(key, ())]
        views = [one.view for one in kept if one.owner_uid == owner_uid]
        return tuple(sorted(views, key=lambda view: (view.ordinal, view.created, view.name)))

    def snapshot(self, namespace: str | None) -> dict[str, int]:
        """Revision by uid, of one namespace or of all."""
        return {
            uid: kept.revision
            for uid, kept in self._pods.items()
            if namespace is None or split_key(kept.key)[0] == namespace
        }

    def reconcile_list(self, before: dict[str, int], listed: Iterable[Manifest]) -> tuple[set[str], list[Manifest]]:
        """Repair from a list read after `before` was taken: keys that changed, and pods that no watch had told of.

        A pod that was known before, has not changed since and is not in the list is gone, or has lost its label.
        """
        pods = list(listed)
        untold = [pod for pod in pods if self._is_untold(pod)]
        keys = {key for pod in pods if (key := self.upsert(pod)) is not None}
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid, known_revision in before.items():
            kept = self._pods.get(uid)
            if uid not in present and kept is not None and kept.revision == known_revision:
                keys.add(kept.key)
                self.doubt(uid)
        return keys, untold

    def keys(self) -> set[str]:
        """Fleets that have pods."""
        return set(self._by_key)

    def _is_untold(self, pod: Manifest) -> bool:
        uid = pod["metadata"]["uid"]
        known = self._pods.get(uid)
        if fleet_of(pod) is None or uid in self._gone:  # a router's, or one that is over
            return False
        return known is None or known.revision < revision(pod)


class FleetStore:
    """The fleets as they were seen last: for metrics and to know which keys exist. Decisions read the API server."""

    def __init__(self) -> None:
        self._fleets: dict[str, RolloutEngine] = {}

    def put(self, fleet: RolloutEngine) -> None:
        """The fleet was read."""
        self._fleets[key_of(fleet.metadata.namespace, fleet.metadata.name)] = fleet

    def remove(self, key: str) -> None:
        """The fleet is gone."""
        self._fleets.pop(key, None)

    def clear(self) -> None:
        """Know of none."""
        self._fleets.clear()

    def all(self) -> list[RolloutEngine]:
        """What is known now."""
        return list(self._fleets.values())

    def keys(self) -> set[str]:
        """Keys of what is known now."""
        return set(self._fleets)

    def uid(self, key: str) -> str:
        """Uid of a fleet; empty where it is not known."""
        fleet = self._fleets.get(key)
        return "" if fleet is None else fleet.metadata.uid

    def uids(self) -> set[str]:
        """Uids of what is known now."""
        return {fleet.metadata.uid for fleet in self._fleets.values()}


@dataclass(frozen=True)
class _Applied:
    content_hash: str
    manifest: Manifest
    revision: int


class ChildStore:
    """Children other than pods that this process applied: which content, and at which revision they were left.

    Those that an operator before this one applied are known by name, with no content: so they are applied again, which
    changes nothing, or deleted where nobody wants them any more.
    """

    def __init__(self) -> None:
        self._applied: dict[str, dict[str, _Applied]] = {}  # fleet's key -> "Kind/name"

    def applied(self, key: str, content_hash: str, manifest: Manifest, answer: Manifest) -> None:
        """The API server has taken this content."""
        self._applied.setdefault(key, {})[_child_id(manifest)] = _Applied(content_hash, manifest, revision(answer))

    def deleted(self, key: str, kind: str, name: str) -> None:
        """The child is gone."""
        self._applied.get(key, {}).pop(f"{kind}/{name}", None)

    def hashes(self, key: str) -> dict[str, str]:
        """Content hash by "Kind/name"."""
        return {child: applied.content_hash for child, applied in self._applied.get(key, {}).items()}

    def forget(self, key: str) -> None:
        """The fleet is gone."""
        self._applied.pop(key, None)

    def clear(self) -> None:
        """Know of none."""
        self._applied.clear()

    def told(self, kind: str, manifest: Manifest, *, deleted: bool) -> str | None:
        """A watch told of a child. The fleet's key where it no longer says what was applied, or is gone."""
        metadata = manifest["metadata"]
        child = f"{kind}/{metadata['name']}"
        fleets = (*_owning_fleets(manifest), (metadata.get("labels") or {}).get(LABEL_FLEET, ""))
        key = key_of(metadata["namespace"], fleets[0])
        applied = self._applied.get(key, {}).get(child)
        if applied is None or revision(manifest) <= applied.revision:  # an echo, or older than our own write
            return None
        if not deleted and says(manifest, content_of(applied.manifest)):
            return None
        self.deleted(key, kind, metadata["name"])
        return key

    def reconcile_list(self, namespace: str | None, kind: str, listed: Iterable[Manifest]) -> set[str]:
        """Forget children of a kind that are missing or no longer say what was applied. The keys of their fleets."""
        live = {(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in listed}
        drifted: set[str] = set()
        for key, children in list(self._applied.items()):
            fleet_namespace = split_key(key)[0]
            if namespace not in (None, fleet_namespace):
                continue
            for child in [child for child in children if child.startswith(f"{kind}/")]:
                found = live.get((fleet_namespace, child.removeprefix(f"{kind}/")))
                applied = children[child]
                if found is None or (
                    revision(found) != applied.revision and not says(found, content_of(applied.manifest))
                ):
                    del children[child]
                    drifted.add(key)
            if not children:
                del self._applied[key]
        for item in live.values():
            self._adopt(kind, item)
        return drifted

    def _adopt(self, kind: str, item: Manifest) -> None:
        metadata = item["metadata"]
        for fleet in _owning_fleets(item):
            children = self._applied.setdefault(key_of(metadata["namespace"], fleet), {})
            children.setdefault(f"{kind}/{metadata['name']}", _Applied("", {}, revision(item)))


def _owning_fleets(manifest: Manifest) -> tuple[str, ...]:
    owners = manifest["metadata"].get("ownerReferences") or ()
    return tuple(owner["name"] for owner in owners if owner["kind"] == "RolloutEngine")


def _child_id(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"
