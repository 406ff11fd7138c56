"""What must be true of pushes: who is waited for, whose bytes an engine takes, and whose are committed.

Judged by the Lease as it really was, and by the bytes that really came.
"""

from collections.abc import Callable

from rollfleet_operator.api.rolloutengine import Aftermath, Committed
from rollfleet_operator.api.weightversion import Phase, SourceType, WeightVersion, WeightVersionStatus
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.observed import Observed
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.steps import source_of
from rollfleet_protocol.senders import offer
from rollfleet_protocol.state import WeightsState
from rollfleet_trainer.leases import DURATION_S
from tests.model.api_server import ApiServer
from tests.model.books import Book, BrokenPromise, Ledger
from tests.model.clock import Clock
from tests.model.engines import ModelEngine
from tests.model.nodes import Host, Nodes
from tests.model.pushes import Call
from tests.model.senders import SenderLease

# A trainer that is gone may be believed for two durations: an operator whose watch was dead saw its last renewal late.
BELIEVED_S = 2 * DURATION_S + 4.0
NOTICED_S = 10.0  # more, until the push has ended
CHANGING = ("update", "finish")


class Pushes:
    """Judges them. `fenced` raises where another one answers while a host's weights change, by (version, epoch)."""

    def __init__(
        self,
        clock: Clock,
        api: ApiServer,
        nodes: Nodes,
        lease: SenderLease,
        ledger: Ledger,
        book: Callable[[], Book],
        fenced: Callable[[Host, int, int], None],
    ) -> None:
        self._clock = clock
        self._api = api
        self._nodes = nodes
        self._lease = lease
        self._ledger = ledger
        self._book = book
        self._fenced = fenced

    def _saw(self, what: str) -> None:
        self._ledger.seen[what] += 1

    # what engines take ----------------------------------------------------------------------------------------------

    def called(self, host: Host, process: ModelEngine, call: Call) -> None:
        """A guard has taken a trainer's call."""
        book, epoch = self._book(), process.state.epoch
        self._saw(f"push: {call.phase} is taken")
        if call.misfits:
            self._saw(f"push: {call.phase} does not fit the model")
        if host.fleet != book.uid:
            return
        chosen = book.senders.get(epoch)
        if not book.ever_lost and chosen != call.holder:
            text = f"{host.uid} takes {call.phase} of {call.holder} under epoch {epoch}, its sender is {chosen}"
            raise BrokenPromise("sender", text)
        session = process.session
        if call.phase not in CHANGING or call.misfits or session is None:
            return
        if self._api.fleet.status.epoch > epoch:
            self._judge_late(host, process)
        else:
            self._fenced(host, session.operation.version, epoch)

    def _judge_late(self, host: Host, process: ModelEngine) -> None:
        """A trainer that stood still goes on with an update that has ended, at an engine that nobody reaches.

        Others may serve again, as nobody commits it any more. What holds its bytes must not.
        """
        self._saw("push: goes on after its end")
        if process.open or process.state.reopen_at is not None:
            raise BrokenPromise("fence", f"{host.uid} takes what nobody commits, and may answer")

    # what is recorded -----------------------------------------------------------------------------------------------

    def written(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        """The status of a WeightVersion."""
        if status.phase is Phase.TRANSFERRING and status.sender is not None:
            self._book().senders.setdefault(status.epoch, status.sender.holder)
        if status.phase is Phase.PREPARING and status.sender is not None:
            raise BrokenPromise("sender", f"{weight_version.metadata.uid} prepares, and its sender is chosen already")
        self._judge_stored(weight_version, status)

    def _judge_stored(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        """A copy that was named is in the commit before anybody says that work on a later version has begun."""
        stored, committed = weight_version.spec.stored, self._api.fleet.status.committed
        if stored is None or committed is None or self._book().ever_lost or status.version <= stored.version:
            return
        if (committed.version, committed.weight_version_uid) != (stored.version, weight_version.metadata.uid):
            return
        if committed.checkpoint != stored.checkpoint.path:
            text = f"version {stored.version} is stored at {stored.checkpoint.path}, committed is {committed}"
            raise BrokenPromise("stored", text)
        self._saw("commit: its copy was named before the next version was asked for")

    def committed(self, committed: Committed, epoch: int) -> None:
        """Every engine that takes part holds the bytes of the one trainer that was chosen, whole."""
        book = self._book()
        spec = self._ledger.specs.get((committed.weight_version_uid or "", committed.version))
        if spec is None or spec.source.type is not SourceType.TRAINER or book.ever_lost:
            return
        self._saw("commit: of a push")
        chosen = book.senders.get(epoch)
        if chosen is None or not committed.digest:
            raise BrokenPromise("sender", f"version {committed.version} is committed, and nobody was to send it")
        verified = book.verified.get((committed.version, epoch), set()) - set(committed.excluded)
        for host in self._nodes.of(book.uid):
            process = host.process
            if process is None or process.state.incarnation not in verified:
                continue
            if process.sent_by != {chosen}:
                text = f"{host.uid} holds bytes of {sorted(process.sent_by)}, the sender was {chosen}"
                raise BrokenPromise("sender", f"version {committed.version} is committed: {text}")
            if process.state.weights.digest != committed.digest:
                text = f"{host.uid} holds {process.state.weights.digest}, committed is {committed.digest}"
                raise BrokenPromise("sender", f"version {committed.version}: {text}")

    # what operators decide ------------------------------------------------------------------------------------------

    def decided(self, observed: Observed, decision: Decision) -> None:
        """By what could be known when the operator looked."""
        book = self._book()
        if observed.fleet.metadata.uid != book.uid or book.ever_lost:
            return
        for write in decision.weight_version_statuses:
            before = next(each for each in observed.weight_versions if each.metadata.name == write.name)
            begins = before.status.phase is Phase.PREPARING and write.status.phase is Phase.QUIESCING
            if begins and before.spec.source.type is SourceType.TRAINER:
                self._judge_pause(observed, before, write.status)
        self._judge_loss(observed, decision)
        self._judge_untouched(observed, decision)

    def _judge_pause(self, observed: Observed, asked: WeightVersion, status: WeightVersionStatus) -> None:
        """No fleet pauses for a trainer that is not there, or does not offer this version."""
        sender = status.sender
        if sender is None:
            raise BrokenPromise("sender", f"the fleet pauses for version {status.version}, and for nobody")
        listed = {each.service_account_name for each in observed.fleet.spec.trainers}
        if sender.service_account_name not in listed:
            raise BrokenPromise("sender", f"the fleet pauses for {sender.holder}, which is none of {sorted(listed)}")
        words = offer(asked.metadata.uid, asked.spec.version)
        known = [entry for entry in self._lease.history if entry.holder == sender.holder]
        if not any(entry.offers == words for entry in known):
            raise BrokenPromise("sender", f"the fleet pauses for {sender.holder}, which never offered {words}")
        since = max(known[-1].at, self._term_began(observed)) + self._away_s(observed)
        if self._clock.time > since + BELIEVED_S:
            raise BrokenPromise("sender", f"the fleet pauses for {sender.holder}, last heard of at {known[-1].at:.1f}")
        self._saw("push: the fleet pauses for a trainer")

    def _term_began(self, observed: Observed) -> float:
        """A Lease that a new operator sees first counts as renewed then."""
        since = observed.settings.up_since
        return 0.0 if since is None else self._clock.time - (self._clock.now() - since).total_seconds()

    def _away_s(self, observed: Observed) -> float:
        """Nobody could renew while the API server was away."""
        return sum((back - left).total_seconds() for left, back in observed.settings.away)

    def _judge_loss(self, observed: Observed, decision: Decision) -> None:
        """WeightsLost is said only where nobody that the operator hears holds the version, and nobody stored it."""
        committed, write = observed.fleet.status.committed, decision.fleet_status
        if committed is None or write is None or write.status.committed != committed:
            return
        available = find(write.status.conditions, "Available")
        if available is None or available.reason != Reason.WEIGHTS_LOST:
            return
        self._saw("fleet: its weights are lost")
        if committed.version == 0 and source_of(committed) is None:
            raise BrokenPromise("lost", "model.path is called lost")
        for host in self._nodes.of(self._book().uid):
            process, view = host.process, observed.guards.get(host.uid)
            if process is None or view is None or not view.reachable or view.state is None or host.leaving:
                continue
            known, weights = view.state.weights, process.state.weights
            holds = weights.state is WeightsState.VERIFIED and process.resident.rstrip("!") == committed.digest
            pod = self._api.pods.get(host.uid)  # one that is being deleted gives nobody what it holds
            if holds and known == weights and process.state.alive and pod is not None and not pod.deleting:
                raise BrokenPromise("lost", f"{committed.version} is called lost, and {host.uid} holds it")

    def _judge_untouched(self, observed: Observed, decision: Decision) -> None:
        """That no weights were touched is said only where every engine of the push has told so."""
        write, committed = decision.fleet_status, observed.fleet.status.committed
        last = None if write is None else write.status.last_finished
        if last is None or last == observed.fleet.status.last_finished or last.aftermath is not Aftermath.REOPENED:
            return
        charge = next((each for each in observed.weight_versions if each.metadata.uid == last.weight_version_uid), None)
        if charge is None or charge.status.phase is not Phase.TRANSFERRING or charge.status.version != last.version:
            return
        self._saw("push: ends before weights are touched")
        states = [view.state for view in observed.guards.values() if view.reachable and view.state is not None]
        told = {state.incarnation: state.weights for state in states}
        for target in charge.status.targets:
            weights = told.get(target.incarnation)
            version = None if committed is None else committed.version
            if weights is None or weights.state is not WeightsState.VERIFIED or weights.version != version:
                text = f"{target.name} is called untouched at version {version}, and has told {weights}"
                raise BrokenPromise("told", text)

    # time -----------------------------------------------------------------------------------------------------------

    def judge_wait(self, charge: WeightVersion, able_since: float) -> None:
        """A fleet that is closed for a trainer that is gone does not wait for its transfer's deadline.

        Asked in good weather only: `able_since` is when an operator could act, without a break.
        """
        status = charge.status
        if status.phase is not Phase.TRANSFERRING or status.sender is None or status.version != charge.spec.version:
            return
        words = offer(charge.metadata.uid, charge.spec.version)
        known = [entry for entry in self._lease.history if entry.holder == status.sender.holder]
        offering = [entry.at for entry in known if entry.offers == words]
        if not offering:
            return
        last = offering[-1]
        waited = self._clock.time - max(last, able_since, self._began(status))
        targets = {target.incarnation for target in status.targets}
        processes = [host.process for host in self._nodes.of(self._book().uid) if host.process is not None]
        missing = [
            process
            for process in processes
            if process.state.incarnation in targets and process.state.weights.version != status.version
        ]
        if missing and waited > BELIEVED_S + NOTICED_S:
            text = f"{status.sender.holder} was heard of at {last:.1f}, and the fleet is closed for it"
            raise BrokenPromise("always ends", f"{text} for {waited:.0f} s")

    def _began(self, status: WeightVersionStatus) -> float:
        since = status.phase_started_at
        return 0.0 if since is None else self._clock.time - (self._clock.now() - since).total_seconds()
