"""One look at a fleet: the objects from quorum, the pods from the store, the guards from their followers."""

import asyncio
import re
from dataclasses import dataclass, replace

from pydantic import ValidationError

from rollfleet_operator.api.meta import LABEL_ENGINE, LABEL_NODE
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import Phase, SourceType, WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import Busy, InvalidSpec, NotFound, Rejected, Unreachable
from rollfleet_operator.core.objects.common import owner_reference
from rollfleet_operator.core.observed import Observed, PodView, SenderView, Settings
from rollfleet_operator.core.vanished import suspect_nodes, to_follow, vanished
from rollfleet_operator.ports import LEASES, PODS, ROLLOUT_ENGINES, SERVICE_ACCOUNTS, WEIGHT_VERSIONS, Cluster, Manifest
from rollfleet_operator.runtime.nodes import Nodes
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.store import controller_of, our_labels, split_key
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.senders import sender_lease

STAND_IN = {"type": "Checkpoint", "checkpoint": {"path": "unreadable"}}
ACCOUNT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
FIRST_WORDS_S = 2.0  # that the first pass over a fleet waits for its guards


@dataclass(frozen=True)
class Seen:
    """What decisions look at, and the objects as read, which status writes need."""

    observed: Observed
    fleet: Manifest
    weight_versions: dict[str, Manifest]

    def uids(self) -> dict[tuple[str, str], str]:
        """Uids by (kind, name), for Events."""
        found = {
            ("WeightVersion", name): manifest["metadata"]["uid"] for name, manifest in self.weight_versions.items()
        }
        return found | {("RolloutEngine", self.observed.fleet.metadata.name): self.fleet["metadata"]["uid"]}


@dataclass(frozen=True)
class Read:
    """The objects of a key as the API server has them. No fleet: it is gone, or never was."""

    fleet: Manifest | None
    weight_versions: dict[str, Manifest]


class Observer:
    """Two reads of the API server a pass, whatever the size of the fleet."""

    def __init__(
        self, cluster: Cluster, certificates: Certificates, records: Records, settings: Settings, uptime: Uptime
    ) -> None:
        self._cluster = cluster
        self._certificates = certificates
        self._records = records
        self._settings = settings
        self._uptime = uptime
        self._nodes = Nodes(cluster)
        self._met: dict[str, None] = {}  # fleets (by uid) that this process has looked at

    async def read(self, key: str) -> Read:
        """The fleet and the WeightVersions that name it."""
        namespace, name = split_key(key)
        asked = self._uptime.now()
        try:
            fleet, listing = await asyncio.gather(
                self._fleet(namespace, name), self._cluster.list(WEIGHT_VERSIONS, namespace)
            )
        except (Unreachable, Busy):
            self._uptime.lost(key, asked)
            raise
        self._uptime.seen(key)
        if fleet is None:
            self._uptime.forget(key)
            self._met.pop(self._records.fleets.uid(key), None)
        named = {item["metadata"]["name"]: item for item in listing.items if _names(item, name)}
        return Read(fleet, named)

    async def observe(self, key: str, fleet: RolloutEngine, read: Read) -> Seen:
        """All that one pass may know."""
        if read.fleet is None:
            raise NotFound(f"RolloutEngine {key}")
        ca_bundle, refused = await self._certificate(fleet)
        looks = await asyncio.gather(*(self._look_at(fleet, view) for view in self._records.pods.doubtful(key)))
        pods = self._records.pods.pods(key, fleet.metadata.uid)
        terminated = self._records.pods.terminated(member.uid for member in fleet.status.members)
        gone = vanished(fleet, (pod.uid for pod in pods), terminated)
        self._records.followers.ensure(key, identity_of(fleet), to_follow(pods, gone))
        self._records.followers.vouch(key, fleet.status.epoch)
        if fleet.metadata.uid not in self._met:
            # After a restart the first thing that is said of a fleet must not be that nobody knows its engines.
            await self._records.followers.first_words(key, FIRST_WORDS_S)
            self._met[fleet.metadata.uid] = None
        weight_versions = tuple(parse_weight_version(manifest) for manifest in read.weight_versions.values())
        observed = Observed(
            fleet=fleet,
            weight_versions=weight_versions,
            pods=pods,
            guards=self._records.followers.views(key),
            ca_bundle=ca_bundle,
            settings=replace(self._settings, up_since=self._uptime.since, away=self._uptime.away(key)),
            children=dict(self._records.children.hashes(key)),
            terminated=terminated,
            sender=await self._sender(key, fleet, weight_versions),
            rejected=self._records.rejected.get(key, "") or next((words for words in (refused, *looks) if words), ""),
        )
        observed = replace(observed, nodes=await self._nodes.look(suspect_nodes(observed)))
        return Seen(observed, read.fleet, read.weight_versions)

    async def _sender(self, key: str, fleet: RolloutEngine, weight_versions: tuple[WeightVersion, ...]) -> SenderView:
        """The trainer, as far as anybody waits for one. Nobody is called gone before the Lease itself was read."""
        senders = self._records.senders
        if not fleet.spec.trainers or not any(_awaits_sender(each) for each in weight_versions):
            return senders.view(key)
        namespace = fleet.metadata.namespace
        if senders.is_stale(key):
            try:
                senders.told(await self._cluster.get(LEASES, namespace, sender_lease(fleet.metadata.name)))
            except NotFound:
                senders.forget(key)
        view = senders.view(key)
        if view.holder and not view.uid:
            senders.identified(key, view.holder, await self._uid_of(namespace, view.account))
        return senders.view(key)

    async def _uid_of(self, namespace: str, account: str) -> str:
        """Of a ServiceAccount; empty where there is none."""
        if ACCOUNT_NAME.fullmatch(account) is None:  # whatever a trainer wrote there
            return ""
        try:
            found = await self._cluster.get(SERVICE_ACCOUNTS, namespace, account)
        except NotFound:
            return ""
        return str(found["metadata"]["uid"])

    async def _certificate(self, fleet: RolloutEngine) -> tuple[str, str]:
        """The CA bundle, and what keeps the certificate from being looked after.

        A fleet that has one goes on with it: it is good for months, and its engines must be led until then.
        """
        try:
            return await self._certificates.ensure(fleet), ""
        except (Rejected, Unreachable, Busy) as error:
            if not fleet.status.ca_bundle:
                raise
            return fleet.status.ca_bundle, str(error)

    async def _look_at(self, fleet: RolloutEngine, view: PodView) -> str:
        """A pod that may be gone, or has lost our labels or its owner: forget it, or give it back what it lost.

        Words of the API server where it does not take that: the engine is led all the same, and so are the others.
        """
        namespace = fleet.metadata.namespace
        try:
            pod = await self._cluster.get(PODS, namespace, view.name)
        except NotFound:
            self._records.pods.remove(view.uid)
            return ""
        if pod["metadata"]["uid"] != view.uid:
            self._records.pods.remove(view.uid)
            return ""
        patch, words = _what_it_lost(fleet, view, pod), ""
        if patch:
            try:
                pod = await self._cluster.merge_patch(PODS, namespace, view.name, patch)
            except Rejected as error:
                words = str(error)
        self._records.pods.upsert(pod)
        return words

    async def _fleet(self, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._cluster.get(ROLLOUT_ENGINES, namespace, name)
        except NotFound:
            return None


def _awaits_sender(weight_version: WeightVersion) -> bool:
    """Whether the update may still need its trainer."""
    status, pushed = weight_version.status, weight_version.spec.source.type is SourceType.TRAINER
    over = status.phase in (Phase.OPENING, Phase.ACTIVE, Phase.FAILED) and status.version == weight_version.spec.version
    return pushed and not over


def _what_it_lost(fleet: RolloutEngine, view: PodView, pod: Manifest) -> Manifest | None:
    """The patch that makes the pod ours again; None where it is."""
    labels, orphaned = pod["metadata"].get("labels") or {}, controller_of(pod) is None
    wanted = our_labels(fleet.metadata.name) | ({LABEL_ENGINE: str(view.ordinal)} if view.ordinal >= 0 else {})
    wanted |= {} if view.leads else {LABEL_NODE: str(view.node_index)}
    if not orphaned and all(labels.get(label) == value for label, value in wanted.items()):
        return None
    metadata: Manifest = {"uid": view.uid, "labels": wanted}
    if orphaned:
        others = pod["metadata"].get("ownerReferences") or []
        metadata["resourceVersion"] = pod["metadata"]["resourceVersion"]  # a list is written as a whole
        metadata["ownerReferences"] = [*others, owner_reference(fleet)]
    return {"metadata": metadata}


def parse_fleet(manifest: Manifest) -> RolloutEngine:
    """The typed fleet. What the CRD admits and this cannot read was stored under another schema."""
    try:
        return RolloutEngine.model_validate(manifest)
    except ValidationError as error:
        raise _unreadable(manifest, error) from error


def parse_weight_version(manifest: Manifest) -> WeightVersion:
    """The typed WeightVersion. One that cannot be read is judged as such, and holds up neither its fleet nor others."""
    try:
        return WeightVersion.model_validate(manifest)
    except ValidationError as error:
        spec = {"engineRef": {"name": manifest["spec"]["engineRef"]["name"]}, "version": 1, "source": STAND_IN}
        known = {"metadata": manifest["metadata"], "spec": spec, "status": _readable_status(manifest)}
        text = f"{_unreadable(manifest, error)}: write it again as this release of rollfleet has it"
        return WeightVersion.model_validate(known | {"unreadable": text})


def _readable_status(manifest: Manifest) -> Manifest:
    """The record, if it can be read; else the fleet's own must do."""
    status: Manifest = manifest.get("status") or {}
    try:
        WeightVersionStatus.model_validate(status)
    except ValidationError:
        return {}
    return status


def identity_of(fleet: RolloutEngine) -> FleetIdentity:
    """The fleet as guards know it."""
    return FleetIdentity(namespace=fleet.metadata.namespace, name=fleet.metadata.name, uid=fleet.metadata.uid)


def _unreadable(manifest: Manifest, error: ValidationError) -> InvalidSpec:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    metadata = manifest["metadata"]
    return InvalidSpec(f"{manifest.get('kind')} {metadata['namespace']}/{metadata['name']}: {where}: {first['msg']}")


def _names(manifest: Manifest, fleet: str) -> bool:
    return bool(((manifest.get("spec") or {}).get("engineRef") or {}).get("name") == fleet)
