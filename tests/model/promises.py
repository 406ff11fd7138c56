"""What must be true after every event, whoever died: the promises of the design, as a client and an auditor see them.

The auditor keeps books of its own: what was committed, which epoch was given to which update, what each client was
answered and when. It looks at what engines really hold, not at what they say.
"""

from rollfleet_operator.api.weightversion import StrategyType, WeightVersion
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.observed import Observed
from rollfleet_protocol.commands import Close, Command, PauseMode, Transfer, Verify
from rollfleet_protocol.state import Gate, OperationName, WeightsState
from tests.model.answers import judge_answer
from tests.model.api_server import ApiServer
from tests.model.books import Book, BrokenPromise, Ledger
from tests.model.clock import Clock
from tests.model.decisions import judge_decision, judge_stops
from tests.model.engines import ModelEngine
from tests.model.nodes import Host, Nodes
from tests.model.promises_of_pushes import Pushes
from tests.model.pushes import Call
from tests.model.requests import Held, Request
from tests.model.senders import SenderLease
from tests.model.statuses import Statuses
from tests.support.builders import digest_of
from tests.support.simulated_engine import MODEL_DIGEST

__all__ = ["Auditor", "BrokenPromise"]

PROBE_TOLERANCE = 1e-3
SILENT_S = 1.0  # past the time at which a guard reopens by itself
MOST_REQUESTS = 3  # at one engine


class Auditor:
    """Looks after every event."""

    def __init__(self, clock: Clock, api: ApiServer, nodes: Nodes, lease: SenderLease) -> None:
        self.ledger = Ledger()
        self.pushes = Pushes(clock, api, nodes, lease, self.ledger, lambda: self.book, self._judge_change)
        self.statuses = Statuses(api, nodes, self.ledger, self.pushes)
        self._clock = clock
        self._api = api
        self._nodes = nodes
        nodes.on_start = self._watch
        nodes.on_stop = lambda _: self.saw("engine: stopped for good")

    @property
    def book(self) -> Book:
        """Of the fleet that there is now."""
        return self.statuses.book

    def saw(self, what: str) -> None:
        """A situation was reached."""
        self.ledger.seen[what] += 1

    # what clients see -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Every client asks every engine that it can reach, whatever the control plane knows of it."""
        # By version, tokens, and whom the guard obeys: an operator in another's place cannot ask, and replaces those.
        probes: dict[tuple[int, tuple[int, ...], str], tuple[str, tuple[float, ...]]] = {}
        for host in self._nodes.hosts.values():
            process = host.process
            if process is None or host.fleet != self.book.uid or self._is_beyond(host):
                continue
            self._note_verified(process)
            if process.state.gate is Gate.CLOSED:
                self._judge_closed(host, process)
                continue
            self._judge_open(host, process)
            self.book.proven.add(host.template)
            self._answered(host.uid, process.state.weights.version or 0)
            probe = process.state.probe
            if probe is not None and probe.version == process.state.weights.version and not self._is_unheard(host):
                name, known = probes.setdefault((probe.version, probe.tokens, host.obeys), (host.uid, probe.logprobs))
                apart = max((abs(a - b) for a, b in zip(known, probe.logprobs, strict=True)), default=0.0)
                if apart > PROBE_TOLERANCE and not self.book.ever_lost:
                    raise BrokenPromise("agree", f"{name} and {host.uid} serve and differ by {apart:g} in the probe")

    def _is_unheard(self, host: Host) -> bool:
        """Nobody can ask it for its answer, and none was kept with the commit: an update of one engine has no other."""
        committed = self.book.committed
        cut = host.uid not in self._api.pods or self._clock.time < host.node.cut_until
        return cut and (committed is None or committed.probe is None)

    def _is_beyond(self, host: Host) -> bool:
        """Its pod vanished, and the only record of that was lost with the fleet's status: nobody can know of it."""
        if not self.book.ever_lost or host.uid in self._api.pods:
            return False
        return all(member.uid != host.uid for member in self._api.fleet.status.members)

    def _note_verified(self, process: ModelEngine) -> None:
        state = process.state
        probe = state.probe
        if (
            probe is not None
            and state.weights.state is WeightsState.VERIFIED
            and probe.version == state.weights.version
        ):
            self.book.verified.setdefault((probe.version, probe.epoch), set()).add(state.incarnation)

    def _judge_closed(self, host: Host, process: ModelEngine) -> None:
        """Nobody is held back on good weights by an operator that says nothing any more, and no client for ever."""
        state = process.state
        if process.crowd.turnstile.kept and self._clock.time > process.crowd.kept_until + SILENT_S:
            raise BrokenPromise("owner", f"{host.uid} keeps requests past {process.crowd.kept_until:.1f}")
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
            self.saw("open: at the version before, while it rolls")
            return
        if weights.version != committed.version:
            raise BrokenPromise(
                "never stale", f"{host.uid} answers at {weights.version}, committed is {committed.version}"
            )
        if process.state.incarnation in committed.excluded:
            raise BrokenPromise("excluded", f"{host.uid} is open, and the commit names it as odd")
        expected = MODEL_DIGEST if committed.version == 0 else committed.digest or digest_of(committed.checkpoint or "")
        if process.resident.rstrip("!") != expected:
            raise BrokenPromise("never stale", f"{host.uid} really holds {process.resident}, not {expected}")

    def _answered(self, who: str, version: int) -> None:
        book = self.book
        previous = None if book.committed is None else book.committed.previous
        # A fleet that rolls says so, unless its status was lost meanwhile: who was asked at the version before ends.
        mixed = version == book.rolled_from or (previous is not None and previous.version == version)
        if version < book.highest_answered and not (book.lost or mixed):
            raise BrokenPromise("atomic", f"{who} answered at {version} after {book.highest_answered} was answered")
        book.highest_answered = max(book.highest_answered, version)

    def begin(self, host: Host, seconds: float, *, streams: bool, pinned: bool) -> None:
        """A client begins a request that takes a while."""
        process = host.process
        if process is not None and process.open and process.in_flight < MOST_REQUESTS:
            process.admit(self._clock.time, seconds, streams=streams, pinned=pinned)
            self._nodes.on_change(host)

    def _told(self, host: Host, request: Request) -> None:
        """A client has its answer."""
        if host.fleet != self.book.uid or self._is_beyond(host):
            return
        version = judge_answer(request, self.book, self.ledger)
        if not request.was_kept:
            self._answered(host.uid, version)

    def _heard(self, host: Host, request: Request, held: Held) -> None:
        """A token came over a stream."""
        book = self.book
        if host.fleet == book.uid and held.version not in book.versions and not self._is_beyond(host):
            text = f"{request.name} heard a token of version {held.version}, which is not committed"
            raise BrokenPromise("never stale", text)

    def _cut(self, request: Request) -> None:
        self.saw("answer: cut while kept" if request.was_kept else "answer: cut")

    # what operators do ----------------------------------------------------------------------------------------------

    def _watch(self, host: Host) -> None:
        if host.process is not None:
            host.process.on_command = lambda command: self._commanded(host, command)
            host.process.on_call = lambda call: self._called(host, call)
            host.process.crowd.on_answer = lambda request: self._told(host, request)
            host.process.crowd.on_cut = self._cut
            host.process.crowd.on_heard = lambda request, held: self._heard(host, request, held)

    def _commanded(self, host: Host, command: Command) -> None:
        process = host.process
        if process is None or command.incarnation != process.state.incarnation or host.fleet != self.book.uid:
            return
        if command.epoch < process.state.epoch:
            before = process.state
            self.saw("command: of an older epoch")
            self._clock.later(0.0, lambda: self._unmoved(host, process, before.epoch))
            return
        recorded = self._api.fleet.status.epoch
        if command.epoch > recorded and not self.book.ever_lost:
            raise BrokenPromise("epoch", f"{type(command).__name__} under epoch {command.epoch}, recorded {recorded}")
        if isinstance(command, Close) and command.mode is not PauseMode.ABORT and process.in_flight:
            self.saw(f"close: in mode {command.mode}, with requests in flight")
        self._judge_hold(host, command, recorded)
        if isinstance(command, Transfer) and self._takes(process, command):
            self._judge_change(host, command.version, command.epoch)

    def _called(self, host: Host, call: Call) -> None:
        if host.process is not None:
            self.pushes.called(host, host.process, call)

    def _unmoved(self, host: Host, process: ModelEngine, epoch: int) -> None:
        if host.process is process and process.state.epoch < epoch:
            raise BrokenPromise("epoch", f"{host.uid} went back from epoch {epoch} to {process.state.epoch}")

    def _judge_hold(self, host: Host, command: Command, recorded: int) -> None:
        """onFailure Hold: what was touched is left as it is."""
        hold = self.book.hold
        if hold is None or not isinstance(command, Transfer | Verify) or not hold.epoch <= command.epoch == recorded:
            return
        raise BrokenPromise("hold", f"{type(command).__name__} to {host.uid} under {command.epoch}, held since {hold}")

    def _takes(self, process: ModelEngine, command: Transfer) -> bool:
        """Whether this command begins a transfer, and does not repeat one."""
        state = process.state
        if command.push is not None:
            return process.session is None
        staged = state.staged is not None and state.staged.version == command.version
        ended = state.transferred is not None and state.transferred.epoch == command.epoch
        has_it = ended and (state.weights.state, state.weights.version) == (WeightsState.LOADED, command.version)
        return staged and not has_it and state.weights.state is not WeightsState.UPDATING

    def _judge_change(self, host: Host, version: int, epoch: int) -> None:
        """Nobody who holds other weights answers, or could by itself, once weights begin to change.

        While an update with strategy Rolling moves its first batch the others answer, but from the committed version.
        """
        committed = self.book.committed
        if committed is not None and version == committed.version:
            return
        if self._is_withdrawn(epoch):
            return  # on its way when its WeightVersion was deleted: nothing commits it any more, so nobody opens on it
        rolls = self._rolls(version, epoch)
        for other in self._nodes.of(self.book.uid):
            process = other.process
            if process is None or other is host or self._is_beyond(other):
                continue
            state = process.state
            if rolls:
                if process.open and (committed is None or state.weights.version != committed.version):
                    raise BrokenPromise("fence", f"the first batch rolls and {other.uid} answers at {state.weights}")
                continue
            if process.open or process.in_flight:
                raise BrokenPromise("fence", f"transfer to {host.uid} at {version} while {other.uid} answers")
            if state.reopen_at is not None and state.alive and not state.draining:
                raise BrokenPromise("fence", f"transfer to {host.uid} while {other.uid} may reopen by itself")

    def _is_withdrawn(self, epoch: int) -> bool:
        owner = self.book.epochs.get(epoch)
        present = {weight_version.metadata.uid for weight_version, _ in self._api.weight_versions.values()}
        return owner is not None and owner[0] not in present

    def _rolls(self, version: int, epoch: int) -> bool:
        """By the spec of the update to which the epoch was given."""
        uid, version, _ = self.book.epochs.get(epoch, ("", version, 0))
        spec = self.ledger.specs.get((uid, version))
        return spec is not None and spec.strategy.type is StrategyType.ROLLING

    def decided(self, observed: Observed, decision: Decision) -> None:
        """An operator has decided, by what it knows."""
        judge_decision(observed, decision, self._clock.now())
        if not self.book.ever_lost and observed.fleet.metadata.uid == self.book.uid:
            judge_stops(observed, decision, self.book.proven)

    # what people do -------------------------------------------------------------------------------------------------

    def asked(self, weight_version: WeightVersion) -> None:
        """A person writes a spec."""
        self.book.hold = None
        spec = weight_version.spec
        self.ledger.specs[weight_version.metadata.uid, spec.version] = spec
        stored = spec.source.checkpoint if spec.recovery is None else spec.recovery.checkpoint
        paths = self.ledger.paths.setdefault((weight_version.metadata.uid, spec.version), set())
        paths.add(None if stored is None else stored.path)

    def deleted(self, weight_version: WeightVersion) -> None:
        """A person deletes it."""
        self.book.hold = None

    def status_lost(self) -> None:
        """Somebody restored the objects from a backup without their statuses."""
        previous = None if self.book.committed is None else self.book.committed.previous
        self.book.rolled_from = self.book.rolled_from if previous is None else previous.version
        self.book.lost = self.book.ever_lost = True

    def fleet_made(self, uid: str) -> None:
        """Another fleet of the same name: nothing that was true of the one before binds it."""
        self.statuses.book = Book(uid)
