"""What can happen to the fleet: one method for each word of `schedule.KINDS`.

What people do is in `people.py`, what trainers do and suffer in `pranks.py`.
"""

from collections.abc import Callable
from dataclasses import replace

from rollfleet_protocol.state import FailureReason, OperationName
from tests.model.api_server import ApiServer
from tests.model.asks import ON_FAILURE, Ask
from tests.model.clock import Clock
from tests.model.network import Cut, Network
from tests.model.nodes import Host, Nodes
from tests.model.operators import Operator
from tests.model.pranks import Pranks
from tests.model.promises import Auditor
from tests.model.schedule import STEPS, Happening
from tests.model.senders import SenderLease
from tests.model.trainers import Trainer
from tests.support.simulated_engine import fault

REASONS = {
    OperationName.PREPARE: FailureReason.CHECKPOINT_INVALID,
    OperationName.CLOSE: FailureReason.PAUSE_FAILED,
    OperationName.TRANSFER: FailureReason.COVERAGE_FAILED,
    OperationName.VERIFY: FailureReason.CACHE_RESET_FAILED,
    OperationName.REOPEN: FailureReason.PAUSE_FAILED,
}


class Chaos(Pranks):
    """Does it."""

    def __init__(
        self,
        clock: Clock,
        api: ApiServer,
        nodes: Nodes,
        network: Network,
        senders: SenderLease,
        trainers: list[Trainer],
        operators: list[Operator],
        auditor: Auditor,
    ) -> None:
        super().__init__(clock, api, nodes, network, senders, trainers, auditor)
        self.counts: dict[str, int] = {}
        self.slow: dict[str, OperationName] = {}  # pod uid -> the step that hangs next
        self._operators = operators
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

    def bump_into_loss(self, blow: Happening) -> None:
        """All transfers fail, and the checkpoint of the committed version is away for a while."""
        committed = self._auditor.book.committed
        if committed is not None and committed.checkpoint is not None:
            self._break(committed.checkpoint, blow.seconds)
        self.wrong_digest(replace(blow, luck=1))
        self.ask(self.newest + 1, "", Ask(on_failure=ON_FAILURE[1]))

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
        self.mend_trainers()
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
        operator = next((each for each in self._operators if each.leads), self._operator(blow))
        if blow.luck % 4:
            operator.freezes_s = blow.seconds
        else:
            operator.frozen_until = self._clock.time + blow.seconds

    def deafen_operator(self, blow: Happening) -> None:
        """Its watch of pods stalls."""
        self._operator(blow).deaf_until = self._clock.time + blow.seconds
