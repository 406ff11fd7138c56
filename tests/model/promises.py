"""What must be true after every event, whoever died: the promises of the design, as a client and an auditor see them.

The auditor keeps books of its own: what was committed, which epoch was given to which update, what each client was
answered and when. It looks at what engines really hold, not at what they say.
"""

from dataclasses import dataclass, field

from rollfleet_operator.api.rolloutengine import Committed, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase, StrategyType, WeightVersion, WeightVersionStatus
from rollfleet_protocol.commands import Command, Transfer
from rollfleet_protocol.state import Gate, OperationName, WeightsState
from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.model.engines import ModelEngine
from tests.model.nodes import Host, Nodes
from tests.support.builders import digest_of
from tests.support.simulated_engine import MODEL_DIGEST

PROBE_TOLERANCE = 1e-3
SILENT_S = 1.0  # past the time at which a guard reopens by itself


class BrokenPromise(AssertionError):  # noqa: N818 - a promise is broken, not an error made
    """A promise that did not hold; `promise` is its name in the list of mutations."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


@dataclass
class Answer:
    """What a client was told, counted together."""

    version: int
    count: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass
class Long:
    """A request that takes a while."""

    version: int


@dataclass
class Book:
    """The auditor's own record."""

    committed: Committed | None = None  # as it was written last; outlives a lost status
    lost: bool = False  # the status was lost and nothing was committed since
    ever_lost: bool = False  # after that epochs may begin anew: nobody may know of the old ones
    answers: list[Answer] = field(default_factory=list)
    highest_answered: int = -1
    epochs: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # epoch -> (uid, version, attempt)
    commits: int = 0


class Auditor:
    """Looks after every event."""

    def __init__(self, clock: Clock, api: ApiServer, nodes: Nodes) -> None:
        self.book = Book()
        self._long: dict[str, Long] = {}
        self._clock = clock
        self._api = api
        self._nodes = nodes
        api.on_fleet_status = self._fleet_written
        api.on_weight_status = self._weights_written
        nodes.on_start = self._watch

    # what clients see -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Every client asks every engine that it can reach, whatever the control plane knows of it."""
        probes: dict[tuple[int, tuple[int, ...]], tuple[str, tuple[float, ...]]] = {}  # by version and tokens
        for host in self._nodes.hosts.values():
            process = host.process
            if process is None:
                continue
            if process.state.gate is Gate.CLOSED:
                self._judge_closed(host, process)
                continue
            self._judge_open(host, process)
            self._answered(host.uid, process.state.weights.version or 0)
            probe = process.state.probe
            if probe is not None and probe.version == process.state.weights.version:
                name, known = probes.setdefault((probe.version, probe.tokens), (host.uid, probe.logprobs))
                apart = max((abs(a - b) for a, b in zip(known, probe.logprobs, strict=True)), default=0.0)
                if apart > PROBE_TOLERANCE:
                    raise BrokenPromise("agree", f"{name} and {host.uid} serve and differ by {apart:g} in the probe")

    def _judge_closed(self, host: Host, process: ModelEngine) -> None:
        """Nobody is held back on good weights by an operator that says nothing any more."""
        state = process.state
        if state.reopen_at is None or self._clock.time < state.reopen_at + SILENT_S:
            return
        held = state.alive and not state.draining and state.reopens and state.weights.state is WeightsState.VERIFIED
        if held and (state.running is None or state.running.name is not OperationName.REOPEN):
            raise BrokenPromise("owner", f"{host.uid} was to reopen at {state.reopen_at:.1f}")

    def _judge_open(self, host: Host, process: ModelEngine) -> None:
        weights, committed = process.state.weights, self.book.committed
        if weights.state is not WeightsState.VERIFIED:
            raise BrokenPromise("never stale", f"{host.uid} is open on weights that are {weights.state}")
        if committed is None:
            raise BrokenPromise("never stale", f"{host.uid} is open before anything was committed")
        previous = committed.previous
        if previous is not None and weights.version == previous.version:
            if previous.digest not in (None, weights.digest):
                raise BrokenPromise("never stale", f"{host.uid} answers from {weights}, recorded is {previous}")
            return
        if weights.version != committed.version:
            raise BrokenPromise(
                "never stale", f"{host.uid} answers at {weights.version}, committed is {committed.version}"
            )
        expected = MODEL_DIGEST if committed.version == 0 else committed.digest or digest_of(committed.checkpoint or "")
        if process.resident.rstrip("!") != expected:
            raise BrokenPromise("never stale", f"{host.uid} really holds {process.resident}, not {expected}")

    def _answered(self, who: str, version: int) -> None:
        book = self.book
        previous = None if book.committed is None else book.committed.previous
        mixed = previous is not None and previous.version == version  # a fleet that rolls says so
        if version < book.highest_answered and not (book.lost or mixed):
            raise BrokenPromise("atomic", f"{who} answered at {version} after {book.highest_answered} was answered")
        book.highest_answered = max(book.highest_answered, version)
        if not book.answers or book.answers[-1].version != version:
            book.answers.append(Answer(version, first_s=self._clock.time))
        book.answers[-1].count += 1
        book.answers[-1].last_s = self._clock.time

    def begin_long(self, host: Host, seconds: float) -> None:
        """A client begins a request that takes a while."""
        process = host.process
        if process is None or not process.open or process.in_flight:
            return
        process.in_flight = 1
        request = Long(process.state.weights.version or 0)
        self._long[host.uid] = request

        def end() -> None:
            # Else it was aborted, and the place may be another's.
            if host.process is process and process.in_flight and self._long[host.uid] is request:
                process.in_flight = 0
                self._nodes.on_change(host)
                self._answered(host.uid, request.version)

        self._clock.later(seconds, end)

    # what operators do ----------------------------------------------------------------------------------------------

    def _watch(self, host: Host) -> None:
        if host.process is not None:
            host.process.on_command = lambda command: self._commanded(host, command)

    def _commanded(self, host: Host, command: Command) -> None:
        process = host.process
        if process is None or command.incarnation != process.state.incarnation:
            return
        if command.epoch < process.state.epoch:
            before = process.state
            self._clock.later(0.0, lambda: self._unmoved(host, process, before.epoch))
            return
        recorded = self._api.fleet.status.epoch
        if command.epoch > recorded and not self.book.ever_lost:
            raise BrokenPromise("epoch", f"{type(command).__name__} under epoch {command.epoch}, recorded {recorded}")
        if isinstance(command, Transfer) and self._takes(process, command):
            self._judge_transfer(host, command)

    def _unmoved(self, host: Host, process: ModelEngine, epoch: int) -> None:
        if host.process is process and process.state.epoch < epoch:
            raise BrokenPromise("epoch", f"{host.uid} went back from epoch {epoch} to {process.state.epoch}")

    def _takes(self, process: ModelEngine, command: Transfer) -> bool:
        """Whether this command begins a transfer, and does not repeat one."""
        state = process.state
        staged = state.staged is not None and state.staged.version == command.version
        return staged and state.weights.state is not WeightsState.UPDATING

    def _judge_transfer(self, host: Host, command: Transfer) -> None:
        """Nobody who holds other weights answers, or could by itself, once weights begin to change."""
        committed = self.book.committed
        if committed is not None and command.version == committed.version:
            return
        if any(each.spec.strategy.type is StrategyType.ROLLING for each, _ in self._api.weight_versions.values()):
            return  # the others answer meanwhile: that is what is asked for
        for other in self._nodes.running:
            process = other.process
            if process is None or other is host:
                continue
            state = process.state
            if process.open or process.in_flight:
                raise BrokenPromise("fence", f"transfer to {host.uid} at {command.version} while {other.uid} answers")
            if state.reopen_at is not None and state.alive and not state.armed and not state.draining:
                raise BrokenPromise("fence", f"transfer to {host.uid} while {other.uid} may reopen by itself")

    def _fleet_written(self, before: RolloutEngineStatus, after: RolloutEngineStatus) -> None:
        book = self.book
        if after.epoch < before.epoch:
            raise BrokenPromise("epoch", f"the fleet's epoch fell from {before.epoch} to {after.epoch}")
        if after.committed == before.committed:
            return
        if after.committed is None:
            raise BrokenPromise("commit", "an operator took the commit record away")
        if not book.lost and _same(book.committed, after.committed):  # the roll ended
            book.committed = after.committed
            return
        if book.committed is not None and not book.lost and after.committed.version <= book.committed.version:
            raise BrokenPromise("commit", f"from {book.committed.version} back to {after.committed.version}")
        self._judge_commit(after.committed, found_again=book.lost and before.committed is None)
        if book.lost:
            book.highest_answered = -1
        book.committed, book.lost = after.committed, False
        book.commits += 1

    def _judge_commit(self, committed: Committed, *, found_again: bool) -> None:
        """Somebody really holds it, verified; nobody who takes part holds it unverified."""
        if found_again:
            return
        held = [
            host.process
            for host in self._nodes.running
            if host.process is not None and host.process.state.weights.version == committed.version
        ]
        verified = [process for process in held if process.state.weights.state is WeightsState.VERIFIED]
        if not verified and held:
            raise BrokenPromise("commit", f"version {committed.version} is committed and nobody verified it")
        epoch = self._api.fleet.status.epoch
        for process in held:
            state = process.state
            if state.weights.state is WeightsState.LOADED and state.epoch == epoch and state.alive:
                if state.draining or self._is_leaving(process):
                    continue
                raise BrokenPromise("commit", f"version {committed.version} is committed before {state.incarnation}")

    def _is_leaving(self, process: ModelEngine) -> bool:
        host = next((host for host in self._nodes.hosts.values() if host.process is process), None)
        view = None if host is None else self._api.pods.get(host.uid)
        return view is None or view.deleting or not view.started

    def _weights_written(self, weight_version: WeightVersion, status: WeightVersionStatus) -> None:
        if status.phase is not Phase.PREPARING or not status.epoch:
            return
        given = (weight_version.metadata.uid, status.version, status.attempt)
        known = self.book.epochs.setdefault(status.epoch, given)
        if known[:2] != given[:2] and not self.book.ever_lost:
            raise BrokenPromise("epoch", f"epoch {status.epoch} of {known} is given to {given} again")

    # what the chaos does --------------------------------------------------------------------------------------------

    def status_lost(self) -> None:
        """Somebody restored the objects from a backup without their statuses."""
        self.book.lost = self.book.ever_lost = True


def _same(one: Committed | None, other: Committed) -> bool:
    """Whether only the version before, or who is excluded, was recorded anew."""
    if one is None:
        return False
    return (one.version, one.digest, one.weight_version_uid) == (other.version, other.digest, other.weight_version_uid)
