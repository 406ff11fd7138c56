"""How an update ends, and what a failure leads to.

Before weights are touched a failure is simple: everybody reopens on the version before. After that spec.onFailure
decides. Retry goes back to Preparing under a new epoch, on engines that stay closed, with the members that are there
then, after a wait that doubles with each attempt; a push whose tensors are not the model's is not sent again. Rollback,
and Retry after its last attempt, leave the engines to catch up with the committed version from where it is stored. Hold
leaves what was touched as it is; engines that still hold the committed version open again.

The aftermath is recorded in the fleet with the failure, by one write: the WeightVersion may be told later or never.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from rollfleet_operator.api.rolloutengine import Aftermath, Committed, LastFinished, Outcome
from rollfleet_operator.api.weightversion import (
    FailedAttempt,
    FailureType,
    HistoryEntry,
    Phase,
    PhaseSeconds,
    Progress,
    WeightVersionStatus,
)
from rollfleet_operator.core.conditions import clip
from rollfleet_operator.core.moves import Ending, Move, Update, enter, failed
from rollfleet_operator.core.opening import largest_difference
from rollfleet_operator.core.policies import seconds_text
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.steps import source_of
from rollfleet_operator.core.world import holds

HISTORY = 10
MAX_CAUSE = 640  # characters of a cause, so that what follows from it stays within a condition's message
TOUCHED = (Phase.TRANSFERRING, Phase.VERIFYING)
UNDER_WAY = (Phase.PREPARING, Phase.QUIESCING, *TOUCHED)
CLOSED = (Phase.QUIESCING, *TOUCHED, Phase.OPENING)
HELD_UNTIL = "a higher version, a new spec.retryRequest, or the deletion of this WeightVersion"


@dataclass(frozen=True)
class UpdatePlan:
    """What becomes of the WeightVersion in charge. `catch_up_epoch`: None while late joiners must wait."""

    record: Record
    status: WeightVersionStatus | None
    catch_up_epoch: int | None
    reason: str = ""  # what Pending waits for, or why the update failed
    message: str = ""
    rolling: bool = False  # engines that serve the version before the committed one may go on
    held: str = ""  # why nothing is restored after a failure

    @property
    def closed(self) -> bool:
        """Between Quiescing and the end of Opening: pods must not be changed."""
        return self.status is not None and self.status.phase in CLOSED

    @property
    def again(self) -> bool:
        """Another attempt, or a higher version that went straight on: engines stay closed from the one before."""
        return self.under_way and self.status is not None and self.status.last_attempt is not None

    @property
    def under_way(self) -> bool:
        """From Preparing to the commit."""
        return self.status is not None and self.status.phase in UNDER_WAY


def next_epoch(update: Update) -> int:
    """Above all that anybody names."""
    return max(update.record.epoch, update.world.guards_epoch) + 1


def fail(update: Update, move: Move, ending: Ending) -> UpdatePlan:
    """Record the failure. An epoch under which something may have been touched is burnt with the same write."""
    status, policy = update.status, update.weight_version.spec.on_failure
    touching = status.phase in TOUCHED
    touched = touching and not move.untouched
    if touching and status.attempt < policy.attempts and not move.final:
        return _try_again(update, move, ending)
    epoch = next_epoch(update) if touching else update.record.epoch
    ending, aftermath = _with_aftermath(update, ending, touched=touched)
    record = replace(update.record, epoch=epoch, last_finished=last_finished(update, update.version, ending, aftermath))
    told = with_history(update, enter(with_pause(move.status, update.now), Phase.FAILED, update.now), ending)
    held = ending.message if aftermath is Aftermath.HELD else ""
    return UpdatePlan(record, told, None, ending.reason, ending.message, held=held)


def with_pause(status: WeightVersionStatus, now: datetime) -> WeightVersionStatus:
    """The record of an update that ends now, with how long the fleet has been closed by it.

    It may open at once or stay closed for ever: that is the fleet's to tell. What came back to a fleet that serves (an
    attempt that was interrupted before it had touched anything) has paused nothing that is known.
    """
    if status.paused_seconds or not (status.phase in CLOSED or status.last_attempt is not None):
        return status
    return status.model_copy(update={"paused_seconds": seconds_text(status.paused_at, now)})


def _try_again(update: Update, move: Move, ending: Ending) -> UpdatePlan:
    """Back to Preparing, closed. What was measured so far belongs to the attempt that failed."""
    epoch, attempt = next_epoch(update), update.status.attempt
    why = FailedAttempt(attempt=attempt, reason=ending.reason, message=clip(ending.message, MAX_CAUSE))
    status = enter(move.status, Phase.PREPARING, update.now).model_copy(
        update={
            "epoch": epoch,
            "attempt": attempt + 1,
            "prepare_attempt": 0,
            "last_attempt": why,
            "targets": (),
            "digest": "",
            "digest_source": None,
            "sender": None,
            "progress": Progress(),
            "phase_seconds": PhaseSeconds(),
        }
    )
    update.work.note(f"version {update.version}: attempt {attempt} failed by {ending.reason}, goes on under {epoch}")
    return UpdatePlan(replace(update.record, epoch=epoch), status, None)


def _with_aftermath(update: Update, ending: Ending, *, touched: bool) -> tuple[Ending, Aftermath]:
    """What becomes of the fleet, said where the failure is told."""
    status, committed = update.status, update.record.committed
    cause = clip(ending.message, MAX_CAUSE)
    if status.attempt > 1 and status.phase in UNDER_WAY:
        cause = f"attempt {status.attempt}: {cause}"
    version = "the version before" if committed is None else f"version {committed.version}"
    if not touched and status.last_attempt is None:
        return _told(ending, ending.reason, cause, f"no weights were touched, {version} stays"), Aftermath.REOPENED
    if update.weight_version.spec.on_failure.type is FailureType.HOLD:
        text = f"spec.onFailure is Hold: touched engines stay closed until {HELD_UNTIL}"
        return _told(ending, ending.reason, cause, text), Aftermath.HELD
    if _is_lost(update, committed):
        text = f"{version} is stored nowhere: the fleet stays closed until it is given another one"
        return _told(ending, Reason.WEIGHTS_LOST, f"{ending.reason}: {cause}", text), Aftermath.LOST
    return _told(ending, ending.reason, cause, _restored(committed, version)), Aftermath.RESTORED


def _restored(committed: Committed | None, version: str) -> str:
    if committed is not None and source_of(committed) is None:
        return f"engines that hold {version} serve it again, as it is stored nowhere"
    where = "model.path" if committed is None or committed.checkpoint is None else repr(committed.checkpoint)
    return f"{version} is restored from {where}"


def _told(ending: Ending, reason: str, cause: str, aftermath: str) -> Ending:
    return replace(ending, reason=str(reason), message=clip(f"{cause}; {aftermath}" if cause else aftermath))


def _is_lost(update: Update, committed: Committed | None) -> bool:
    if committed is None:
        return True
    # Who was odd at its commit holds it, and never serves it.
    states = [state for _, state in update.world.usable if state.incarnation not in committed.excluded]
    return source_of(committed) is None and not any(holds(state, committed) for state in states)


def stay_failed(update: Update) -> UpdatePlan:
    """Failed for good; the WeightVersion is told if it was not yet."""
    last = finished(update, update.version)
    reason, message = ("", "") if last is None else (last.reason, last.message)
    status = update.status
    if status.phase is not Phase.FAILED or status.version != update.version:
        ending = failed(reason or Reason.UPDATE_FAILED, message)
        status = with_history(update, enter(with_pause(status, update.now), Phase.FAILED, update.now), ending)
        status = status.model_copy(update={"version": update.version})
    holding = update.weight_version.spec.on_failure.type is FailureType.HOLD
    held = message if holding and last is not None and last.aftermath is Aftermath.HELD else ""
    return UpdatePlan(update.record, status, update.record.epoch, reason, message, held=held)


def withdrawn(status: WeightVersionStatus) -> WeightVersionStatus:
    """Of a WeightVersion that leads no fleet: nothing is under way, whatever was."""
    if status.phase in (Phase.ACTIVE, Phase.FAILED):
        return status
    return status.model_copy(update={"phase": Phase.PENDING, "targets": (), "progress": Progress()})


def finished(update: Update, version: int) -> LastFinished | None:
    """The end of this version of this WeightVersion, where it was the newest to end."""
    last = update.record.last_finished
    if last is None or last.version != version or last.weight_version_uid != update.weight_version.metadata.uid:
        return None
    return last


def last_finished(update: Update, version: int, ending: Ending, aftermath: Aftermath | None = None) -> LastFinished:
    """What the fleet remembers of this end."""
    bad = ending.outcome is Outcome.FAILED
    return LastFinished(
        version=version,
        generation=update.weight_version.metadata.generation,
        weight_version_uid=update.weight_version.metadata.uid,
        outcome=ending.outcome,
        reason=ending.reason if bad else "",
        message=ending.message,
        aftermath=aftermath,
        retry_request=update.status.retry_request,
    )


def with_history(update: Update, status: WeightVersionStatus, ending: Ending) -> WeightVersionStatus:
    """The record with one more end."""
    # What an operator before this one began has no step and checkpoint in its record.
    unnamed = status.version in (0, update.version)
    entry = HistoryEntry(
        version=status.version or update.version,
        engine_uid=update.world.fleet.metadata.uid,
        step=status.step or (update.weight_version.spec.step if unnamed else ""),
        checkpoint=status.checkpoint or (update.path if unnamed else ""),
        outcome=ending.outcome,
        digest=status.digest,
        digest_source=status.digest_source,
        time=update.now,
        paused_seconds=status.paused_seconds,
        max_abs_logprob_diff=largest_difference(update) if ending.outcome is Outcome.ACTIVE else "",
        message=ending.message,
    )
    return status.model_copy(update={"history": (*status.history, entry)[-HISTORY:]})
