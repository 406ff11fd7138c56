"""Preparing: all that can fail without touching the fleet.

Who takes part: the engines that serve now; where none serves (after a failed update, or a lost record), all that can.
Engines that join later may go on catching up meanwhile under the epoch before this one; as soon as all participants
have staged the same digest, everybody else is put aside: closed, and told this epoch, so that no command of an older
epoch that is still on its way can open it. That takes the place of waiting for them: a joiner never holds a pause up.

Who takes part must be at least spec.minServing engines; they are waited for. A failed try is repeated after 1, 3, 7,
15, 31, 61 ... s from the phase's start until prepareSeconds are over. A digest on which two engines disagree ends the
update at once: it doesn't get better by reading again what others read differently. So does what no engine of the
fleet can take, as all of them are.

An attempt after one that touched weights and failed waits a while before it begins: what failed at once would fail at
once again. Nobody waits where a higher version went straight on.
"""

from datetime import datetime

from rollfleet_operator.api.weightversion import FailedEngine, Phase, WeightVersionStatus
from rollfleet_operator.core.fitness import never, unfit
from rollfleet_operator.core.moves import (
    Move,
    Update,
    failed,
    hold_up,
    overdue,
    progress,
    put_aside,
)
from rollfleet_operator.core.policies import Deadline, attempt_begins, retry_at
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.work import busy, failed_operation
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.commands import CheckpointSource, Prepare
from rollfleet_protocol.state import DigestSource, EngineState, FailureReason, OperationName, Staged

OWN_FAILURES = frozenset(reason.value for reason in FailureReason)

Member = tuple[Engine, EngineState]


def participants(update: Update) -> tuple[Member, ...]:
    """Who must stage before anything is closed."""
    usable = update.world.usable
    serving = tuple(pair for pair in usable if pair[0].serves(update.record.committed))
    return serving or usable


def staged(state: EngineState, epoch: int, version: int) -> Staged | None:
    """What was staged for this update."""
    found = state.staged
    return found if found is not None and (found.epoch, found.version) == (epoch, version) else None


def prepare(update: Update) -> Move:  # noqa: PLR0911 - one answer per case
    """One look at Preparing."""
    seconds = update.weight_version.spec.deadlines.prepare_seconds
    deadline = update.deadline(seconds)
    members = participants(update)
    ready = [(engine, found) for engine, state in members if (found := staged(state, update.epoch, update.version))]
    disagreement = _disagreement(ready)
    if disagreement is not None:
        return Move(update.status, failed(Reason.DIGEST_DISAGREES, disagreement))
    ending = never(update)
    if ending is not None:
        return Move(_told(update, members, ready), ending)
    if deadline.passed(update.now):
        held_up = _held_up(update, members) or _put_others_aside(update, members, deadline)
        if not held_up and len(members) < update.least:
            return Move(update.status, failed(Reason.TOO_FEW_ENGINES, update.too_few(len(members))))
        return Move(update.status, overdue("Preparing", seconds, held_up))
    if len(members) >= update.least and len(ready) == len(members):
        return _all_staged(update, members, ready[0][1].digest, deadline)
    begins = attempt_begins(update.status, update.phase_began, seconds)
    joiners = None if len(members) == len(update.world.usable) else update.epoch - 1
    if update.now < begins:
        update.work.wake(begins)
        return Move(update.status, catch_up_epoch=joiners)
    attempt = _stage(update, members, deadline, begins)
    status = _told(update, members, ready).model_copy(update={"prepare_attempt": attempt})
    return Move(status, catch_up_epoch=joiners)


def _told(update: Update, members: tuple[Member, ...], ready: list[tuple[Engine, Staged]]) -> WeightVersionStatus:
    found = progress(len(ready), len(members), _held_up(update, members))
    return update.status.model_copy(update={"progress": found})


def _disagreement(ready: list[tuple[Engine, Staged]]) -> str | None:
    """Two engines that read different bytes."""
    for engine, found in ready[1:]:
        first, expected = ready[0]
        if found.digest != expected.digest:
            return f"{first.name} read {expected.digest} from {found.path!r}, {engine.name} read {found.digest}"
    return None


def _all_staged(update: Update, members: tuple[Member, ...], digest: str, deadline: Deadline) -> Move:
    held_up = _put_others_aside(update, members, deadline)
    status = update.status.model_copy(
        update={
            "digest": digest,
            "digest_source": DigestSource.CHECKPOINT,
            "progress": progress(len(members), len(members), held_up),
        }
    )
    if held_up:
        return Move(status)
    return Move(update.enter(Phase.QUIESCING, status))


def _put_others_aside(update: Update, members: tuple[Member, ...], deadline: Deadline) -> list[FailedEngine]:
    names = {engine.name for engine, _ in members}
    others = [engine for engine in update.world.engines if engine.name not in names]
    found = [put_aside(update, engine, deadline) for engine in others]
    return [each for each in found if each is not None]


def _stage(update: Update, members: tuple[Member, ...], deadline: Deadline, begins: datetime) -> int:
    """Give Prepare to whoever has not staged; the number of the attempt."""
    attempt = max(update.status.prepare_attempt, 1)
    due = retry_at(begins, attempt)
    again = False
    for engine, state in members:
        if staged(state, update.epoch, update.version) or busy(state, update.epoch) or unfit(update, state)[0]:
            continue
        failure = failed_operation(state, OperationName.PREPARE, update.epoch, update.version)
        if failure is None:
            update.work.give(engine, _command(update, state, deadline))
        elif update.now < due:
            update.work.wake(due)
        else:
            again = update.work.give(engine, _command(update, state, deadline), at_once=True)
    if again:
        update.work.note(f"version {update.version}: Preparing is tried the {attempt + 1}. time")
    return attempt + 1 if again else attempt


def _command(update: Update, state: EngineState, deadline: Deadline) -> Prepare:
    return Prepare(
        incarnation=state.incarnation,
        epoch=update.epoch,
        version=update.version,
        source=CheckpointSource(path=update.path),
        deadline_seconds=deadline.left_s(update.now),
    )


def _failed_before(update: Update) -> dict[str, FailedEngine]:
    """What engines said when they failed in this phase: it holds while they try again."""
    told = update.status.progress.failed if update.status.prepare_attempt > 1 else ()
    return {each.name: each for each in told if each.reason in OWN_FAILURES}


def _held_up(update: Update, members: tuple[Member, ...]) -> list[FailedEngine]:
    """Failures first: they are what a person must cure, also while it is tried again."""
    before = _failed_before(update)
    broken: list[FailedEngine] = []
    slow: list[FailedEngine] = []
    for engine, state in members:
        if staged(state, update.epoch, update.version):
            continue
        failure = failed_operation(state, OperationName.PREPARE, update.epoch, update.version)
        refusals = () if engine.guard is None else engine.guard.refusals
        reason, text = unfit(update, state)
        if reason:
            broken.append(hold_up(engine, reason, text))
        elif failure is not None and failure.failure is not None:
            broken.append(hold_up(engine, failure.failure.reason.value, failure.failure.message))
        elif refusals and refusals[-1][0] == "Prepare":
            broken.append(hold_up(engine, Reason.REFUSED, refusals[-1][1]))
        elif engine.name in before:
            broken.append(before[engine.name])
        else:
            slow.append(hold_up(engine, Reason.PREPARING, "is still reading and checking the checkpoint"))
    unreachable = [
        hold_up(engine, Reason.ENGINE_UNREACHABLE, f"does not answer: {engine.guard.error if engine.guard else ''}")
        for engine in update.world.engines
        if engine.answering is None and not engine.stopped and not engine.pod.vanished
    ]
    return broken + unreachable + slow
