"""A namespace with one fleet and an operator, as integration tests handle it."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from rollfleet_operator.api.meta import LABEL_OPERATOR
from rollfleet_operator.clients.errors import AlreadyExists, NotFound
from rollfleet_operator.clients.events import CONTROLLER
from rollfleet_operator.clients.kubernetes import KubernetesCluster
from rollfleet_operator.ports import (
    CHILDREN,
    EVENTS,
    PODS,
    ROLLOUT_ENGINES,
    SECRETS,
    SERVICE_ACCOUNTS,
    WEIGHT_VERSIONS,
    Manifest,
    Resource,
)
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import until

NAMESPACES = Resource("v1", "Namespace", "namespaces")
OURS = (ROLLOUT_ENGINES, WEIGHT_VERSIONS, PODS, SECRETS, *CHILDREN)
SERVING_S = 120.0
UPDATE_S = 60.0
GONE_S = 120.0
ENDED = ("Active", "Failed", "Superseded")
FLEET = "qwen"
OPERATOR_NAME = "integration"  # an operator that the chart installed leaves these fleets alone


@dataclass
class World:
    """Everything that a test touches."""

    namespace: str
    cluster: KubernetesCluster
    operator: OperatorProcess
    kind: EngineKind
    fleet: str = FLEET
    spec: dict[str, Any] = field(default_factory=lambda: {"router": {"mode": "Disabled"}, "drainTimeoutSeconds": 1})

    async def set_up(self) -> None:
        """Namespace, the operator's ServiceAccount, the operator."""
        await self.cluster.create(NAMESPACES, None, {"metadata": {"name": self.namespace}})
        account = {"metadata": {"name": self.operator.service_account, "namespace": self.namespace}}
        with contextlib.suppress(AlreadyExists):
            await self.cluster.create(SERVICE_ACCOUNTS, self.namespace, account)

    async def tear_down(self) -> None:
        """Remove all of it, and do not wait for the pods."""
        if self.operator.process is not None and self.operator.process.returncode is None:
            await self.operator.kill()
        for name in (self.fleet,):
            with contextlib.suppress(NotFound):
                await self.cluster.delete(ROLLOUT_ENGINES, self.namespace, name)
        with contextlib.suppress(NotFound):
            await self.cluster.delete(NAMESPACES, "", self.namespace)

    async def create_fleet(self, replicas: int, **spec: Any) -> Manifest:
        """Create the RolloutEngine."""
        manifest = rollout_engine(self.fleet, self.namespace, self.kind, replicas, **(self.spec | spec))
        manifest["metadata"]["labels"] = {LABEL_OPERATOR: OPERATOR_NAME}
        return await self.cluster.create(ROLLOUT_ENGINES, self.namespace, manifest)

    async def bump(self, version: int, path: str | None = None, **spec: Any) -> Manifest:
        """Name the weights that the fleet must hold."""
        manifest = weight_version(self.fleet, self.namespace, version, path or f"step-{version}", **spec)
        return await self.cluster.apply(WEIGHT_VERSIONS, self.namespace, manifest)

    async def read_fleet(self) -> Manifest:
        """The RolloutEngine now."""
        return await self.cluster.get(ROLLOUT_ENGINES, self.namespace, self.fleet)

    async def read_version(self) -> Manifest:
        """The WeightVersion now."""
        return await self.cluster.get(WEIGHT_VERSIONS, self.namespace, f"{self.fleet}-policy")

    async def pods(self) -> list[Manifest]:
        """The engines' pods by ordinal."""
        listed = await self.cluster.list(PODS, self.namespace, "rollfleet.io/component=engine")
        return sorted(listed.items, key=lambda pod: int(pod["metadata"]["labels"]["rollfleet.io/engine"]))

    async def serving(self, replicas: int, within_s: float = SERVING_S) -> Manifest:
        """Wait until so many engines serve, of a status that speaks of the newest spec."""

        def holds(fleet: Manifest) -> bool:
            status = fleet.get("status") or {}
            is_current = status.get("observedGeneration") == fleet["metadata"]["generation"]
            return is_current and status.get("servingReplicas") == replicas

        return await self._reach(self.read_fleet, holds, within_s)

    async def finished(self, version: int, within_s: float = UPDATE_S) -> Manifest:
        """Wait until the update has ended, however."""

        def holds(manifest: Manifest) -> bool:
            status = manifest.get("status") or {}
            return status.get("version") == version and status.get("phase") in ENDED

        return await self._reach(self.read_version, holds, within_s)

    async def active(self, version: int, within_s: float = UPDATE_S) -> Manifest:
        """Wait until the version is Active, and the fleet has committed it."""
        document = await self.finished(version, within_s)
        assert document["status"]["phase"] == "Active", f"{document['status']}\n{self.operator.log()[-4000:]}"
        assert (await self.read_fleet())["status"]["committed"]["version"] == version
        return document

    async def _reach(self, read: Callable[[], Any], holds: Callable[[Manifest], bool], within_s: float) -> Manifest:
        last: Manifest = {}

        async def there() -> bool:
            nonlocal last
            last = await read()
            return holds(last)

        await until(there, within_s, lambda: f"status: {last.get('status')}\n{self.operator.log()[-6000:]}")
        return last

    async def revisions(self) -> dict[str, str]:
        """By "Kind/name" of everything that is ours in the namespace, what changes when the operator writes to it.

        That is the resourceVersion; of pods, whose status is the kubelet's, what is not status. The kubelet's Events,
        of a probe that a busy machine answered late, are not ours.
        """
        listings = await asyncio.gather(*(self.cluster.list(resource, self.namespace) for resource in (*OURS, EVENTS)))
        return {
            f"{resource.kind}/{item['metadata']['name']}": _revision(resource, item)
            for resource, listing in zip((*OURS, EVENTS), listings, strict=True)
            for item in listing.items
            if resource != EVENTS or item.get("reportingController", CONTROLLER) == CONTROLLER
        }

    async def writes(self) -> float:
        """Requests by which the operator has tried to change anything."""
        metrics = await self.operator.metrics()
        changing = ('verb="create"', 'verb="patch"', 'verb="update"', 'verb="delete"')
        return sum(
            value
            for name, value in metrics.items()
            if name.startswith("rollfleet_kubernetes_request_seconds_count")
            and any(verb in name for verb in changing)
            and 'resource="serviceaccounts/token"' not in name  # renewed by the clock
        )

    async def gone(self) -> None:
        """Wait until nothing of the fleet is left."""

        async def empty() -> bool:
            listings = [
                await self.cluster.list(r, self.namespace, f"rollfleet.io/fleet={self.fleet}") for r in OURS[2:]
            ]
            return not any(listing.items for listing in listings)

        await until(empty, GONE_S, lambda: "something of the deleted fleet is still there")

    def events_of(self, reason: str) -> Callable[[], Any]:
        """A reader of this namespace's Events of a reason."""

        async def read() -> list[Manifest]:
            listing = await self.cluster.list(EVENTS, self.namespace)
            return [item for item in listing.items if item.get("reason") == reason]

        return read


def _revision(resource: Resource, item: Manifest) -> str:
    metadata = item["metadata"]
    if resource != PODS:
        return str(metadata["resourceVersion"])
    ours = ("labels", "annotations", "finalizers", "ownerReferences", "deletionTimestamp")
    return json.dumps([metadata["uid"], [metadata.get(name) for name in ours], item["spec"]], sort_keys=True)
