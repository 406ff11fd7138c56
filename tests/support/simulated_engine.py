"""A simulated engine process: the real guard machine over an engine that only takes time and can fail."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rollfleet_engine.guard.machine import decide
from rollfleet_engine.guard.states import (
    AbandonPush,
    CancelOperation,
    DrainBegan,
    Ended,
    Event,
    Failed,
    GuardState,
    Heard,
    OperationRecord,
    Paused,
    Rejection,
    Resumed,
    Start,
    Tick,
    Touching,
    to_wire,
)
from rollfleet_protocol.commands import CheckpointRoot, Close, Command, Prepare, Transfer, Verify
from rollfleet_protocol.state import (
    DigestSource,
    EngineState,
    Failure,
    FailureReason,
    OperationName,
    ProbeResult,
    Staged,
    Transferred,
    WeightsState,
)
from tests.support.builders import FACTS, digest_of

MODEL_DIGEST = "sha256:model"
VOCABULARY = 1000  # tokens that the model has


@dataclass
class Store:
    """The checkpoints that all engines see."""

    faults: dict[str, Failure] = field(default_factory=dict)  # by path
    digests: dict[str, str] = field(default_factory=dict)  # of what was written anew, by path

    def read(self, root: CheckpointRoot, path: str) -> str | Failure:
        """Its digest, or what is wrong with it."""
        if root is CheckpointRoot.MODEL:
            return MODEL_DIGEST
        return self.faults.get(path, self.digests.get(path, digest_of(path)))


@dataclass
class Temper:
    """How an engine behaves."""

    seconds: Callable[[OperationName], float] = lambda _: 0.1
    fails: dict[OperationName, Failure] = field(default_factory=dict)  # the next operation of this kind fails so
    skew: float = 0.0  # added to what the probe answers


@dataclass
class Pending:
    """An operation on its way."""

    operation: OperationRecord
    ends: float


class EngineProcess:
    """One incarnation. Times are seconds of the simulated clock."""

    resumes_at_end: tuple[OperationName, ...] = (OperationName.VERIFY, OperationName.REOPEN)

    def __init__(self, incarnation: str, store: Store, temper: Temper, rng: random.Random) -> None:
        self.state = GuardState(incarnation=incarnation)
        self.in_flight = 0
        self.resident = MODEL_DIGEST
        self.history: list[tuple[float, str]] = []  # (time, what happened) for invariants
        self._store = store
        self._temper = temper
        self._rng = rng
        self._pending: Pending | None = None
        self._sent = ("", DigestSource.TRAINER)

    def wire(self, now: float) -> EngineState:
        """What GET state answers; asking is a word of the operator."""
        self.apply(Heard(), now)
        return to_wire(self.state, FACTS, self.in_flight, now)

    def command(self, command: Command, now: float) -> Rejection | None:
        """Give a command; None where it was taken."""
        return self.apply(command, now)

    def drain(self, now: float) -> None:
        """The preStop hook began."""
        self.apply(DrainBegan(), now)
        self.empty(now)

    def empty(self, now: float) -> None:
        """Whatever is in flight ends."""
        self.in_flight = 0

    def next_event(self) -> float | None:
        """When something happens by itself."""
        times = [] if self._pending is None else [self._pending.ends]
        if self.state.reopen_at is not None:
            times.append(self.state.reopen_at)
        return min(times, default=None)

    def advance(self, now: float) -> None:
        """Let time pass until now."""
        if self._pending is not None and self._pending.ends <= now:
            pending, self._pending = self._pending, None
            self._finish(pending.operation, now)
        self.apply(Tick(), now)

    def apply(self, event: Event | Command, now: float) -> Rejection | None:
        """One event of the guard."""
        before = self.state
        decision = decide(before, event, now, self.in_flight)
        self.state = decision.state
        self.moved(before, now)
        for effect in decision.effects:
            if isinstance(effect, Start):
                self._begin(effect.operation, now)
            elif isinstance(effect, CancelOperation):
                self._give_up(effect.operation_id)
            elif isinstance(effect, AbandonPush) and self._pending is not None:
                self._abandon(self._pending.operation, now)
        return decision.rejection

    def _abandon(self, operation: OperationRecord, now: float) -> None:
        """The trainer of this push is waited for no longer."""
        self._temper.fails[OperationName.TRANSFER] = fault(FailureReason.CANCELLED, "a newer epoch began")
        self._pending = Pending(operation, now)

    def moved(self, before: GuardState, now: float) -> None:
        """The machine has decided; what follows is not begun yet."""

    @property
    def awaits_push(self) -> bool:
        """Whether a trainer may begin."""
        running = self.state.running
        return running is not None and _is_push(running) and self.state.weights.state is not WeightsState.UPDATING

    def push(self, now: float, digest: str, source: DigestSource, seconds: float) -> None:
        """A trainer sends these bytes, and takes so long over it."""
        running = self.state.running
        if running is None:
            return
        self.apply(Touching(running.id), now)
        self.resident = "sha256:garbage"
        self._sent = (digest, source)
        if now + seconds < running.started + _deadline_s(running):
            self._temper.fails.pop(running.name, None)
            self._pending = Pending(running, now + seconds)

    def refuse_push(self, now: float, failure: Failure) -> None:
        """It ends before a tensor has come."""
        running = self.state.running
        if running is not None:
            self._temper.fails[running.name] = failure
            self._pending = Pending(running, now)

    def _give_up(self, operation_id: int) -> None:
        if self._pending is not None and self._pending.operation.id == operation_id:
            self._pending = None

    def _begin(self, operation: OperationRecord, now: float) -> None:
        if operation.name is OperationName.CLOSE:
            self.apply(Paused(), now)
        if operation.name is OperationName.TRANSFER and not _is_push(operation):
            self.resident = "sha256:garbage"
        if _is_push(operation):
            text = "the trainer did not call start_weight_update"
            self._temper.fails[operation.name] = fault(FailureReason.DEADLINE_EXCEEDED, text)
            self._pending = Pending(operation, operation.started + _deadline_s(operation))
            return
        takes_s, given_s = self._temper.seconds(operation.name), _deadline_s(operation) - (now - operation.started)
        if takes_s > given_s:
            text = f"not done within {_deadline_s(operation):g} s"
            self._temper.fails[operation.name] = fault(FailureReason.DEADLINE_EXCEEDED, text)
        self._pending = Pending(operation, now + min(takes_s, given_s))

    def _finish(self, operation: OperationRecord, now: float) -> None:
        failure = self._temper.fails.pop(operation.name, None)
        command = operation.command
        if isinstance(command, Close):
            self.empty(now)
        if operation.name in self.resumes_at_end and self.state.paused:
            self.apply(Resumed(), now)
        read = self._store.read(command.source.root, command.source.path) if isinstance(command, Prepare) else ""
        if failure is None and isinstance(read, Failure):
            failure = read
        if failure is None and isinstance(command, Verify) and max(command.probe_tokens) >= VOCABULARY:
            failure = fault(FailureReason.PROBE_FAILED, f"the model has no token {max(command.probe_tokens)}")
        if failure is not None:
            touched = operation.name is OperationName.TRANSFER and self.resident == "sha256:garbage"
            self.apply(Failed(operation.id, failure, touched), now)
            return
        self.apply(Ended(operation.id, self._result(operation, str(read))), now)

    def _result(self, operation: OperationRecord, digest: str) -> Staged | Transferred | ProbeResult | None:
        command = operation.command
        if isinstance(command, Prepare):
            return Staged(
                epoch=command.epoch,
                version=command.version,
                path=command.source.path,
                digest=digest,
                tensors=1,
                bytes=1,
                seconds=0.1,
            )
        if isinstance(command, Transfer):
            digest, source = command.digest or "", DigestSource.CHECKPOINT
            if command.push is not None:
                digest, source = self._sent
            self.resident = digest
            return Transferred(
                epoch=command.epoch,
                version=command.version,
                digest=digest,
                digest_source=source,
                tensors=1,
                bytes=1,
                layers=1,
                seconds=0.1,
                phase_seconds={},
            )
        if isinstance(command, Verify):
            logprobs = tuple(
                probe_logprob(self.resident, token) + self._temper.skew for token in command.probe_tokens[1:]
            )
            return ProbeResult(
                epoch=command.epoch,
                version=command.version,
                tokens=command.probe_tokens,
                logprobs=logprobs,
                seconds=0.01,
            )
        return None


def _is_push(operation: OperationRecord) -> bool:
    return isinstance(operation.command, Transfer) and operation.command.push is not None


def _deadline_s(operation: OperationRecord) -> float:
    command = operation.command
    return command.deadline_seconds if isinstance(command, Prepare | Close | Transfer | Verify) else float("inf")


def probe_logprob(resident: str, token: int) -> float:
    """What an engine that holds this answers."""
    seed = hashlib.sha256(f"{resident}/{token}".encode()).digest()
    return -float(seed[0]) - float(seed[1]) / 256.0


def fault(reason: FailureReason, message: str) -> Failure:
    """A failure."""
    return Failure(reason=reason, message=message)
