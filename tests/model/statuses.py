"""What operators write down: judged as it is written."""

from collections.abc import Callable

from rollfleet_operator.api.rolloutengine import Aftermath, Committed, LastFinished, Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase, StrategyType, WeightVersion, WeightVersionStatus
from rollfleet_protocol.state import WeightsState
from tests.model.api_server import ApiServer
from tests.model.books import Book, BrokenPromise, Failure, Hold, Ledger
from tests.model.engines import ModelEngine
from tests.model.nodes import Nodes
from tests.model.promises_of_pushes import Pushes


class Statuses:
    """Judges the writes of operators."""

    def __init__(self, api: ApiServer, nodes: Nodes, ledger: Ledger, pushes: Pushes) -> None:
        self.book = Book(api.fleet.metadata.uid)
        self.on_commit: Callable[[], None] = lambda: None
        self._api = api
        self._nodes = nodes
        self._ledger = ledger
        self._pushes = pushes
        self.is_called_halted: Callable[[str], bool] = lambda _: False
        api.on_fleet_status = self._fleet_written
        api.on_weight_status = self._weights_written

    def _saw(self, what: str) -> None:
        self._ledger.seen[what] += 1

    # the fleet ------------------------------------------------------------------------------------------------------

    def _fleet_written(self, before: RolloutEngineStatus, after: RolloutEngineStatus) -> None:
        book = self.book
        if after.epoch < before.epoch:
            raise BrokenPromise("epoch", f"the fleet's epoch fell from {before.epoch} to {after.epoch}")
        for condition in after.conditions:
            self._saw(f"fleet: {condition.type} {condition.reason}")
        if after.last_finished != before.last_finished and after.last_finished is not None:
            self._judge_end(after.last_finished, after.epoch)
        if after.committed == before.committed:
            return
        if after.committed is None:
            raise BrokenPromise("commit", "an operator took the commit record away")
        if not book.lost and _same(book.committed, after.committed):  # the roll ended
            book.committed = after.committed
            return
        if book.committed is not None and not book.lost and after.committed.version <= book.committed.version:
            raise BrokenPromise("commit", f"from {book.committed.version} back to {after.committed.version}")
        self._judge_commit(after.committed, after.epoch, found_again=book.lost and before.committed is None)
        if book.lost:
            book.highest_answered = -1
        book.committed, book.lost = after.committed, False
        book.versions.add(after.committed.version)
        self._ledger.commits += 1
        self.on_commit()

    def _judge_end(self, last: LastFinished, epoch: int) -> None:
        """An update ended."""
        book, update = self.book, (last.weight_version_uid or "", last.version)
        self._saw(f"end: {last.outcome}{f' {last.reason}' if last.reason else ''}")
        book.hold = None
        if last.outcome is not Outcome.FAILED:
            return
        book.failures[update] = Failure(epoch, last.retry_request)
        self._saw(f"aftermath: {last.aftermath}")
        if last.aftermath is Aftermath.HELD and not self._is_released(last):
            book.hold = Hold(epoch)

    def _is_released(self, last: LastFinished) -> bool:
        """A person has asked for something else meanwhile."""
        found = (
            each.spec for each, _ in self._api.weight_versions.values() if each.metadata.uid == last.weight_version_uid
        )
        spec = next(found, None)
        return spec is None or spec.version != last.version or spec.retry_request not in ("", last.retry_request)

    def _judge_commit(self, committed: Committed, epoch: int, *, found_again: bool) -> None:
        """Somebody really holds it, verified; nobody who takes part holds it unverified; and they are enough."""
        if found_again:
            self._saw("commit: found again")
            return
        version = committed.version
        held = [
            host.process
            for host in self._nodes.of(self.book.uid)
            if host.process is not None and host.process.state.weights.version == version
        ]
        verified = [process for process in held if process.state.weights.state is WeightsState.VERIFIED]
        if not verified and held:
            raise BrokenPromise("commit", f"version {version} is committed and nobody verified it")
        told = self._charge_of(committed)
        taking_part = {target.incarnation for target in told.targets} if told is not None else set()
        for process in held:
            state = process.state
            if state.incarnation not in taking_part:
                continue  # closed and armed under this epoch, and left where an earlier attempt brought it
            if state.weights.digest != committed.digest:
                continue  # it got other bytes than most, or says so: it is out by itself, and stays closed
            if state.weights.state is WeightsState.LOADED and state.epoch == epoch and state.alive:
                if state.draining or self._is_leaving(process):
                    continue
                raise BrokenPromise("commit", f"version {version} is committed before {state.incarnation}")
        self._count(committed, epoch)
        self._pushes.committed(committed, epoch)

    def _count(self, committed: Committed, epoch: int) -> None:
        """spec.minServing: so many engines answered the probe of this very update, and were not called odd."""
        spec = self._ledger.specs.get((committed.weight_version_uid or "", committed.version))
        told = self._charge_of(committed)
        if spec is None or told is None or self.book.ever_lost:
            return
        passed = self.book.verified.get((committed.version, epoch), set()) - set(committed.excluded)
        needed, targets = spec.min_serving, told.targets
        if spec.strategy.type is StrategyType.ROLLING:
            needed = min(needed, len(targets))
        if len(passed) < needed:
            text = f"version {committed.version} is committed by {len(passed)} engines, spec.minServing is {needed}"
            raise BrokenPromise("minServing", text)
        if committed.excluded:
            self._saw("commit: without an odd engine")
        if len(passed) + len(committed.excluded) < len(targets):
            self._saw("commit: without all targets")
        if spec.min_serving > 1:
            self._saw("commit: minServing above 1")

    def _charge_of(self, committed: Committed) -> WeightVersionStatus | None:
        found = (each.status for each, _ in self._api.weight_versions.values())
        return next((status for status in found if status.version == committed.version), None)

    def _is_leaving(self, process: ModelEngine) -> bool:
        host = next((host for host in self._nodes.hosts.values() if host.process is process), None)
        view = None if host is None else self._api.pods.get(host.uid)
        # By the kubelet's word no guard was ever opened in it: of the container before, where the watch is deaf.
        return view is None or view.deleting or not view.started or self.is_called_halted(view.uid)

    # WeightVersions -------------------------------------------------------------------------------------------------

    def _weights_written(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        before = weight_version.status
        self._pushes.written(weight_version, status)
        if (before.phase, before.version) != (status.phase, status.version):
            self._saw(f"phase: {status.phase}")
            if status.phase is Phase.ACTIVE:
                self._judge_active(weight_version, status)
        begun = (status.version, status.epoch, status.attempt)
        if status.phase is Phase.PREPARING and status.epoch and begun != (before.version, before.epoch, before.attempt):
            self._judge_begin(weight_version, status)

    def _judge_begin(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        """An attempt begins: under an epoch of its own, and after a failure only because somebody asked for it."""
        book, uid = self.book, weight_version.metadata.uid
        given = (uid, status.version, status.attempt)
        if book.ever_lost:  # they began anew
            book.epochs[status.epoch] = given
        known = book.epochs.setdefault(status.epoch, given)
        if known != given:
            raise BrokenPromise("epoch", f"epoch {status.epoch} of {known} is given to {given} again")
        if status.attempt > 1:
            self._saw("attempt: again")
        failure, asked = book.failures.get((uid, status.version)), weight_version.spec.retry_request
        if failure is None or status.epoch <= failure.epoch or book.ever_lost:
            return
        if asked in ("", failure.retry_request) and status.retry_request in ("", failure.retry_request):
            raise BrokenPromise("retry", f"{given} failed under {failure}, and is tried again without a new request")
        self._saw("attempt: retryRequest followed")

    def _judge_active(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        """Active is said of what is committed for this very object, from the checkpoint that it names."""
        committed, uid = self._api.fleet.status.committed, weight_version.metadata.uid
        if committed is None or self.book.ever_lost:
            return
        paths = self._ledger.paths.get((uid, status.version), set())
        told = (committed.version, committed.weight_version_uid)
        if told != (status.version, uid) or committed.checkpoint not in paths:
            text = f"committed is {told} from {committed.checkpoint}"
            raise BrokenPromise("told", f"{uid} is Active at {status.version} from {paths}: {text}")


def _same(one: Committed | None, other: Committed) -> bool:
    """Whether only the version before, or who is excluded, was recorded anew."""
    if one is None:
        return False
    return (one.version, one.digest, one.weight_version_uid) == (other.version, other.digest, other.weight_version_uid)
