"""A reconciler with a plan that a test gives, over an API server in memory and guards that never answer."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rollfleet_operator.api.weightversion import WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.events import Recorder
from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.guards import Endpoint
from rollfleet_operator.core.actions import (
    Decision,
    WeightVersionStatusWrite,
)
from rollfleet_operator.core.observed import Observed, Settings
from rollfleet_operator.ports import Manifest
from rollfleet_operator.runtime.apply import Applier
from rollfleet_operator.runtime.observe import Observer
from rollfleet_operator.runtime.queue import KeyedQueue
from rollfleet_operator.runtime.reconcile import Reconciler
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_protocol.commands import Command
from rollfleet_protocol.state import EngineState
from tests.support.cluster import MemoryCluster, SilentMeter

KEY = "rl/qwen"
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SETTINGS = Settings("system:serviceaccount:rollfleet:operator", "o-1", "router", host_path_allowed=True)
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen", "namespace": "rl"}, "spec": {}}


def make_fleet(**metadata: Any) -> Manifest:
    spec = {"image": "i", "model": {"path": "m", "servedName": "policy"}, "volumes": {"model": {}}}
    identity = {"name": "qwen", "namespace": "rl", "uid": "f-1", "generation": 1}
    return {
        "apiVersion": "rollfleet.io/v1alpha1",
        "kind": "RolloutEngine",
        "metadata": identity | metadata,
        "spec": spec,
    }


def make_version(fleet: str = "qwen") -> Manifest:
    source = {"type": "Checkpoint", "checkpoint": {"path": "step-1"}}
    return {
        "apiVersion": "rollfleet.io/v1alpha1",
        "kind": "WeightVersion",
        "metadata": {"name": "policy", "namespace": "rl", "uid": "w-1", "generation": 1},
        "spec": {"engineRef": {"name": fleet}, "version": 1, "source": source},
    }


class SilentGuards:
    """Guards that never answer, and remember what they were told."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.looks = 0

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def canary(self, endpoint: Endpoint) -> None:
        """Guarded."""

    async def look(self, endpoint: Endpoint) -> EngineState:
        self.looks += 1
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        self.commands.append(command)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Tally(SilentMeter):
    """Counts the ends of updates."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str, str]] = []

    def update_finished(self, namespace: str, name: str, outcome: str) -> None:
        self.finished.append((namespace, name, outcome))


class Desk:
    """A reconciler whose plan a test gives."""

    def __init__(self) -> None:
        self.cluster, self.guards = MemoryCluster(), SilentGuards()
        self.decision: Decision | Exception = Decision()
        self.observed: Observed | None = None
        self.queue = KeyedQueue()
        self.followers = Followers(self.guards, self.queue.put, lambda: NOW)
        self.records = Records(self.queue, self.followers)
        self.recorder = Recorder(self.cluster, "operator-0", lambda: NOW)
        self.meter = meter = Tally()
        certificates = Certificates(self.cluster, "rollfleet", lambda: NOW)
        uptime = Uptime(lambda: NOW)
        observer = Observer(self.cluster, certificates, self.records, SETTINGS, uptime)
        applier = Applier(self.cluster, self.recorder, self.records, meter)
        self.reconciler = Reconciler(observer, applier, self._plan, self._plan_orphan, self.records, meter, lambda: NOW)
        self.before_plan: Callable[[], object] = lambda: None

    def _plan(self, observed: Observed, _: datetime) -> Decision:
        self.before_plan()
        self.observed = observed
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision

    def _plan_orphan(self, weight_version: WeightVersion, _: datetime) -> Decision:
        write = WeightVersionStatusWrite(weight_version.metadata.name, WeightVersionStatus(observed_generation=7))
        return Decision(weight_version_statuses=(write,))

    async def run(self) -> None:
        """One pass over the fleet."""
        self.queue.put(KEY)
        await self.reconciler.reconcile(await self.queue.get())

    async def is_due(self, within_s: float) -> bool:
        """Whether the key comes again within so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self.queue.get()
        except TimeoutError:
            return False
        return True

    def stored(self, plural: str, name: str) -> Manifest:
        return self.cluster.objects[plural, "rl", name]

    def writes(self) -> list[tuple[str, str, str]]:
        """Without the certificates'."""
        return [write for write in self.cluster.writes if write[1] not in ("secrets", "events")]

    async def said(self) -> list[str]:
        """Notes of the events that were recorded."""
        writing = asyncio.create_task(self.recorder.run())
        await self.recorder.drain()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        return [item["note"] for (plural, _, _), item in self.cluster.objects.items() if plural == "events"]
