"""What can happen to the fleet: one method for each word of `schedule.KINDS`."""

from collections.abc import Callable

from rollfleet_operator.api.meta import ObjectMeta
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.accept import in_charge
from rollfleet_operator.core.ending import UNDER_WAY
from rollfleet_protocol.state import FailureReason, OperationName
from tests.model.api_server import ApiServer
from tests.model.asks import PLAIN, Ask, ask_of
from tests.model.clock import Clock
from tests.model.network import Cut, Network
from tests.model.nodes import Host, Nodes
from tests.model.operators import Operator
from tests.model.promises import Auditor
from tests.model.schedule import STEPS, Happening
from tests.support.builders import FLEET_UID, WEIGHT_VERSION, make_weight_version
from tests.support.simulated_engine import fault

REASONS = {
    OperationName.PREPARE: FailureReason.CHECKPOINT_INVALID,
    OperationName.CLOSE: FailureReason.PAUSE_FAILED,
    OperationName.TRANSFER: FailureReason.COVERAGE_FAILED,
    OperationName.VERIFY: FailureReason.CACHE_RESET_FAILED,
    OperationName.REOPEN: FailureReason.PAUSE_FAILED,
}
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
        self._fleets = 0
        self._at_commit: list[Callable[[], None]] = []
        auditor.statuses.on_commit = self._committed

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

    def ask(self, version: int, path: str = "", ask: Ask = PLAIN, *, same_name: bool = False) -> None:
        """kubectl apply: raise the version, or create the object."""
        self.newest = max(self.newest, version)
        known = self.charge
        spec: dict[str, object] = {"path": path or None, **ask.fields()}
        if known is None:
            self._created += 1
            name = WEIGHT_VERSION if same_name else f"{WEIGHT_VERSION}-{self._created}"
            uid = f"wv-uid-{self._created}"
            wanted = make_weight_version(version, name=name, uid=uid, created=self._clock.second(), **spec)
        else:
            if version <= known.spec.version:
                return  # the API server's rule
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            wanted = make_weight_version(version, **spec)
            wanted = wanted.model_copy(update={"status": known.status, "metadata": meta})
        self._put(wanted)

    def _saw_in_update(self, what: str) -> None:
        charge = self.charge
        if charge is not None and charge.status.phase in UNDER_WAY:
            self._auditor.saw(f"{what} in mid-update")

    def _put(self, wanted: WeightVersion) -> None:
        self._auditor.asked(wanted)
        self._api.put_weight_version(wanted)
        self.on_asked()

    def _ask_of(self, blow: Happening, *, rolls: bool = False) -> Ask:
        return ask_of(blow.luck, self._api.fleet.spec.replicas, rolls=rolls)

    def bump(self, blow: Happening) -> None:
        """A higher version; every third time to a step that was used before, as a rollback by hand is."""
        version = self.newest + 1
        path = f"step-{max(1, version - 2)}" if blow.who % 3 == 2 and version > 2 else ""
        self.ask(version, path, self._ask_of(blow))

    def roll(self, blow: Happening) -> None:
        """A higher version, batch by batch."""
        self.ask(self.newest + 1, "", self._ask_of(blow, rolls=True))

    def bump_to_broken(self, blow: Happening) -> None:
        """Half-written, and whole after a while."""
        version = self.newest + 1
        self._break(f"step-{version}", blow.seconds)
        self.ask(version, "", self._ask_of(blow))

    def retry(self, blow: Happening) -> None:
        """rollfleet retry."""
        known = self.charge
        if known is not None:
            spec = known.spec.model_copy(update={"retry_request": f"{self._clock.time:g}"})
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            self._put(known.model_copy(update={"spec": spec, "metadata": meta}))

    def delete_version(self, blow: Happening) -> None:
        """In mid-update or not."""
        known = self.charge
        if known is not None:
            self._saw_in_update("version: deleted")
            self._auditor.deleted(known)
            self._api.remove_weight_version(known.metadata.name)

    def create_version_again(self, blow: Happening) -> None:
        """Another object, at a lower, the same or a higher version than before, of another step, or of another name."""
        self.delete_version(blow)
        version = max(1, self.newest + (blow.who % 3) - 1)
        path = f"step-{version + 1}" if blow.luck % 2 else ""
        self.ask(version, path, self._ask_of(blow), same_name=blow.luck % 3 > 0)

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

    def delete_fleet(self, blow: Happening) -> None:
        """And make it again, soon or a while later: another uid, and nothing is known of the one before."""
        if self._api.fleet_present:
            self._saw_in_update("fleet: made again")
            self._auditor.fleet_made("")
            self._api.remove_fleet()
            self._clock.later(blow.seconds / 10, self._make_fleet_again)

    def _make_fleet_again(self) -> None:
        self._fleets += 1
        uid = f"{FLEET_UID}-{self._fleets}"
        made = {"uid": uid, "generation": 1, "creation_timestamp": self._clock.second()}
        old = self._api.fleet
        fresh = {"metadata": old.metadata.model_copy(update=made), "status": RolloutEngineStatus()}
        self._auditor.fleet_made(uid)
        self._api.make_fleet_again(old.model_copy(update=fresh))
        self.on_asked()

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
        self._nodes.lose(node, 2 * blow.seconds, cut=True)
        node.forgotten = bool(blow.luck % 2)  # its Node object was deleted, or its pods were by force
        for host in list(self._nodes.hosts.values()):
            if host.node is node:
                self._api.remove_pod(host.uid)

    def garbage_fails(self, blow: Happening) -> None:
        """The collector writes Failed into the pods of a deleted Node whose containers run on, and is then held up."""
        node = self._nodes.nodes[blow.who % len(self._nodes.nodes)]
        self._nodes.lose(node, blow.seconds, cut=True)
        for host in list(self._nodes.hosts.values()):
            if host.node is node:
                self._api.change_pod(host.uid, phase="Failed")

    def collect_unnoticed(self, blow: Happening) -> None:
        """As above, while nobody judges nodes: it stays Ready, whatever its kubelet says."""
        self._nodes.unjudged_until = self._clock.time + 2 * blow.seconds
        self.collect_garbage(blow)

    def volume_away(self, blow: Happening) -> None:
        """A volume that all engines of a template need: those that run go on, and none can start."""
        for template in {host.template for host in self._nodes.hosts.values()}:
            self._nodes.away[template] = self._clock.time + blow.seconds
        if blow.luck % 2:
            for host in list(self._nodes.hosts.values()):
                self._nodes.crash(host)

    def power_off(self, blow: Happening) -> None:
        """A whole node."""
        self._nodes.power_off(self._nodes.nodes[blow.who % len(self._nodes.nodes)], blow.seconds)

    def _struck(self, blow: Happening) -> list[Host]:
        """One engine, or all: then it is nobody's own fault."""
        host = self._host(blow)
        return list(self._nodes.hosts.values()) if blow.luck % 2 else [host] if host is not None else []

    def fail_step(self, blow: Happening) -> None:
        """The next operation of a kind fails."""
        step = STEPS[int(blow.seconds) % len(STEPS)]
        for host in self._struck(blow):
            host.damage.fails[step] = fault(REASONS[step], "boom")

    def wrong_digest(self, blow: Happening) -> None:
        """The next transfer brings other bytes."""
        for host in self._struck(blow):
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
            self._auditor.begin(host, blow.seconds, streams=bool(blow.luck % 2), pinned=blow.luck % 5 == 4)

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

    def cut_at_commit(self, blow: Happening) -> None:
        """One engine from all operators, as soon as the next version is committed: before it can be opened."""
        self._at_commit.append(lambda: self.cut_from_all(blow))

    def kill_at_commit(self, blow: Happening) -> None:
        """All operators, as soon as the next version is committed: before anything follows from it."""
        self._at_commit.append(lambda: self.kill_all_operators(blow))

    def vanish_at_commit(self, blow: Happening) -> None:
        """A pod's object goes as soon as the next version is committed, on a node whose kubelet is silent."""

        def vanish() -> None:
            host = self._host(blow)
            if host is not None:
                self._nodes.lose(host.node, blow.seconds, cut=False)
                self._api.remove_pod(host.uid)

        self._at_commit.append(vanish)

    def calm_down(self) -> None:
        """What has not happened yet does not happen any more."""
        self._at_commit.clear()
        self.slow.clear()
        for operator in self._operators:
            operator.freezes_s = 0.0

    def _committed(self) -> None:
        due, self._at_commit = self._at_commit, []
        for act in due:
            self._clock.later(0.0, act)

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

    def freeze_operator(self, blow: Happening) -> None:
        """Its process stands still, now or when it is about to act, and goes on with what it was about to do."""
        operator = self._operator(blow)
        if blow.luck % 2:
            operator.freezes_s = blow.seconds
        else:
            operator.frozen_until = self._clock.time + blow.seconds

    def deafen_operator(self, blow: Happening) -> None:
        """Its watch of pods stalls."""
        self._operator(blow).deaf_until = self._clock.time + blow.seconds
