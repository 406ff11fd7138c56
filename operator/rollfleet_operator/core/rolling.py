"""Strategy Rolling: the fleet moves batch by batch, and serves both versions meanwhile.

The first batch goes through the phases of an update: closed, armed, loaded, verified. The write that commits the new
version records the one before as `committed.previous`: engines that are verified at it may go on serving until the roll
ends. In Opening batch after batch is closed and climbs the ladder of late joiners. An engine that stumbles on it does
not hold the others up, as long as spec.minServing engines serve. At the deadline whoever is left is closed at once:
that somebody answers from the newest weights comes before how many answer.

`previous` goes with a write of its own, as soon as no engine may answer from it any more, by its guard's word or the
API server's. An engine that does not answer keeps it there, and with it the condition MixedVersions, even after the
update ended: what may still be served must not be called impossible.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import ceil

from rollfleet_operator.api.rolloutengine import Committed, Outcome
from rollfleet_operator.api.weightversion import FailedEngine, Progress, StrategyType, WeightVersion
from rollfleet_operator.core.moves import Ending, Move, Update, close, hold_up, progress, tell, with_record
from rollfleet_operator.core.policies import OPENING_S, Deadline
from rollfleet_operator.core.preparing import staged
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.references import References
from rollfleet_operator.core.steps import prepare
from rollfleet_operator.core.work import busy, own_words
from rollfleet_operator.core.world import Engine, Fence, World, holds, holds_previous
from rollfleet_protocol.state import EngineState, Gate

TOLD = 3  # engines that the end of an update names
Member = tuple[Engine, EngineState]


@dataclass(frozen=True)
class Roll:
    """How engines of the version before may be closed: so many at once, and so many must serve."""

    max_unavailable: int
    min_serving: int

    def batches(self, engines: int) -> int:
        """How many it takes."""
        return ceil(engines / max(1, min(self.max_unavailable, engines - self.min_serving)))


def roll_of(weight_version: WeightVersion) -> Roll | None:
    """The roll that a spec asks for; None for Atomic."""
    spec = weight_version.spec
    if spec.strategy.type is not StrategyType.ROLLING:
        return None
    return Roll(spec.strategy.max_unavailable, spec.min_serving)


def first_batch(update: Update, candidates: tuple[Member, ...]) -> tuple[Member, ...]:
    """Who is closed before the commit, in the order of ranks; whoever is closed already comes first.

    Where nobody serves the committed version there is nothing to keep up, and all go at once.
    """
    roll = roll_of(update.weight_version)
    if roll is None or not any(engine.serves(update.record.committed) for engine, _ in candidates):
        return candidates
    size = max(0, min(roll.max_unavailable, len(candidates) - roll.min_serving))
    chosen = sorted(candidates, key=lambda member: member[1].gate is Gate.OPEN)[:size]
    names = {engine.name for engine, _ in chosen}
    return tuple(member for member in candidates if member[0].name in names)


def behind(world: World, committed: Committed | None, epoch: int) -> list[Engine]:
    """Engines that may answer from the version before."""
    if committed is None or committed.previous is None:
        return []
    return [engine for engine in world.engines if _may_be_behind(engine, committed, epoch)]


def _may_be_behind(engine: Engine, committed: Committed, epoch: int) -> bool:
    """An engine that holds other weights came to them by commands, and comes back to the old ones by no single one."""
    if engine.fence(epoch) is Fence.HELD:
        return False
    state = engine.answering or engine.state
    return state is None or holds_previous(state, committed)


def roll_on(update: Update, roll: Roll) -> Move:
    """One look at Opening: close the next engines, until nobody is behind or on the way."""
    committed = update.record.committed
    if committed is None:
        return Move(update.status)
    update = with_record(update, update.status.model_copy(update={"epoch": update.record.epoch}))
    world, replicas = update.world, update.world.fleet.spec.replicas
    seconds = roll_seconds(update.weight_version, max(replicas, len(world.engines)))
    deadline = update.deadline(seconds)
    left = behind(world, committed, update.epoch)
    coming = _coming(update, committed)
    status = update.status.model_copy(update={"progress": _progress(update, committed, left)})
    if not left and not coming:
        return Move(status, Ending(Outcome.ACTIVE, Reason.ACTIVE, _later(update, committed)))
    if not deadline.passed(update.now):
        close_next(update, committed, roll, deadline)
        return Move(status, rolling=True)
    last = deadline.ends + timedelta(seconds=OPENING_S)
    if update.now < last:
        update.work.wake(last)
        return Move(status)
    return Move(status, Ending(Outcome.ACTIVE, Reason.ACTIVE, _later(update, committed)))


def roll_seconds(weight_version: WeightVersion, engines: int) -> int:
    """What the batches after the commit may take: each as long as the first."""
    roll, deadlines = roll_of(weight_version), weight_version.spec.deadlines
    if roll is None:
        return 0
    return roll.batches(engines) * (deadlines.quiesce_seconds + deadlines.transfer_seconds + deadlines.verify_seconds)


def _coming(update: Update, committed: Committed) -> list[Engine]:
    """Who is on the way to the committed version, has not stumbled, and does not wait for a person.

    Engines that answer the probe unlike those that serve wait for one. Where they are the more, nobody knows who is
    odd: then they hold the others up, which go on serving what is known to be good.
    """
    references = References.of(update.world, committed, update.weight_version)
    coming = [
        (engine, bool(holds(state, committed) and references.difference(engine, state)))
        for engine, state in update.world.usable
        if not (state.gate is Gate.OPEN or state.incarnation in committed.excluded or stumbles(engine))
    ]
    current = sum(engine.open and holds(state, committed) for engine, state in update.world.usable)
    few = sum(odd for _, odd in coming) <= current
    return [engine for engine, odd in coming if not (odd and few)]


def stumbles(engine: Engine) -> bool:
    """Whether something that it was told under this epoch was refused or failed."""
    return engine.guard is not None and engine.guard.setbacks > 0


def close_next(update: Update, committed: Committed, roll: Roll, deadline: Deadline) -> None:
    """Close as many as may be closed now. Who was told already, and has not said so yet, is among them again."""
    world = update.world
    serving = [(engine, state) for engine, state in world.usable if engine.serves(committed)]
    left = [member for member in serving if not holds(member[1], committed)]
    left.sort(key=lambda member: stumbles(member[0]))
    coming = _coming(update, committed)
    count = max(0, min(roll.max_unavailable - len(coming), len(serving) - roll.min_serving))
    for engine, state in left[:count]:
        if busy(state, update.epoch):
            continue
        found = staged(state, update.epoch, committed.version)
        if found is None:  # the epoch rose since: it reads the checkpoint again while it serves
            prepare(update.epoch, engine, state, committed, update.weight_version.spec.deadlines, update.work)
        elif committed.digest in (None, found.digest):
            close(update, engine, state, deadline, version=committed.version)


def _progress(update: Update, committed: Committed, left: list[Engine]) -> Progress:
    told = "" if committed.previous is None else f"may answer from version {committed.previous.version}"
    held_up = [hold_up(engine, Reason.ROLLING, own_words(engine)[1] or told) for engine in left]
    done = sum(holds(state, committed) and engine.open for engine, state in update.world.usable)
    return progress(done, max(done, update.world.fleet.spec.replicas), held_up)


def _later(update: Update, committed: Committed) -> str:
    """Who does not serve the version yet, as the last entry of the history tells."""
    late: list[FailedEngine] = [
        hold_up(engine, Reason.ROLLING, own_words(engine)[1] or "does not serve it yet")
        for engine in update.world.engines
        if not (engine.open and engine.state is not None and holds(engine.state, committed))
    ]
    return f"{len(late)} engines join later: {tell(late[:TOLD])}" if late else ""
