"""A fleet as its user handles it: apply, wait, bump, look."""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from examples.demo.checks import GateChange
from examples.demo.kubectl import apply, get, kubectl, until
from examples.demo.manifests import EngineKind, rollout_engine, weight_version

START_TIMEOUT_S = 600.0
UPDATE_TIMEOUT_S = 300.0
FINISHED = ("Active", "Failed", "Superseded")


def condition(document: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A condition by type; empty where there is none."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return next((dict(c) for c in conditions if c["type"] == kind), {})


@dataclass(frozen=True)
class Fleet:
    """Name and namespace of a RolloutEngine, and of its WeightVersion."""

    name: str
    namespace: str
    operator: str = ""  # the one that serves it, where that is not the one that serves all

    @property
    def weight_version(self) -> str:
        """Name of the WeightVersion that the demo makes."""
        return f"{self.name}-policy"

    async def create(self, kind: EngineKind, replicas: int, **spec: Any) -> None:
        """Namespace and RolloutEngine."""
        await apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        manifest = rollout_engine(self.name, self.namespace, kind, replicas, **spec)
        if self.operator:
            manifest["metadata"]["labels"] = {"rollfleet.io/operator": self.operator}
        await apply(manifest)

    async def serving(self, replicas: int, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait until so many engines serve."""
        return await until(
            "rolloutengine",
            self.name,
            self.namespace,
            lambda o: (o.get("status") or {}).get("servingReplicas") == replicas,
            timeout_s,
        )

    async def url(self) -> str:
        """Where clients of this machine reach the router, once it is up and its Service leads there."""
        rollout = ("rollout", "status", f"deployment/{self.name}-router", "-n", self.namespace, "--timeout=120s")
        await kubectl(*rollout, timeout_s=130)
        url = os.environ.get("ROLLFLEET_DEMO_URL")
        if not url:
            service = await get("service", self.name, self.namespace)
            url = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
        await answers(f"{url}/readiness")
        return url

    async def bump(self, version: int, path: str, **spec: Any) -> None:
        """Name the weights that the fleet must hold."""
        await apply(weight_version(self.name, self.namespace, version, path, **spec))

    async def finished(self, version: int, timeout_s: float = UPDATE_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the update to `version` has ended, however."""
        return await until(
            "weightversion",
            self.weight_version,
            self.namespace,
            lambda o: (o.get("status") or {}).get("version") == version and o["status"].get("phase") in FINISHED,
            timeout_s,
            interval_s=0.1,
        )

    async def active(self, version: int, timeout_s: float = UPDATE_TIMEOUT_S) -> dict[str, Any]:
        """Wait until `version` is Active; any other end is an error that shows the status."""
        document = await self.finished(version, timeout_s)
        if document["status"]["phase"] != "Active":
            raise RuntimeError(f"version {version} ended otherwise: {json.dumps(document['status'], indent=1)[:3000]}")
        return document

    async def pods(self) -> list[dict[str, Any]]:
        """The engines' pods, by name."""
        selector = f"rollfleet.io/fleet={self.name},rollfleet.io/component=engine"
        document = json.loads(await kubectl("get", "pods", "-n", self.namespace, "-l", selector, "-o", "json"))
        return sorted(document["items"], key=lambda pod: str(pod["metadata"]["name"]))

    async def gate_changes(self, pods: Sequence[str]) -> list[GateChange]:
        """What the guards of these pods logged about their gates, in order of time."""
        logs = await asyncio.gather(*(self._log(pod) for pod in pods))
        return sorted((change for log in logs for change in log), key=lambda change: change.time)

    async def _log(self, pod: str) -> list[GateChange]:
        text = await kubectl("logs", pod, "-n", self.namespace, "-c", "engine", "--tail=-1")
        return [change for line in text.splitlines() if (change := gate_change(pod, line)) is not None]

    async def remove_pod(self, name: str) -> None:
        """Delete a pod and do not wait for its end."""
        await kubectl("delete", "pod", name, "-n", self.namespace, "--wait=false")

    async def delete(self, timeout_s: float = 120.0) -> None:
        """Remove the namespace and all in it, where it is still there."""
        await kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=true", timeout_s=timeout_s)


async def answers(url: str, timeout_s: float = 60.0) -> None:
    """Wait until it answers 200; TimeoutError tells why not. kube-proxy hears of a pod a moment after it is ready."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
                    why = f"status {answer.status}: {(await answer.text())[:500]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            if loop.time() >= deadline:
                raise TimeoutError(f"{url} did not answer within {timeout_s:g} s: {why}")
            await asyncio.sleep(0.1)


def gate_change(pod: str, line: str) -> GateChange | None:
    """A guard's log line as a gate change; None for any other line."""
    start = line.find("{")
    if start < 0 or '"gate.' not in line:
        return None
    try:
        entry = json.loads(line[start:])
    except json.JSONDecodeError:
        return None
    if entry.get("event") not in ("gate.opened", "gate.closed"):
        return None
    last = entry.get("lastAdmissionNs")
    return GateChange(
        engine=pod,
        time=entry["timeNs"] / 1e9,
        opened=entry["event"] == "gate.opened",
        version=entry.get("version"),
        last_admission=last / 1e9 if last else None,
    )


@dataclass(frozen=True)
class Timed:
    """An update as its caller saw it."""

    document: dict[str, Any]
    seconds: float


async def timed_bump(fleet: Fleet, version: int, path: str) -> Timed:
    """Bump and wait for Active."""
    started = time.monotonic()
    await fleet.bump(version, path)
    return Timed(await fleet.active(version), time.monotonic() - started)
