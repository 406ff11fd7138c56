"""What the cluster looks like now: the supervisor's record, checked against the machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster import api, machine, teardown
from devcluster.components import NPU_RESOURCE
from devcluster.network import NODE, AddressPlan
from devcluster.paths import Paths


@dataclass(frozen=True)
class ComponentStatus:
    """One process. `exits` tells the last times it ended by itself."""

    name: str
    pid: int | None
    ready_after_s: float | None
    restarts: int
    exits: tuple[str, ...]
    log: str

    @property
    def is_well(self) -> bool:
        return self.pid is not None and self.ready_after_s is not None


@dataclass(frozen=True)
class ClusterStatus:
    """`state` is Up, Degraded (something has died, or is still starting), or Down."""

    state: str
    supervisor: int | None
    components: tuple[ComponentStatus, ...]
    node: dict[str, Any]
    leftovers: dict[str, int]

    def to_json(self, paths: Paths) -> dict[str, Any]:
        return {
            "state": self.state,
            "home": str(paths.home),
            "cache": str(paths.cache),
            "kubeconfig": str(paths.kubeconfig),
            "supervisor": self.supervisor,
            "node": self.node,
            "components": [
                {
                    "name": c.name,
                    "pid": c.pid,
                    "readyAfterSeconds": c.ready_after_s,
                    "restarts": c.restarts,
                    "exits": list(c.exits),
                    "log": c.log,
                }
                for c in self.components
            ],
            "onTheMachine": self.leftovers,
        }


def read_components(paths: Paths) -> tuple[int | None, tuple[ComponentStatus, ...]]:
    """The supervisor's record; a pid that is no process of ours any more counts as none."""
    if not paths.status.exists():
        return None, ()
    record = json.loads(paths.status.read_text())
    alive = set(machine.marked_pids(paths.home))
    components = tuple(
        ComponentStatus(
            name=value["name"],
            pid=value["pid"] if value["pid"] in alive else None,
            ready_after_s=value["ready_after_s"],
            restarts=value["restarts"],
            exits=tuple(value["exits"]),
            log=str(paths.logs / f"{value['name']}.log"),
        )
        for value in record["components"]
    )
    supervisor: int = record["supervisor"]
    return supervisor if supervisor in alive else None, components


def node_summary(node: dict[str, Any] | None) -> dict[str, Any]:
    """The few facts of the Node object that matter here."""
    if node is None:
        return {"ready": False}
    conditions = {c["type"]: c["status"] for c in node["status"].get("conditions", [])}
    return {
        "name": node["metadata"]["name"],
        "ready": conditions.get("Ready") == "True",
        "version": node["status"]["nodeInfo"]["kubeletVersion"],
        "npus": int(node["status"].get("allocatable", {}).get(NPU_RESOURCE, "0")),
    }


def read(plan: AddressPlan, paths: Paths) -> ClusterStatus:
    supervisor, components = read_components(paths)
    on_machine = {kind: len(found) for kind, found in teardown.leftovers(paths).items()}
    node = node_summary(api.get(plan, paths, f"/api/v1/nodes/{NODE}") if components else None)
    if supervisor is not None and components and all(c.is_well for c in components) and node["ready"]:
        state = "Up"
    elif supervisor is None and not any(on_machine.values()):
        state = "Down"
    else:
        state = "Degraded"
    return ClusterStatus(state, supervisor, components, node, on_machine)


def text(status: ClusterStatus, paths: Paths) -> str:
    """For people."""
    lines = [f"{status.state}  (home {paths.home})"]
    if status.node.get("name"):
        node = status.node
        lines.append(f"node {node['name']} {node['version']} ready={node['ready']} npus={node['npus']}")
    for c in status.components:
        ready = "starting" if c.ready_after_s is None else f"ready after {c.ready_after_s:.1f} s"
        state = f"pid {c.pid}, {ready}" if c.pid is not None else "not running"
        last = f"; last end: {c.exits[-1]}" if c.exits else ""
        lines.append(f"  {c.name:24} {state}, {c.restarts} restarts{last}")
    if status.state != "Up":
        lines += [f"  {count} {kind} on the machine" for kind, count in status.leftovers.items() if count]
    return "\n".join(lines)


def binaries_folder(paths: Paths) -> Path:
    return paths.cache / "bin" / "current"
