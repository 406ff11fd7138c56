"""What the watches told, overlaid with what the API server answered to our own writes; repaired by the resync."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from rollfleet_operator.api.meta import LABEL_FLEET
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.observed import PodView
from rollfleet_operator.ports import Manifest

MAX_TOMBSTONES = 10_000


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


@dataclass(frozen=True)
class _Kept:
    key: str
    view: PodView
    revision: int


class PodStore:
    """Engine pods, reduced to their views. By uid, since a name may come again."""

    def __init__(self) -> None:
        self._pods: dict[str, _Kept] = {}
        self._by_key: dict[str, set[str]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()  # uids: a late answer must not bring a pod back

    def upsert(self, pod: Manifest, *, added: bool = False) -> str | None:
        """Take a newer version of a pod. The fleet's key where that changed what decisions see, else None.

        `added`: a watch says that the pod has come; then it has, even if it went away before by losing its label.
        """
        metadata = pod["metadata"]
        if added:
            self._gone.pop(metadata["uid"], None)
        fleet = (metadata.get("labels") or {}).get(LABEL_FLEET)
        if not fleet or metadata["uid"] in self._gone:
            return None
        known = self._pods.get(metadata["uid"])
        if known is not None and known.revision >= revision(pod):
            return None
        key, view = key_of(metadata["namespace"], fleet), pod_view(pod)
        if known is not None and known.key != key:
            self._by_key[known.key].discard(metadata["uid"])
        self._pods[metadata["uid"]] = _Kept(key, view, revision(pod))
        self._by_key.setdefault(key, set()).add(metadata["uid"])
        return key if known is None or known.view != view or known.key != key else None

    def remove(self, uid: str) -> str | None:
        """The pod is gone. The fleet's key where it was known."""
        self._gone[uid] = None
        if len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        known = self._pods.pop(uid, None)
        if known is None:
            return None
        self._by_key[known.key].discard(uid)
        if not self._by_key[known.key]:
            del self._by_key[known.key]
        return known.key

    def pods(self, key: str) -> tuple[PodView, ...]:
        """The fleet's pods in a stable order."""
        views = [self._pods[uid].view for uid in self._by_key.get(key, ())]
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

        A pod that was known before, has not changed since and is not in the list is gone.
        """
        pods = list(listed)
        untold = [pod for pod in pods if self._is_untold(pod)]
        keys = {key for pod in pods if (key := self.upsert(pod)) is not None}
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid, known_revision in before.items():
            kept = self._pods.get(uid)
            if uid not in present and kept is not None and kept.revision == known_revision:
                keys.add(kept.key)
                self.remove(uid)
        return keys, untold

    def keys(self) -> set[str]:
        """Fleets that have pods."""
        return set(self._by_key)

    def _is_untold(self, pod: Manifest) -> bool:
        known = self._pods.get(pod["metadata"]["uid"])
        return (known is None or known.revision < revision(pod)) and pod["metadata"]["uid"] not in self._gone


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
                    revision(found) != applied.revision and not says(found, _content(applied.manifest))
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
        owners = [owner["name"] for owner in metadata.get("ownerReferences") or () if owner["kind"] == "RolloutEngine"]
        for fleet in owners:
            children = self._applied.setdefault(key_of(metadata["namespace"], fleet), {})
            children.setdefault(f"{kind}/{metadata['name']}", _Applied("", {}, revision(item)))


def _child_id(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _content(manifest: Manifest) -> Manifest:
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
