"""Nodes, kubelets and containers of the model: what really runs, apart from what the API server says of it."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from rollfleet_operator.core.observed import ContainerState, NodeView, PodView
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig
from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.model.engines import Damage, ModelEngine, Shelf
from tests.support.builders import NOW

NODES = 3
NOTICED_S = 40.0  # until the control plane calls a silent node NotReady
EVICTED_S = 60.0  # until its pods are marked for deletion
REPORT_S = 300.0  # how often a kubelet reports
TAINTED_S = 10.0  # until a person says that a node is switched off
LONGEST_RESTART_S = 20.0  # the kubelet's longest back-off; in truth five minutes
HOOKS_S = (1.0, 4.0)  # until the preStop hook has ended
GRACE_S = 30
PROBE_S = 2.0
DEAF_S = 105.0  # the longest that a kubelet does not know that its watch of pods is dead, and waits to begin anew


@dataclass
class Node:
    """A machine."""

    name: str
    lost_until: float = -1.0  # its kubelet reaches no API server; containers run on
    cut_until: float = -1.0  # nor does the operator reach its engines; clients still do
    off_until: float = -1.0  # without power
    tainted: bool = False  # out of service, by a person's word
    forgotten: bool = False  # its object was deleted while it was cut off
    deaf_until: float = -1.0  # its kubelet's watch of pods is dead; it reports all the same
    ready_since: datetime | None = NOW  # by the API server
    heard: datetime | None = NOW


@dataclass
class Host:
    """A pod's container on its node."""

    uid: str
    node: Node
    damage: Damage
    obeys: str  # uid of the operator's ServiceAccount when the pod was made
    ip: str
    fleet: str  # uid of the RolloutEngine that owns it
    template: str  # hash of what it was made from
    process: ModelEngine | None = None
    incarnations: int = 0
    status: dict[str, object] = field(default_factory=dict)  # as the kubelet would report it
    leaving: bool = False
    gone: bool = False
    ended: bool = False  # evicted: nothing is started here any more
    due: float = -1.0  # when its engine is looked at next


class Nodes:
    """All of it."""

    def __init__(self, clock: Clock, rng: random.Random, api: ApiServer, shelf: Shelf) -> None:
        self.clock = clock
        self.rng = rng
        self.api = api
        self.shelf = shelf
        self.nodes = [Node(f"node-{number}") for number in range(NODES)]
        self.hosts: dict[str, Host] = {}  # everything that may run, whether the API server knows of it or not
        self.graves: dict[str, Host] = {}  # what ran once: others may still ask there
        self.load_s = 1.0
        self.reused = 0  # addresses given to another pod while their engine ran on
        self.unjudged_until = -1.0  # nobody calls a node not Ready: the controller manager is down
        self.away: dict[str, float] = {}  # template -> until when its containers fail at start
        self.make_damage: Callable[[], Damage] = Damage
        self.on_start: Callable[[Host], None] = lambda _: None
        self.on_change: Callable[[Host], None] = lambda _: None
        self.on_stop: Callable[[Host], None] = lambda _: None
        self._serial = 0
        self._addresses: dict[str, Host] = {}  # who has an address now
        api.pod_watches.append(self._pod_changed)

    @property
    def running(self) -> list[Host]:
        """Hosts whose engine's process lives."""
        return [host for host in self.hosts.values() if host.process is not None]

    def of(self, fleet: str) -> list[Host]:
        """Those of one fleet, by its uid."""
        return [host for host in self.running if host.fleet == fleet]

    # the scheduler and the kubelet ---------------------------------------------------------------------------------

    def create(self, manifest: dict[str, Any]) -> None:
        """As the API server does it; a name that is taken is none of its business twice."""
        meta = manifest["metadata"]
        if any(view.name == meta["name"] for view in self.api.pods.values()):
            return
        self._serial += 1
        uid = f"uid-{self._serial}"
        view = PodView(
            name=meta["name"],
            uid=uid,
            ordinal=int(meta["labels"]["rollfleet.io/engine"]),
            created=self.clock.now(),
            template_hash=meta["annotations"]["rollfleet.io/template-hash"],
            serving_label=False,
            phase="Pending",
            started=False,
        )
        node = self.rng.choice(self.nodes)
        ip = self._free_address(node)
        config, template = _config_of(manifest), view.template_hash
        self.hosts[uid] = Host(uid, node, self.make_damage(), config.operator.uid, ip, config.fleet.uid, template)
        self.api.owners[uid] = config.fleet.uid
        self._addresses[ip] = self.hosts[uid]
        self.api.put_pod(view)
        self.clock.later(self.rng.uniform(0.05, 1.0), lambda: self._start(uid))

    def at(self, ip: str) -> Host | None:
        """Who answers at an address."""
        return self._addresses.get(ip)

    def _free_address(self, node: Node) -> str:
        """With a Node object its addresses become free, whatever runs on at them."""
        taken = {host.ip for host in self.hosts.values() if host.uid in self.api.pods}
        lost = [
            host.ip
            for host in self.hosts.values()
            if host.node.forgotten and host.node is not node and host.uid not in self.api.pods and host.ip not in taken
        ]
        self.reused += bool(lost)
        return lost[0] if lost else f"198.51.{self._serial // 250}.{self._serial % 250 + 1}"

    def _start(self, uid: str) -> None:
        host = self.hosts.get(uid)
        if host is None or host.leaving or host.gone:
            return
        if self._silent(host.node):
            self.clock.later(1.0, lambda: self._start(uid))
            return
        self._report(
            host,
            phase="Running",
            container=ContainerState.RUNNING,
            ip=host.ip,
            node=host.node.name,
            started=False,
            running_since=self.clock.now(),
        )
        self.clock.later(self.load_s, lambda: self._come_up(uid))

    def _come_up(self, uid: str) -> None:
        host = self.hosts.get(uid)
        if host is None or host.process is not None or host.gone or host.ended:
            return
        if self.clock.time < host.node.off_until:
            self.clock.later(1.0, lambda: self._come_up(uid))
            return
        if self.clock.time < self.away.get(host.template, -1.0):
            self._fail_to_start(host)
            return
        host.incarnations += 1
        host.process = ModelEngine(f"{uid}/{host.incarnations}", self.shelf, host.damage, self.rng)
        self.on_start(host)
        if host.leaving:
            host.process.drain(self.clock.time)
        incarnation = host.incarnations
        self.clock.later(self.rng.uniform(0.0, PROBE_S), lambda: self._passed_startup(uid, incarnation))
        self.on_change(host)

    def _fail_to_start(self, host: Host) -> None:
        """A volume is away: the container ends, and the kubelet starts it again with back-off."""
        restarts = int(str(host.status.get("restarts", 0))) + 1
        began = host.status.get("running_since")
        down: dict[str, object] = {"started": False, "ready": False, "ready_since": None, "exit_code": 1}
        down |= {"restarts": restarts, "failed_from": began, "running_since": None, "container": ContainerState.WAITING}
        self._report(host, **down)
        self.clock.later(min(LONGEST_RESTART_S, 2.0**restarts), lambda: self._start_again(host))

    def _start_again(self, host: Host) -> None:
        if host.ended or host.gone or host.leaving:
            return
        self._report(host, container=ContainerState.RUNNING, running_since=self.clock.now())
        self.clock.later(self.load_s, lambda: self._come_up(host.uid))

    def _passed_startup(self, uid: str, incarnation: int) -> None:
        host = self.hosts.get(uid)
        if host is not None and host.process is not None and host.incarnations == incarnation:
            self._report(host, started=True, ready=True, ready_since=self.clock.now())

    def _silent(self, node: Node) -> bool:
        return self.clock.time < node.lost_until or self.api.down

    def _report(self, host: Host, **status: object) -> None:
        """Tell the API server, now or when it can be reached."""
        host.status |= status
        self._flush(host)

    def _flush(self, host: Host) -> None:
        if host.gone and host.uid not in self.api.pods:
            return
        if self._silent(host.node):
            self.clock.later(1.0, lambda: self._flush(host))
            return
        self.api.change_pod(host.uid, **host.status)
        if host.gone:
            self.api.remove_pod(host.uid)

    # ends -----------------------------------------------------------------------------------------------------------

    def crash(self, host: Host) -> None:
        """The process dies; the kubelet starts the container again."""
        if host.process is None:
            return
        host.process = None
        self.on_change(host)
        restarts = int(str(host.status.get("restarts", 0))) + 1
        began, now = host.status.get("running_since"), self.clock.now()
        down: dict[str, object] = {"started": False, "ready": False, "ready_since": None, "exit_code": 1}
        down |= {"restarts": restarts, "failed_from": began, "running_since": now}
        self.clock.later(0.05, lambda: self._report(host, **down))
        self.clock.later(0.1 + self.load_s, lambda: self._come_up(host.uid))

    def core_dies(self, host: Host) -> None:
        """The engine core is gone; liveness fails after a while, and the container is restarted."""
        if host.process is None:
            return
        process = host.process
        process.die(self.clock.time)
        self.on_change(host)

        def restart() -> None:
            if host.process is process:
                self.crash(host)

        self.clock.later(self.rng.uniform(1.0, 20.0), restart)

    def evict(self, host: Host) -> None:
        """The kubelet ends the pod: disk or memory pressure. The object stays, Failed."""
        if host.gone or host.leaving:
            return
        host.process, host.leaving, host.ended = None, True, True
        self._bury(host, still_known=True)
        view = self.api.pods.get(host.uid)
        self.on_change(host)
        self._report(
            host, phase="Failed", container=ContainerState.TERMINATED, started=False, ready=False, message="evicted"
        )
        if view is None or view.deleting:
            self.delete(host.uid)

    def delete(self, uid: str) -> None:
        """Graceful: the kubelet drains it, ends it, and takes the object away."""
        self.api.change_pod(uid, deleting=True, deleted_by=self.clock.now() + timedelta(seconds=GRACE_S))
        host = self.hosts.get(uid)
        if host is not None and host.ended:  # nothing to drain
            host.gone = True
            self._bury(host)
            self._flush(host)

    def stop(self, uid: str, why: str) -> None:
        """The operator ends a pod and keeps its object."""
        self.api.change_pod(uid, stopped=why)
        host = self.hosts.get(uid)
        if host is not None:
            self.on_stop(host)
            self.clock.later(0.5, lambda: self._obey_stop(host))

    def _obey_stop(self, host: Host) -> None:
        if self._silent(host.node):
            self.clock.later(1.0, lambda: self._obey_stop(host))
        else:
            self.evict(host)

    def _bury(self, host: Host, *, still_known: bool = False) -> None:
        self.graves[host.uid] = host
        if not still_known:
            self.hosts.pop(host.uid, None)

    def _pod_changed(self, uid: str, view: PodView | None) -> None:
        host = self.hosts.get(uid)
        if host is None or host.leaving or (view is not None and not view.deleting):
            return
        self.clock.later(self.rng.uniform(0.02, 0.5), lambda: self._see_off(host))

    def _see_off(self, host: Host) -> None:
        """The kubelet comes to the hook of a pod that is being deleted, or whose object is gone."""
        if host.leaving:
            return
        if self._silent(host.node) or self.clock.time < host.node.deaf_until:
            self.clock.later(1.0, lambda: self._see_off(host))
            return
        host.leaving = True
        if host.process is not None:
            host.process.drain(self.clock.time)
            self.on_change(host)
        self.clock.later(self.rng.choice(HOOKS_S), lambda: self._end(host))

    def _end(self, host: Host) -> None:
        host.process, host.gone = None, True
        self.on_change(host)
        self._bury(host)
        self._report(host, container=ContainerState.TERMINATED, started=False, ready=False)

    # nodes ----------------------------------------------------------------------------------------------------------

    def lose(self, node: Node, seconds: float, *, cut: bool) -> None:
        """The control plane hears nothing of a node for a while; its containers run on."""
        node.lost_until = max(node.lost_until, self.clock.time + seconds)
        # Its watch is found dead, and begun anew, only after it is back: see policies.KUBELET_S.
        node.deaf_until = max(node.deaf_until, node.lost_until + self.rng.uniform(0.0, DEAF_S))
        if cut:
            node.cut_until = node.lost_until
        self.clock.later(NOTICED_S, lambda: self._notice(node))
        self.clock.later(EVICTED_S, lambda: self._evict_all(node))

    def power_off(self, node: Node, seconds: float) -> None:
        """Nothing runs there any more, and nobody knows it until a person says so."""
        node.off_until = self.clock.time + seconds
        self.lose(node, seconds, cut=True)
        for host in [host for host in self.hosts.values() if host.node is node and host.process is not None]:
            host.process = None
            self.on_change(host)
            self.clock.later(seconds + self.load_s, lambda host=host: self._restarted(host))  # type: ignore[misc]
        self.clock.later(TAINTED_S, lambda: self._taint(node))

    def _restarted(self, host: Host) -> None:
        restarts = int(str(host.status.get("restarts", 0))) + 1
        self._report(host, started=False, ready=False, ready_since=None, restarts=restarts, exit_code=255)
        self._come_up(host.uid)

    def _taint(self, node: Node) -> None:
        """The pods of a node that is out of service are removed without anybody's word."""
        if self.clock.time >= node.off_until:
            return
        node.tainted = True
        if node.ready_since is not None:  # the control plane has not noticed yet, and removes nothing
            self.clock.later(1.0, lambda: self._taint(node))
            return
        for uid in self._on(node):
            host = self.hosts[uid]
            host.gone = host.leaving = True
            self._bury(host)
            self.api.remove_pod(uid)

    def views(self, names: Iterable[str]) -> dict[str, NodeView]:
        """As the API server tells them."""
        found = {node.name: node for node in self.nodes}
        return {name: self._view(found[name]) for name in names if name in found}

    def _view(self, node: Node) -> NodeView:
        if not self._silent(node):
            node.heard = NOW + timedelta(seconds=self.clock.time // REPORT_S * REPORT_S)
        if node.forgotten:
            return NodeView(node.name, exists=False)
        return NodeView(node.name, ready_since=node.ready_since, heard=node.heard, out_of_service=node.tainted)

    def _untaint(self, node: Node) -> None:
        """A person sees that it is back."""
        if node.ready_since is not None:
            node.tainted = False

    def _on(self, node: Node) -> list[str]:
        return [uid for uid in list(self.api.pods) if uid in self.hosts and self.hosts[uid].node is node]

    def _notice(self, node: Node) -> None:
        if self.clock.time < self.unjudged_until:
            self.clock.later(5.0, lambda: self._notice(node))
        elif self.clock.time < node.lost_until:
            node.ready_since = None
            for uid in self._on(node):
                self.api.change_pod(uid, ready=False, ready_since=None)
            self.clock.later(node.lost_until - self.clock.time + 0.1, lambda: self._back(node))

    def _back(self, node: Node) -> None:
        if self.clock.time < node.lost_until:
            self.clock.later(node.lost_until - self.clock.time + 0.1, lambda: self._back(node))
            return
        node.ready_since, node.forgotten = self.clock.now(), False
        self.clock.later(TAINTED_S, lambda: self._untaint(node))
        for uid in self._on(node):
            if self.hosts[uid].status.get("started"):
                self._flush(self.hosts[uid])

    def _evict_all(self, node: Node) -> None:
        if self.clock.time < node.lost_until and node.ready_since is None:
            for uid in self._on(node):
                self.delete(uid)


def _config_of(manifest: dict[str, Any]) -> EngineConfig:
    """As the guard in this pod will read it."""
    env = manifest["spec"]["containers"][0]["env"]
    config = next(variable["value"] for variable in env if variable["name"] == ENGINE_CONFIG_ENV)
    return EngineConfig.model_validate_json(config)
