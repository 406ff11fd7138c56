"""Preparing a push: all that can be known before the pause of weights that only a trainer holds.

Engines get no command: they serve, and late joiners go on catching up under the epoch before, until a trainer stands
ready with exactly this version. Who does not serve is fed by the push as well: it takes part if it can.

After an attempt that touched weights all engines stay closed. They are told the new epoch at once, so that nothing of a
trainer that was given up is taken any more, and wait here for one that offers the version.
"""

from rollfleet_operator.api.weightversion import FailedEngine, Phase
from rollfleet_operator.core.fitness import never, unfit
from rollfleet_operator.core.moves import Move, Update, close, failed, hold_up, overdue, progress, quiet
from rollfleet_operator.core.policies import Deadline, attempt_begins
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.sender import offer
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.state import EngineState

Member = tuple[Engine, EngineState]


def receivers(update: Update) -> tuple[Member, ...]:
    """Who takes part in a push, in the order of their ranks: all that can."""
    return tuple(pair for pair in update.world.usable if not unfit(update, pair[1])[0])


def prepare_push(update: Update) -> Move:
    """One look at Preparing."""
    seconds = update.weight_version.spec.deadlines.prepare_seconds
    deadline = update.deadline(seconds)
    again = update.status.last_attempt is not None
    if again:
        _tell_epoch(update, deadline)
    members, held_up, found = receivers(update), _held_up(update), offer(update)
    ending = never(update)
    if ending is not None:
        told = progress(len(members), len(members), held_up)
        return Move(update.status.model_copy(update={"progress": told}), ending)
    begins = attempt_begins(update.status, update.phase_began, seconds)
    if update.now < begins:
        update.work.wake(begins)
    elif not held_up and found.ready and len(members) >= update.least:
        status = update.status.model_copy(update={"sender": found.sender, "digest": "", "digest_source": None})
        return Move(update.enter(Phase.QUIESCING, status))
    if deadline.passed(update.now):
        if held_up:
            return Move(update.status, overdue("Preparing", seconds, held_up))
        if len(members) < update.least:
            return Move(update.status, failed(Reason.TOO_FEW_ENGINES, update.too_few(len(members))))
        return Move(update.status, failed(Reason.SENDER_MISSING, f"within {seconds} s: {found.lacks}"))
    status = update.status.model_copy(update={"progress": progress(len(members), len(members), held_up)})
    text = f"{found.lacks}; it is waited for, up to {seconds} s (spec.deadlines.prepareSeconds)" if found.lacks else ""
    return Move(
        status,
        catch_up_epoch=None if again else update.epoch - 1,
        reason=Reason.SENDER_MISSING if text else "",
        message=text,
    )


def _tell_epoch(update: Update, deadline: Deadline) -> None:
    for engine, state in update.world.usable:
        if not quiet(engine, state, update.epoch):
            close(update, engine, state, deadline)


def _held_up(update: Update) -> list[FailedEngine]:
    """Who serves, or may serve, and could not take the push. Others that cannot are left out of it, and stay closed."""
    serving = [(each, state) for each, state in update.world.usable if each.serves(update.record.committed)]
    broken = [hold_up(engine, *found) for engine, state in serving if (found := unfit(update, state))[0]]
    return broken + [
        hold_up(engine, Reason.ENGINE_UNREACHABLE, f"does not answer: {engine.guard.error if engine.guard else ''}")
        for engine in update.world.engines
        if engine.answering is None and not engine.stopped and not engine.pod.vanished
    ]
