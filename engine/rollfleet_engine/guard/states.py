"""What the guard's machine knows, what happens to it, and what it wants done: plain values, no clock and no engine."""

from dataclasses import dataclass, field, replace

from rollfleet_protocol.commands import CheckpointSource, Command, Push, Transfer
from rollfleet_protocol.refusals import ClosedReason, RefusalReason
from rollfleet_protocol.sleep import Sleeping, Tag
from rollfleet_protocol.state import (
    EngineState,
    Facts,
    Failure,
    Gate,
    Operation,
    OperationName,
    OperationStatus,
    ProbeResult,
    Staged,
    Transferred,
    Weights,
    WeightsState,
)

INITIAL_SOURCE = "model"
AWAKE = Sleeping()
INITIAL_WEIGHTS = Weights(state=WeightsState.INITIAL, source=INITIAL_SOURCE)


_TOUCHED = frozenset({WeightsState.UPDATING, WeightsState.LOADED, WeightsState.UNCERTAIN, WeightsState.ABSENT})


@dataclass(frozen=True)
class OperationRecord:
    """The newest operation. `id` tells the report of a running task from that of one that was given up."""

    id: int
    name: OperationName
    epoch: int
    version: int
    started: float  # monotonic seconds
    command: Command | None = None  # None where the guard began it by itself
    status: OperationStatus = OperationStatus.RUNNING
    ended: float | None = None
    progress: str = ""
    failure: Failure | None = None

    @property
    def running(self) -> bool:
        """Whether its end was not reported yet."""
        return self.status is OperationStatus.RUNNING


@dataclass(frozen=True)
class GuardState:
    """Everything the guard decides on, apart from the number of requests in flight."""

    incarnation: str
    sequence: int = 1
    epoch: int = 0
    alive: bool = True
    draining: bool = False
    gate: Gate = Gate.CLOSED
    opened_before: bool = False  # in this incarnation
    member: bool = False  # of the serving set: was opened, and nothing is wrong since
    armed: bool = False
    paused: bool = False
    sleep: Sleeping = AWAKE
    quiesced_epoch: int = 0  # epoch whose Close ended well and whose pause still holds; 0 for none
    reopens: bool = False  # was open before the gate closed, and the weights are untouched since
    silence_s: float | None = None  # None: the operator's silence reopens nothing
    reopen_at: float | None = None  # monotonic seconds
    weights: Weights = INITIAL_WEIGHTS
    weights_before: Weights | None = None  # what the running transfer found
    needs_recovery: bool = False  # the workers are where a failed transfer left them
    staged: Staged | None = None
    staged_source: CheckpointSource | None = None
    push: Push | None = None  # of this epoch's Transfer: who may use the native routes
    transferred: Transferred | None = None
    probe: ProbeResult | None = None
    operation: OperationRecord | None = None
    operations: int = 0  # begun so far

    @property
    def running(self) -> OperationRecord | None:
        """The operation that goes on now."""
        return self.operation if self.operation is not None and self.operation.running else None

    @property
    def touched(self) -> bool:
        """Whether the weights that were served may be gone or are no longer the ones that are held."""
        return self.weights.state in _TOUCHED

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """What sleeps."""
        return tuple(tag for tag in Tag if self.sleep.level and tag not in self.sleep.awake)

    @property
    def closed_reason(self) -> ClosedReason:
        """Why clients are refused while the gate is closed; the gravest cause first."""
        if not self.alive:
            return ClosedReason.ENGINE_DEAD
        if self.draining:
            return ClosedReason.DRAINING
        if self.weights.state is WeightsState.UNCERTAIN:
            return ClosedReason.UNCERTAIN
        if Tag.WEIGHTS not in self.asleep and self.weights.state is WeightsState.ABSENT:
            return ClosedReason.WEIGHTS_ABSENT
        if self.asleep:
            return ClosedReason.ASLEEP
        return ClosedReason.UPDATING if self.opened_before else ClosedReason.STARTING

    def told(self) -> "GuardState":
        """Without what a follower is not woken for."""
        return replace(self, sequence=0, reopen_at=None)


@dataclass(frozen=True)
class Heard:
    """The operator made itself heard (a long poll)."""


@dataclass(frozen=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True)
class Paused:
    """The scheduler is paused."""


@dataclass(frozen=True)
class Resumed:
    """The scheduler runs again."""


@dataclass(frozen=True)
class Slept:
    """The engine sleeps, and nothing of it is awake."""

    level: int


@dataclass(frozen=True)
class Woken:
    """These tags are awake again; the scheduler is still paused."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True)
class Progressed:
    """A running operation tells how far it is."""

    operation_id: int
    progress: str


@dataclass(frozen=True)
class Touching:
    """A trainer's push is about to put old tensors away."""

    operation_id: int


@dataclass(frozen=True)
class Ended:
    """An operation ended well."""

    operation_id: int
    result: Staged | Transferred | ProbeResult | None = None


@dataclass(frozen=True)
class Failed:
    """An operation failed. `touched`: whether the weights that were held may be gone.

    `unreset`: they are as they were, and workers must be put back all the same before the next transfer.
    """

    operation_id: int
    failure: Failure
    touched: bool = False
    unreset: bool = False


@dataclass(frozen=True)
class EngineDied:
    """The engine core is gone for good; the kubelet restarts the container."""


@dataclass(frozen=True)
class DrainBegan:
    """The pod is being deleted."""


Event = (
    Command
    | Heard
    | Tick
    | Paused
    | Resumed
    | Slept
    | Woken
    | Progressed
    | Touching
    | Ended
    | Failed
    | EngineDied
    | DrainBegan
)


@dataclass(frozen=True)
class Start:
    """Begin this operation, after whatever was cancelled before has really ended."""

    operation: OperationRecord


@dataclass(frozen=True)
class CancelOperation:
    """Stop the task of this operation; its report is no longer awaited."""

    operation_id: int


@dataclass(frozen=True)
class AbandonPush:
    """Wait for this operation's trainer no longer; a call of its that is in the engine comes to its end first."""

    operation_id: int


@dataclass(frozen=True)
class ReleaseStaged:
    """Let the files of the staged checkpoint go."""


Effect = Start | CancelOperation | AbandonPush | ReleaseStaged


@dataclass(frozen=True)
class Rejection:
    """Why a command was refused."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True)
class Decision:
    """The outcome of one event. Effects are begun in order, after the new state holds."""

    state: GuardState
    effects: tuple[Effect, ...] = field(default=())
    rejection: Rejection | None = None


def to_wire(state: GuardState, facts: Facts, in_flight: int, now: float) -> EngineState:
    """As GET /rollfleet/v1/state tells it."""
    return EngineState(
        sequence=state.sequence,
        incarnation=state.incarnation,
        facts=facts,
        alive=state.alive,
        gate=state.gate,
        closed_reason="" if state.gate is Gate.OPEN else state.closed_reason.value,
        ready=state.member and state.alive and not state.draining,
        armed=state.armed,
        paused=state.paused,
        sleep=state.sleep,
        epoch=state.epoch,
        weights=state.weights,
        in_flight=in_flight,
        staged=state.staged,
        transferred=state.transferred,
        probe=state.probe,
        operation=None if state.operation is None else _operation_to_wire(state.operation, now),
    )


def _operation_to_wire(operation: OperationRecord, now: float) -> Operation:
    return Operation(
        name=operation.name,
        epoch=operation.epoch,
        version=operation.version,
        status=operation.status,
        seconds=(now if operation.ended is None else operation.ended) - operation.started,
        progress=operation.progress,
        pushed=isinstance(operation.command, Transfer) and operation.command.push is not None,
        failure=operation.failure,
    )
