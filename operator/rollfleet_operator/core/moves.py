"""What the phases of an update share: their view of it, what they answer, and common commands."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from rollfleet_operator.api.rolloutengine import Committed, Outcome
from rollfleet_operator.api.weightversion import (
    FailedEngine,
    Phase,
    Progress,
    SourceType,
    StrategyType,
    WeightVersion,
    WeightVersionStatus,
)
from rollfleet_operator.core.conditions import clip
from rollfleet_operator.core.policies import Deadline, began, seconds_text
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.vanished import unfenced_text
from rollfleet_operator.core.work import Work, back_off_until, busy
from rollfleet_operator.core.world import Engine, Fence, World
from rollfleet_protocol.commands import LONGEST_SECONDS, Arm, Close, PauseMode
from rollfleet_protocol.state import EngineState, Gate, OperationName, OperationStatus

MAX_HOLD_UPS = 10
MAX_NAMES = 3  # of engines that say the same
MAX_HOLD_UP_TEXT = 512

# Of an engine that is at work and only slow.
STEPS = (Reason.PREPARING, Reason.QUIESCING, Reason.TRANSFERRING, Reason.VERIFYING, Reason.OPENING)
SECONDS_OF = {
    Phase.PREPARING: "preparing",
    Phase.QUIESCING: "quiescing",
    Phase.TRANSFERRING: "transferring",
    Phase.VERIFYING: "verifying",
    Phase.OPENING: "opening",
}


@dataclass(frozen=True)
class Ending:
    """How an update ends, and why."""

    outcome: Outcome
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Move:
    """What a phase answers. `catch_up_epoch`: under which epoch late joiners may go on meanwhile; None: they wait."""

    status: WeightVersionStatus
    ending: Ending | None = None
    commit: Committed | None = None
    catch_up_epoch: int | None = None
    rolling: bool = False  # engines that serve the version before may go on
    reason: str = ""  # what the phase waits for, where it is not engines
    message: str = ""
    untouched: bool = False  # of an end in Transferring: by the guards' own word no weights were touched
    final: bool = False  # of an end: another attempt could not end otherwise


@dataclass(frozen=True)
class Update:
    """An update under way, as its phase sees it."""

    world: World
    record: Record
    weight_version: WeightVersion
    work: Work

    @property
    def status(self) -> WeightVersionStatus:
        """The record of this update."""
        return self.weight_version.status

    @property
    def epoch(self) -> int:
        """Under which all its commands are given."""
        return self.status.epoch

    @property
    def version(self) -> int:
        """Where it leads."""
        return self.weight_version.spec.version

    @property
    def pushed(self) -> bool:
        """Whether a trainer sends the weights."""
        return self.weight_version.spec.source.type is SourceType.TRAINER

    @property
    def path(self) -> str:
        """Where the version is stored, below volumes.checkpoints; empty for what a trainer sends and nobody stored."""
        source, recovery = self.weight_version.spec.source, self.weight_version.spec.recovery
        checkpoint = source.checkpoint if recovery is None else recovery.checkpoint
        return "" if checkpoint is None else checkpoint.path

    @property
    def backend(self) -> str:
        """By which a trainer sends; empty where the fleet names none."""
        transfer = self.world.fleet.spec.weight_transfer
        return "" if transfer is None else transfer.backend.value

    @property
    def min_serving(self) -> int:
        """How many engines must hold the version before it is committed."""
        return self.weight_version.spec.min_serving

    @property
    def rolls(self) -> bool:
        """Whether engines go on serving the version before while the first ones move."""
        rolling = self.weight_version.spec.strategy.type is StrategyType.ROLLING
        return rolling and bool(self.world.serving(self.record.committed))

    @property
    def least(self) -> int:
        """How many engines it takes to begin: one must be there to move beside those that serve."""
        return self.min_serving + self.rolls

    def too_few(self, count: int) -> str:
        """Says so."""
        wanted = f"spec.minServing is {self.min_serving}{', one more must roll' if self.rolls else ''}"
        return f"{count} engines can take part, {wanted} and spec.replicas {self.world.fleet.spec.replicas}"

    @property
    def now(self) -> datetime:
        """The pass's time."""
        return self.work.now

    @property
    def phase_began(self) -> datetime:
        """From when the phase counts."""
        return began(self.status.phase_started_at or self.now, self.now, self.world.settings.up_since)

    def deadline(self, seconds: float) -> Deadline:
        """Of the phase that runs; the pass is woken at its end."""
        settings = self.world.settings
        since = self.status.phase_started_at or self.now
        deadline = Deadline.of(since, seconds, self.now, settings.up_since, settings.away)
        if not deadline.passed(self.now):
            self.work.wake(deadline.ends)
        return deadline

    def enter(self, phase: Phase, status: WeightVersionStatus | None = None) -> WeightVersionStatus:
        """The record at the begin of a phase; the one before it gets its duration."""
        old = status or self.status
        return enter(old, phase, self.now)


def enter(old: WeightVersionStatus, phase: Phase, now: datetime) -> WeightVersionStatus:
    """Begin a phase at this time."""
    spent = seconds_text(old.phase_started_at, now)
    name = SECONDS_OF.get(old.phase)
    seconds = old.phase_seconds if name is None else old.phase_seconds.model_copy(update={name: spent})
    return old.model_copy(update={"phase": phase, "phase_started_at": now, "phase_seconds": seconds})


def hold_up(engine: Engine, reason: str, message: str) -> FailedEngine:
    """An engine that holds the update up."""
    return FailedEngine(name=engine.name, reason=reason, message=clip(message, MAX_HOLD_UP_TEXT))


def progress(done: int, total: int, held_up: list[FailedEngine]) -> Progress:
    """Counts, and who holds it up."""
    return Progress(done=done, total=total, failed=tuple(held_up[:MAX_HOLD_UPS]))


def tell(held_up: list[FailedEngine]) -> str:
    """The hold-ups in one line; what several engines say alike is said once, behind their names."""
    names: dict[str, list[str]] = {}
    for each in held_up:
        names.setdefault(each.message or each.reason, []).append(each.name)
    return "; ".join(f"{in_short(who)}: {words}" for words, who in list(names.items())[:MAX_HOLD_UPS])


def in_short(names: list[str]) -> str:
    """The first few, and how many more."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def causes(held_up: Iterable[FailedEngine]) -> list[FailedEngine]:
    """Those that failed at something; the others are only slow."""
    return [each for each in held_up if each.reason not in STEPS]


def failed(reason: str, message: str) -> Ending:
    """A failure."""
    return Ending(Outcome.FAILED, reason, clip(message))


def overdue(phase: str, seconds: int, held_up: list[FailedEngine]) -> Ending:
    """A phase that did not end in time, in the words of whoever held it up."""
    found = causes(held_up)
    reason = found[0].reason if found else Reason.DEADLINE_EXCEEDED.value
    return failed(reason, f"{phase} did not end within {seconds} s: {tell(held_up) or 'nobody said why'}")


def close(
    update: Update, engine: Engine, state: EngineState, deadline: Deadline, *, version: int | None = None
) -> None:
    """Close this engine under the update's epoch, on its way to the update's version or to another one.

    It answers at once and drains in the background.
    """
    if busy(state, update.epoch):
        return
    pause = update.weight_version.spec.pause
    command = Close(
        incarnation=state.incarnation,
        epoch=update.epoch,
        version=update.version if version is None else version,
        mode=PauseMode(pause.mode.value),
        drain_timeout_seconds=pause.drain_timeout_seconds,
        keep_seconds=_longest_pause_s(update),
        deadline_seconds=deadline.left_s(update.now),
        operator_silence_seconds=update.world.settings.operator_silence_s,
    )
    update.work.give(engine, command)


def _longest_pause_s(update: Update) -> int:
    """Seconds from closing to opening in which the phases' deadlines hold."""
    deadlines = update.weight_version.spec.deadlines
    in_all = deadlines.quiesce_seconds + deadlines.transfer_seconds + deadlines.verify_seconds
    return min(in_all, LONGEST_SECONDS)


def arm(update: Update, engine: Engine, state: EngineState) -> None:
    """From here on only we reopen it."""
    if not busy(state, update.epoch):
        command = Arm(incarnation=state.incarnation, epoch=update.epoch)
        update.work.give(engine, command, at_once=just_closed(state, update.epoch))


def put_aside(update: Update, engine: Engine, deadline: Deadline) -> FailedEngine | None:
    """See that an engine that takes no part answers nobody before the commit; what is missing, if anything."""
    fence, state = engine.fence(update.epoch), engine.answering
    if fence is Fence.HELD or _was_armed_before(update, engine):
        return None
    if state is None and (engine.pod.vanished or engine.pod.deleting):
        return hold_up(engine, Reason.CANNOT_BE_FENCED, unfenced_text(engine, update.world.fleet))
    if state is None:
        text = f"may be open and does not answer: {'' if engine.guard is None else engine.guard.error}"
        return hold_up(engine, Reason.ENGINE_UNREACHABLE, text.rstrip(": "))
    if engine.quarantined:
        return hold_up(engine, Reason.QUARANTINED, f"may answer under epoch {state.epoch}: delete the pod")
    if fence is Fence.CLOSED and quiet(engine, state, update.epoch):
        arm(update, engine, state)
        return hold_up(engine, Reason.QUIESCING, "is being armed")
    close(update, engine, state, deadline)
    text = f"gate {state.gate.value}, {state.in_flight} requests in flight, epoch {state.epoch}"
    return hold_up(engine, Reason.QUIESCING, text)


def _was_armed_before(update: Update, engine: Engine) -> bool:
    """Silent since an earlier attempt armed it: since then nobody has sent anything that opens."""
    since, state = update.status.closed_epoch, engine.state
    if since == 0 or state is None or engine.answering is not None or not since <= state.epoch <= update.epoch:
        return False
    return state.armed and state.gate is Gate.CLOSED and state.in_flight == 0


def quiet(engine: Engine, state: EngineState, epoch: int) -> bool:
    """Whether Arm can follow.

    A guard that was paused under an older epoch looks alike, and tells by refusing Arm: then Close comes first. Once it
    was taken, even where nothing was left to do, the follower forgets the refusal of Arm.
    """
    if state.gate is Gate.OPEN or state.in_flight > 0 or state.epoch != epoch or not state.paused:
        return False
    newest = state.operation
    if newest is not None and newest.name is OperationName.CLOSE and newest.status is OperationStatus.FAILED:
        return state.armed  # it paused and did not drain: Arm would be refused again and again
    return state.armed or just_closed(state, epoch) or back_off_until(engine, Arm.__name__, epoch) is None


def just_closed(state: EngineState, epoch: int) -> bool:
    """Whether the newest operation is a Close of this epoch that succeeded."""
    operation = state.operation
    if operation is None or operation.name is not OperationName.CLOSE or operation.epoch != epoch:
        return False
    return operation.status is OperationStatus.SUCCEEDED


def with_record(update: Update, status: WeightVersionStatus) -> Update:
    """The same update with a newer record."""
    return replace(update, weight_version=update.weight_version.model_copy(update={"status": status}))
