"""The life of an update: which phase it is in, how it begins and ends, what is recorded.

Recorded is what cannot be derived: epoch, attempt, startedAt, the phase with its start, pausedAt, targets and digest
in the WeightVersion; epoch, committed and lastFinished in the fleet. A phase is recorded before the first command of
its kind is given, so an operator that comes back finds nobody further than the record says. (Verify is the exception:
whoever is Loaded stays Loaded under the record of Transferring.) The record counts only while its epoch is the
fleet's.

Pending ends by itself too. An update waits in it for a fleet that cannot take it yet: no replicas, no engine up,
engines that an earlier update closed and that reopen first. That may last prepareSeconds; for a fleet that has not
verified its first version, whose engines are still loading, startup.timeoutSeconds are added. A new fleet commits and
opens version 0 even if a WeightVersion waits already: its users get answers minutes earlier, and a failed update has
something to fall back to.
"""

from dataclasses import replace

from rollfleet_operator.api.meta import ConditionStatus
from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import (
    FailedAttempt,
    Phase,
    PhaseSeconds,
    Progress,
    WeightVersion,
    WeightVersionStatus,
)
from rollfleet_operator.core.changing import transfer, verify
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.copies import name_stored, stored_since, with_copy, with_stored
from rollfleet_operator.core.ending import (
    TOUCHED,
    UNDER_WAY,
    UpdatePlan,
    fail,
    finished,
    last_finished,
    next_epoch,
    stay_failed,
    with_history,
    with_pause,
    withdrawn,
)
from rollfleet_operator.core.moves import Ending, Move, Update, enter, failed, with_record
from rollfleet_operator.core.opening import opening
from rollfleet_operator.core.policies import REOPENING_S, Deadline, seconds_text
from rollfleet_operator.core.preparing import prepare
from rollfleet_operator.core.preparing_push import prepare_push
from rollfleet_operator.core.quiescing import quiesce
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.rolling import behind, close_next, roll_of, roll_seconds
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import World, holds

STEPS = {Phase.PREPARING: prepare, Phase.QUIESCING: quiesce, Phase.TRANSFERRING: transfer, Phase.VERIFYING: verify}


def plan_weights(
    world: World, record: Record, weight_version: WeightVersion | None, work: Work, *, first: bool, accepted: bool
) -> UpdatePlan:
    """One look at the update. `first`: the fleet has not verified its first version yet."""
    if weight_version is None:
        return UpdatePlan(record, None, record.epoch)
    update = with_stored(Update(world, record, weight_version, work))
    found = _look(update, first=first, accepted=accepted)
    if found.status is None:
        return found
    return replace(found, status=name_stored(update, found.record.committed, found.status))


def _look(update: Update, *, first: bool, accepted: bool) -> UpdatePlan:  # noqa: PLR0911 - one answer per case
    if _is_superseded(update):
        update = _supersede(update, accepted=accepted)
        if update.status.phase in UNDER_WAY:
            return UpdatePlan(update.record, update.status, None)
    if not accepted:
        return UpdatePlan(update.record, withdrawn(update.status), update.record.epoch)
    if _is_committed(update):
        return _open_up(update)
    if _has_failed(update):
        return stay_failed(update)
    if _counts(update):
        return _step(update)
    if _was_active_before_the_loss(update, first=first):
        text = "the fleet's record is lost, and nobody can tell what it served: its own conditions say how to decide"
        return UpdatePlan(update.record, update.status, update.record.epoch, Reason.COMMIT_UNKNOWN, text)
    return _wait_or_begin(update, first=first)


def _is_committed(update: Update) -> bool:
    committed = update.record.committed
    if committed is None or committed.version != update.version:
        return False
    return committed.weight_version_uid == update.weight_version.metadata.uid


def _has_failed(update: Update) -> bool:
    """After Failed only a higher version or a new spec.retryRequest starts work."""
    last, status = finished(update, update.version), update.status
    if last is not None:
        return last.outcome is Outcome.FAILED and not _retries(update, last.retry_request)
    told = (status.version, status.phase) == (update.version, Phase.FAILED) and _on_this_fleet(update)
    return told and not _retries(update, status.retry_request)


def _retries(update: Update, handled: str) -> bool:
    """A request that was not followed yet, or one that is being followed now, even if it was withdrawn meanwhile."""
    if update.weight_version.spec.retry_request not in ("", handled):
        return True
    return update.status.retry_request != handled and _counts(update)


def _counts(update: Update) -> bool:
    """Whether the record speaks of the update that is asked for, under the epoch that counts, on this very fleet."""
    status = update.status
    same = (status.version, status.epoch) == (update.version, update.record.epoch)
    return same and _on_this_fleet(update) and status.phase in UNDER_WAY


def _was_active_before_the_loss(update: Update, *, first: bool) -> bool:
    """The fleet's record is lost and this version was active: only a higher one decides."""
    status = update.status
    lost = update.record.committed is None and not first
    return lost and (status.version, status.phase) == (update.version, Phase.ACTIVE)


def _is_superseded(update: Update) -> bool:
    status = update.status
    if status.version in (0, update.version) or status.phase not in (Phase.PENDING, *UNDER_WAY, Phase.OPENING):
        return False
    return status.started_at is not None


def _supersede(update: Update, *, accepted: bool) -> Update:
    """A higher version was asked for in mid-update. What was committed meanwhile has succeeded all the same.

    Untouched: what was closed reopens first, in Pending. Touched: straight on to the newer one, on closed engines.
    """
    old, committed = update.status, update.record.committed
    succeeded = committed is not None and (committed.version, committed.weight_version_uid) == (
        old.version,
        update.weight_version.metadata.uid,
    )
    outcome = Outcome.ACTIVE if succeeded else Outcome.SUPERSEDED
    last = finished(update, old.version) or last_finished(update, old.version, Ending(outcome, outcome.value))
    message = "" if succeeded else f"version {update.version} was asked for"
    status = with_history(update, with_pause(old, update.now), Ending(outcome, outcome.value, message))
    ever = _has_touched(old) and last.outcome is Outcome.SUPERSEDED and _on_this_fleet(update)
    touched = ever and old.epoch == update.record.epoch
    record = replace(update.record, last_finished=last)
    begun = _blank(update, status)
    if ever:
        why = FailedAttempt(attempt=0, reason=Reason.SUPERSEDED, message=f"version {old.version} had touched weights")
        begun = begun.model_copy(update={"last_attempt": why})
    if not (touched and accepted):
        if touched:
            record = replace(record, epoch=next_epoch(update))
        return with_record(replace(update, record=record), begun)
    epoch = next_epoch(update)
    begun = enter(begun, Phase.PREPARING, update.now)
    begun = begun.model_copy(
        update={"epoch": epoch, "attempt": 1, "closed_epoch": old.closed_epoch, "paused_at": update.now}
    )
    return with_record(replace(update, record=replace(record, epoch=epoch)), begun)


def _has_touched(status: WeightVersionStatus) -> bool:
    """Whether engines may hold other weights than the committed ones by this update, in this attempt or before."""
    return status.phase in TOUCHED or (status.phase in UNDER_WAY and status.last_attempt is not None)


def _blank(update: Update, status: WeightVersionStatus) -> WeightVersionStatus:
    """The record of an update that begins now; history and conditions stay."""
    return status.model_copy(
        update={
            "phase": Phase.PENDING,
            "version": update.version,
            "engine_uid": update.world.fleet.metadata.uid,
            "step": update.weight_version.spec.step,
            "checkpoint": update.path,
            "epoch": 0,
            "attempt": 0,
            "prepare_attempt": 0,
            "last_attempt": None,
            "closed_epoch": 0,
            "retry_request": update.weight_version.spec.retry_request,
            "started_at": update.now,
            "phase_started_at": update.now,
            "paused_at": None,
            "targets": (),
            "progress": Progress(),
            "digest": "",
            "digest_source": None,
            "sender": None,
            "phase_seconds": PhaseSeconds(),
            "paused_seconds": "",
        }
    )


def _step(update: Update) -> UpdatePlan:
    pushed = update.pushed and update.status.phase is Phase.PREPARING
    move = prepare_push(update) if pushed else STEPS[update.status.phase](update)
    if move.ending is not None:
        return fail(update, move, move.ending)
    record = update.record if move.commit is None else replace(update.record, committed=move.commit)
    return UpdatePlan(record, move.status, move.catch_up_epoch, move.reason, move.message)


def _open_up(update: Update) -> UpdatePlan:
    """Committed: open, then Active. Who is active already stays so."""
    record, status = update.record, update.status
    stored = stored_since(update)
    if stored is not None:
        return UpdatePlan(replace(record, committed=stored), with_copy(status, update.version, update.path), None)
    done = status.phase is Phase.ACTIVE and status.version == update.version
    if not done:
        if status.version != update.version:  # the record was lost, or the commit was found again
            update = with_record(update, _blank(update, status))
        move = opening(update)
        status = move.status
        if move.ending is not None:
            status = _active(update, status, move.ending)
            record = replace(record, last_finished=last_finished(update, update.version, move.ending))
        return UpdatePlan(record, status, record.epoch, rolling=move.rolling)
    return UpdatePlan(record, status, record.epoch)


def _active(update: Update, status: WeightVersionStatus, ending: Ending) -> WeightVersionStatus:
    committed = update.record.committed
    digest = status.digest or (committed.digest if committed else None) or ""
    paused = seconds_text(status.paused_at, update.now)
    told = enter(status, Phase.ACTIVE, update.now).model_copy(update={"paused_seconds": paused, "digest": digest})
    return with_history(update, told, ending)


def _wait_or_begin(update: Update, *, first: bool) -> UpdatePlan:
    status = update.status
    waits = status.version == update.version and status.phase is Phase.PENDING and _was_accepted(status)
    stale = status.version == update.version and status.phase in UNDER_WAY and _on_this_fleet(update)
    if stale:
        update = with_record(update, _interrupted(status))
    elif not waits:
        update = with_record(update, _blank(update, status))
    reason, message = _obstacle(update, first=first)
    if reason is not None:
        return _wait(update, reason, message, first=first, stale=stale)
    return _begin(update)


def _was_accepted(status: WeightVersionStatus) -> bool:
    """Whether it has waited since it was last seen; else what is on record is of an update that was withdrawn."""
    accepted = find(status.conditions, "Accepted")
    return status.started_at is not None and accepted is not None and accepted.status is ConditionStatus.TRUE


def _interrupted(status: WeightVersionStatus) -> WeightVersionStatus:
    """The record of an attempt whose epoch was raised over it, with what the next one must know.

    The write that ended it may have been an operator's last, with the reason on its way to the WeightVersion.
    """
    if not _has_touched(status):
        return status
    text = f"its epoch {status.epoch} ended in {status.phase.value}, and why is not on record"
    why = FailedAttempt(attempt=status.attempt, reason=Reason.INTERRUPTED, message=text)
    return status.model_copy(update={"last_attempt": why})


def _on_this_fleet(update: Update) -> bool:
    return update.world.is_of_this_fleet(update.status.engine_uid, update.status.started_at)


def _obstacle(update: Update, *, first: bool) -> tuple[Reason | None, str]:  # noqa: PLR0911 - one answer per case
    """What an update must wait for before it can begin."""
    world, committed = update.world, update.record.committed
    if world.fleet.spec.replicas == 0:
        return Reason.SCALED_TO_ZERO, "spec.replicas of the RolloutEngine is 0: no engine can hold a version"
    if first:
        return Reason.WAITING_FOR_FLEET, ""
    if not world.usable:
        return Reason.NO_ENGINES, ""
    if committed is not None and committed.previous is not None:
        version = committed.previous.version
        names = ", ".join(engine.name for engine in behind(world, committed, update.record.epoch)[:3])
        return Reason.ROLLING, f"{names} may still answer from version {version}"
    if len(world.usable) < update.least:
        return Reason.TOO_FEW_ENGINES, update.too_few(len(world.usable))
    excluded = () if committed is None else committed.excluded
    closed = [
        engine.name
        for engine, state in world.usable
        if holds(state, committed) and not engine.open and state.incarnation not in excluded
    ]
    if closed and not update.deadline(REOPENING_S).passed(update.now):
        return Reason.REOPENING, f"{', '.join(closed[:3])} must open first"
    return None, ""


def _wait(update: Update, reason: Reason, message: str, *, first: bool, stale: bool) -> UpdatePlan:
    if stale:
        update = with_record(update, enter(update.status, Phase.PENDING, update.now))
    seconds = update.weight_version.spec.deadlines.prepare_seconds
    if first and update.world.fleet.spec.replicas > 0:
        seconds += update.world.fleet.spec.startup.timeout_seconds
    if reason is Reason.ROLLING:
        seconds += roll_seconds(update.weight_version, update.world.fleet.spec.replicas)
    deadline = update.deadline(seconds)
    text = message or reason.sentence
    if deadline.passed(update.now):
        ending = failed(reason, f"the update could not begin within {seconds} s: {text}")
        plan = fail(update, Move(update.status), ending)
        return replace(plan, catch_up_epoch=plan.record.epoch)
    rolling = reason is Reason.ROLLING and _roll_on(update, deadline)
    return UpdatePlan(update.record, update.status, update.record.epoch, reason, text, rolling)


def _roll_on(update: Update, deadline: Deadline) -> bool:
    """A newer version waits for the one before it to roll out: batch by batch, if it shall roll itself."""
    roll, committed = roll_of(update.weight_version), update.record.committed
    if roll is None or committed is None:
        return False
    under = with_record(update, update.status.model_copy(update={"epoch": update.record.epoch}))
    close_next(under, committed, roll, deadline)
    return True


def _begin(update: Update) -> UpdatePlan:
    """Allot an epoch: written with the fleet, used when the write is seen."""
    epoch = next_epoch(update)
    status = enter(update.status, Phase.PREPARING, update.now)
    begun = {
        "epoch": epoch,
        "attempt": status.attempt + 1,
        "prepare_attempt": 0,
        "targets": (),
        "sender": None,  # of an attempt that was interrupted: it was chosen for that one only
        "digest": "",
        "digest_source": None,
        "paused_at": None,
        "closed_epoch": 0,
    }
    status = status.model_copy(update=begun)
    update.work.note(f"version {update.version}: begins under epoch {epoch}")
    return UpdatePlan(replace(update.record, epoch=epoch), status, None)
