"""How one sees that a world is well: every engine that is asked for serves, or says why it never will by itself."""

from rollfleet_operator.api.rolloutengine import Aftermath
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.accept import judge_weight_version
from rollfleet_protocol.state import WeightsState
from tests.model.api_server import ApiServer
from tests.model.chaos import Chaos
from tests.model.nodes import Host, Nodes
from tests.model.operators import Operator
from tests.model.promises import Auditor

BY_RECORD = "the commit of version"  # in the message of whoever answers the probe unlike what was kept with the commit
ENDED = (Phase.ACTIVE, Phase.FAILED)
NOWHERE = "is stored nowhere"  # in the message of whoever waits for the next version


class Looks:
    """At what really runs, and at what operators say of it."""

    api: ApiServer
    nodes: Nodes
    auditor: Auditor
    operators: list[Operator]
    chaos: Chaos

    def _has_ended(self) -> bool:
        """Whether the update that is asked for is over, or is none."""
        charge, fleet = self.chaos.charge, self.api.fleet
        if charge is None or fleet.status.committed is None or not self.api.fleet_present:
            return True
        if not judge_weight_version(charge, fleet, charge, fleet.status.committed).accepted:
            return True
        return charge.status.version == charge.spec.version and charge.status.phase in ENDED

    def _all_serve(self, version: int | None) -> bool:
        """Every engine that is asked for answers, nobody is left over, and nobody is held by an update that is over."""
        hosts = [host for host in self.nodes.hosts.values() if not host.leaving]
        if len(hosts) != self.api.fleet.spec.replicas or len(self.api.pods) != len(hosts):
            return False
        for host in hosts:
            process = host.process
            if process is None or not process.open or host.obeys != self.operators[0].account_uid:
                return False
            state = process.state
            if state.paused or state.armed or (version is not None and state.weights.version != version):
                return False
        return True

    def _is_well(self) -> bool:
        if not any(each.leads for each in self.operators) or not self._has_ended() or not self.api.fleet_present:
            return False
        committed = self.api.fleet.status.committed
        if any(member.vanished_since for member in self.api.fleet.status.members):
            return False
        if self._is_held():
            return True
        if committed is not None and self._disowned():
            return self._keep_what_is_nowhere()  # else they are replaced first
        if committed is None:
            return self._is_undecided()
        version = committed.version
        return self._all_serve(version) or self._all_but_the_odd_ones(version) or self._wait_for_weights()

    def _keep_what_is_nowhere(self) -> bool:
        """Who obeys another operator serves on where its successor would find no weights, and that is said.

        That they are given up for the next version is for a person to say.
        """
        committed = self.api.fleet.status.committed
        nowhere = committed is not None and committed.version > 0 and committed.checkpoint is None
        return nowhere and any(NOWHERE in each.message for each in self.api.fleet.status.engines.details)

    def _wait_for_weights(self) -> bool:
        """What a trainer sent is stored nowhere: who does not hold it waits for the next version, and that is said."""
        committed, hosts = self.api.fleet.status.committed, self._present()
        if committed is None or committed.version == 0 or committed.checkpoint is not None:
            return False
        whole = len(hosts) == len(self.api.pods) == self.api.fleet.spec.replicas
        waits = 0
        for host in hosts:
            process = host.process
            if process is None or host.leaving or host.obeys != self.operators[0].account_uid:
                return False
            weights = process.state.weights
            if process.open or process.state.incarnation in committed.excluded:
                continue
            if weights.state is WeightsState.VERIFIED and weights.digest == committed.digest:
                return False
            waits += 1
        lost = {each.reason for each in self.api.fleet.status.conditions}
        told = [each for each in self.api.fleet.status.engines.details if NOWHERE in each.message]
        return whole and waits > 0 and (len(told) == waits or "WeightsLost" in lost)

    def _is_undecided(self) -> bool:
        """The record is lost, and nobody can tell: closed, until a person decides. A fleet that is new finds out."""
        if self.api.fleet.spec.replicas == 0:
            return not self.api.pods
        told = {condition.reason for condition in self.api.fleet.status.conditions}
        answering = any(
            host.process is not None and host.process.open and host.obeys == self.operators[0].account_uid
            for host in self.nodes.hosts.values()
        )
        # One that obeys another operator does not say what it serves: it may be another version than all others do.
        unclear = self._disowned() or (self.auditor.book.lost and not answering)
        decided = "CommitUnknown" not in told or not unclear
        up = all(host.process is not None for host in self._present())
        return up and not decided and len(self.api.pods) == self.api.fleet.spec.replicas

    def _present(self) -> list[Host]:
        """Engines that run, or will."""
        return [
            host
            for host in self.nodes.hosts.values()
            if host.process is not None or not (host.leaving or host.gone or host.ended)
        ]

    def _disowned(self) -> bool:
        return any(host.obeys != self.operators[0].account_uid for host in self._present())

    def _is_called_halted(self, uid: str) -> bool:
        """By what an operator has heard of the pod."""
        views = (operator.watch.pods.get(uid) for operator in self.operators)
        return any(view is not None and view.halted for view in views)

    def _is_held(self) -> bool:
        """The update failed and its spec says that what it touched stays as it is, for a person to look at."""
        last, hosts = self.api.fleet.status.last_finished, self._present()
        if last is None or last.aftermath is not Aftermath.HELD:
            return False
        up = all(host.process is not None for host in hosts)
        return up and len(hosts) == len(self.api.pods) == self.api.fleet.spec.replicas

    def _all_but_the_odd_ones(self, version: int) -> bool:
        """An engine that answers the probe differently from those that serve stays out until the next version."""
        odd = [
            host
            for host in self.nodes.running
            if host.process is not None
            and not host.process.open
            and host.process.state.weights.state is WeightsState.VERIFIED
            and "differ by" in str(self.api.fleet.status.engines.details)
        ]
        serving = [host for host in self.nodes.running if host.process is not None and host.process.open]
        versions = {host.process.state.weights.version for host in serving if host.process is not None}
        # Where all answer unlike what was kept with the commit, that is what is wrong: the next version ends it.
        by_record = not versions and all(BY_RECORD in each.message for each in self.api.fleet.status.engines.details)
        whole = len(odd) + len(serving) == self.api.fleet.spec.replicas
        return bool(odd) and whole and (versions == {version} or by_record)
