"""What can happen to the fleet: one method for each word of `schedule.KINDS`."""

from collections.abc import Callable

from rollfleet_operator.api.meta import ObjectMeta
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import (
    Deadlines,
    FailureType,
    OnFailure,
    Rolling,
    Strategy,
    StrategyType,
    WeightVersion,
)
from rollfleet_operator.core.accept import in_charge
from rollfleet_protocol.state import FailureReason, OperationName
from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.model.network import Cut, Network
from tests.model.nodes import Host, Nodes
from tests.model.operators import Operator
from tests.model.promises import Auditor
from tests.model.schedule import STEPS, Happening
from tests.support.builders import WEIGHT_VERSION, make_weight_version
from tests.support.simulated_engine import fault

DEADLINES = Deadlines(prepare_seconds=30, quiesce_seconds=20, transfer_seconds=20, verify_seconds=10)
REASONS = {
    OperationName.PREPARE: FailureReason.CHECKPOINT_INVALID,
    OperationName.CLOSE: FailureReason.PAUSE_FAILED,
    OperationName.TRANSFER: FailureReason.COVERAGE_FAILED,
    OperationName.VERIFY: FailureReason.CACHE_RESET_FAILED,
    OperationName.REOPEN: FailureReason.PAUSE_FAILED,
}
ATOMIC = Strategy()
RETRY = OnFailure()
ON_FAILURE = (
    RETRY,
    RETRY,
    OnFailure(type=FailureType.RETRY, max_attempts=1),
    OnFailure(type=FailureType.ROLLBACK),
    OnFailure(type=FailureType.HOLD),
)
HALF_WRITTEN = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")


class Chaos:
    """Does it."""

    def __init__(
        self, clock: Clock, api: ApiServer, nodes: Nodes, network: Network, operators: list[Operator], auditor: Auditor
    ) -> None:
        self.counts: dict[str, int] = {}
        self.newest = 0  # highest version that was ever asked for
        self.on_asked: Callable[[], None] = lambda: None
        self.slow: dict[str, OperationName] = {}  # pod uid -> the step that hangs next
        self._clock = clock
        self._api = api
        self._nodes = nodes
        self._network = network
        self._operators = operators
        self._auditor = auditor
        self._created = 0

    def strike(self, blow: Happening) -> None:
        """Let it happen."""
        self.counts[blow.kind] = self.counts.get(blow.kind, 0) + 1
        getattr(self, blow.kind)(blow)

    def _host(self, blow: Happening) -> Host | None:
        hosts = sorted(self._nodes.hosts.values(), key=lambda host: host.uid)
        return hosts[blow.who % len(hosts)] if hosts else None

    def _operator(self, blow: Happening) -> Operator:
        return self._operators[blow.who % len(self._operators)]

    # objects --------------------------------------------------------------------------------------------------------

    @property
    def charge(self) -> WeightVersion | None:
        """The WeightVersion that leads the fleet."""
        present = tuple(weight_version for weight_version, _ in self._api.weight_versions.values())
        return in_charge(present, self._auditor.book.committed)

    def ask(self, version: int, path: str = "", on_failure: OnFailure = RETRY, strategy: Strategy = ATOMIC) -> None:
        """kubectl apply: raise the version, or create the object."""
        self.newest = max(self.newest, version)
        spec: dict[str, object] = {"path": path or None, "deadlines": DEADLINES, "on_failure": on_failure}
        spec["strategy"] = strategy
        wanted = make_weight_version(version, **spec)
        known = self.charge
        if known is None:
            self._created += 1
            name, uid = f"{WEIGHT_VERSION}-{self._created}", f"wv-uid-{self._created}"
            wanted = make_weight_version(version, name=name, uid=uid, created=self._clock.now(), **spec)
        else:
            if version <= known.spec.version:
                return  # the API server's rule
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            wanted = wanted.model_copy(update={"status": known.status, "metadata": meta})
        self._api.put_weight_version(wanted)
        self.on_asked()

    def bump(self, blow: Happening) -> None:
        """A higher version; every third time to a step that was used before, as a rollback by hand is."""
        version = self.newest + 1
        path = f"step-{max(1, version - 2)}" if blow.who % 3 == 2 and version > 2 else ""
        self.ask(version, path, ON_FAILURE[blow.who % len(ON_FAILURE)])

    def roll(self, blow: Happening) -> None:
        """A higher version, batch by batch."""
        rolling = Strategy(type=StrategyType.ROLLING, rolling=Rolling(max_unavailable=1 + blow.who % 2))
        self.ask(self.newest + 1, "", ON_FAILURE[blow.who % len(ON_FAILURE)], rolling)

    def bump_to_broken(self, blow: Happening) -> None:
        """Half-written, and whole after a while."""
        version = self.newest + 1
        self._break(f"step-{version}", blow.seconds)
        self.ask(version, "", ON_FAILURE[blow.who % len(ON_FAILURE)])

    def retry(self, blow: Happening) -> None:
        """rollfleet retry."""
        known = self.charge
        if known is not None:
            spec = known.spec.model_copy(update={"retry_request": f"{self._clock.time:g}"})
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            self._api.put_weight_version(known.model_copy(update={"spec": spec, "metadata": meta}))
            self.on_asked()

    def delete_version(self, blow: Happening) -> None:
        """In mid-update or not."""
        known = self.charge
        if known is not None:
            self._api.remove_weight_version(known.metadata.name)

    def create_version_again(self, blow: Happening) -> None:
        """Another object, at a lower, the same or a higher version than before."""
        self.delete_version(blow)
        self.ask(max(1, self.newest + (blow.who % 3) - 1))

    def scale(self, blow: Happening) -> None:
        """Up or down, to none as well."""
        self.scale_to(blow.who % 5)

    def scale_to(self, replicas: int) -> None:
        """kubectl scale."""
        spec = self._api.fleet.spec.model_copy(update={"replicas": replicas})
        self._api.put_fleet(self._api.fleet.model_copy(update={"spec": spec, "metadata": self._next_generation()}))
        self.on_asked()

    def change_template(self, blow: Happening) -> None:
        """Another image."""
        image = f"registry.example/engine:{self._api.fleet.metadata.generation + 1}"
        spec = self._api.fleet.spec.model_copy(update={"image": image})
        self._api.put_fleet(self._api.fleet.model_copy(update={"spec": spec, "metadata": self._next_generation()}))

    def _next_generation(self) -> ObjectMeta:
        meta = self._api.fleet.metadata
        return meta.model_copy(update={"generation": meta.generation + 1})

    def lose_status(self, blow: Happening) -> None:
        """The object was restored without its status."""
        self._auditor.status_lost()
        self._api.put_fleet(self._api.fleet.model_copy(update={"status": RolloutEngineStatus()}))

    # checkpoints ----------------------------------------------------------------------------------------------------

    def _break(self, path: str, seconds: float) -> None:
        self._nodes.shelf.faults[path] = HALF_WRITTEN
        self._clock.later(seconds, lambda: self._nodes.shelf.faults.pop(path, None))

    def break_checkpoint(self, blow: Happening) -> None:
        """The committed one, or the one that is asked for, vanishes for a while."""
        self._break(f"step-{max(1, self.newest - blow.who % 2)}", blow.seconds)

    def change_checkpoint(self, blow: Happening) -> None:
        """Somebody writes over it."""
        path = f"step-{max(1, self.newest - blow.who % 2)}"
        self._nodes.shelf.changed[path] = f"sha256:{path}/changed-{self._clock.time:g}"

    # engines --------------------------------------------------------------------------------------------------------

    def crash(self, blow: Happening) -> None:
        """The process is back with the weights of model.path."""
        host = self._host(blow)
        if host is not None:
            self._nodes.crash(host)

    def core_dies(self, blow: Happening) -> None:
        """The guard lives on for a while."""
        host = self._host(blow)
        if host is not None:
            self._nodes.core_dies(host)

    def delete_pod(self, blow: Happening) -> None:
        """kubectl delete pod."""
        host = self._host(blow)
        if host is not None:
            self._nodes.delete(host.uid)

    def evict(self, blow: Happening) -> None:
        """By its node."""
        host = self._host(blow)
        if host is not None:
            self._nodes.evict(host)

    def force_delete(self, blow: Happening) -> None:
        """kubectl delete pod --force --grace-period=0: the object goes, the container goes when its kubelet hears."""
        host = self._host(blow)
        if host is not None:
            self._api.remove_pod(host.uid)

    def collect_garbage(self, blow: Happening) -> None:
        """All pods of a node that is cut off lose their objects: they run on, and nobody has a record but the fleet."""
        node = self._nodes.nodes[blow.who % len(self._nodes.nodes)]
        self._nodes.lose(node, blow.seconds, cut=True)
        for host in list(self._nodes.hosts.values()):
            if host.node is node:
                self._api.remove_pod(host.uid)

    def power_off(self, blow: Happening) -> None:
        """A whole node."""
        self._nodes.power_off(self._nodes.nodes[blow.who % len(self._nodes.nodes)], blow.seconds)

    def fail_step(self, blow: Happening) -> None:
        """Its next operation of a kind fails."""
        host, step = self._host(blow), STEPS[int(blow.seconds) % len(STEPS)]
        if host is not None:
            host.damage.fails[step] = fault(REASONS[step], "boom")

    def wrong_digest(self, blow: Happening) -> None:
        """Its next transfer brings other bytes."""
        host = self._host(blow)
        if host is not None:
            host.damage.wrong_digest = True

    def damage_silently(self, blow: Happening) -> None:
        """Its next transfer ends well, and only the probe can tell."""
        host = self._host(blow)
        if host is not None:
            host.damage.silent = True

    def hang(self, blow: Happening) -> None:
        """Its next operation of a kind lasts past every deadline."""
        host = self._host(blow)
        if host is not None:
            self.slow[host.uid] = STEPS[int(blow.seconds) % len(STEPS)]

    def long_request(self, blow: Happening) -> None:
        """A client's."""
        host = self._host(blow)
        if host is not None:
            self._auditor.begin_long(host, blow.seconds)

    # network, nodes, API server, operators --------------------------------------------------------------------------

    def cut(self, blow: Happening) -> None:
        """One operator from one engine."""
        host = self._host(blow)
        if host is not None:
            self._network.cut(self._operator(blow).name, host.uid, Cut.BOTH, blow.seconds)

    def cut_answers(self, blow: Happening) -> None:
        """Its commands are carried out, and it hears nothing."""
        host = self._host(blow)
        if host is not None:
            self._network.cut(self._operator(blow).name, host.uid, Cut.ANSWERS, blow.seconds)

    def cut_from_all(self, blow: Happening) -> None:
        """Clients still reach it, operators do not."""
        host = self._host(blow)
        if host is not None:
            for operator in self._operators:
                self._network.cut(operator.name, host.uid, Cut.BOTH, blow.seconds)

    def lose_node(self, blow: Happening) -> None:
        """Its kubelet is silent."""
        self._nodes.lose(self._nodes.nodes[blow.who % len(self._nodes.nodes)], blow.seconds, cut=False)

    def cut_node(self, blow: Happening) -> None:
        """The control plane has lost it; clients have not."""
        self._nodes.lose(self._nodes.nodes[blow.who % len(self._nodes.nodes)], blow.seconds, cut=True)

    def delete_on_silent_node(self, blow: Happening) -> None:
        """Its pods are marked for deletion, and nobody there hears of it."""
        node = self._nodes.nodes[blow.who % len(self._nodes.nodes)]
        self._nodes.lose(node, blow.seconds, cut=bool(blow.who % 2))
        for host in list(self._nodes.hosts.values()):
            if host.node is node:
                self._nodes.delete(host.uid)

    def api_down(self, blow: Happening) -> None:
        """For everybody."""
        self._api.down_until = max(self._api.down_until, self._clock.time + blow.seconds)

    def kill_operator(self, blow: Happening) -> None:
        """Between any two steps."""
        self._operator(blow).kill(blow.seconds)

    def kill_all_operators(self, blow: Happening) -> None:
        """Nobody leads for a while."""
        for operator in self._operators:
            operator.kill(blow.seconds)

    def replace_operator(self, blow: Happening) -> None:
        """Installed anew: guards of the pods that there are obey another account."""
        for operator in self._operators:
            operator.account_uid = f"operator-{self._clock.time:g}"
            operator.kill(min(blow.seconds, 8.0))

    def deafen_operator(self, blow: Happening) -> None:
        """Its watch of pods stalls."""
        self._operator(blow).deaf_until = self._clock.time + blow.seconds
