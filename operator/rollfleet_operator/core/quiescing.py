"""Quiescing: every gate closes, what is in flight ends, all are armed; then the targets are recorded.

No transfer begins before each engine that may be open is closed under this epoch by its guard's own word, or has no
process by the API server's. Once the targets are recorded this needs no second look: guards refuse what was sent
under older epochs, the armed ones reopen on our word only, and no Open of this epoch is sent before the commit.

An engine that can't pause ends the update at once, the deadline ends it at last; both reopen the version before. An
engine that restarts meanwhile has forgotten what it staged: it is born closed and joins after the commit.
"""

from rollfleet_operator.api.weightversion import FailedEngine, Phase, Target, WeightVersionStatus
from rollfleet_operator.core.moves import (
    Move,
    Update,
    arm,
    close,
    failed,
    hold_up,
    overdue,
    progress,
    put_aside,
    quiet,
)
from rollfleet_operator.core.policies import Deadline
from rollfleet_operator.core.preparing import staged
from rollfleet_operator.core.preparing_push import receivers
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.rolling import first_batch
from rollfleet_operator.core.sender import loss
from rollfleet_operator.core.topology import place
from rollfleet_operator.core.work import failed_operation
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.state import EngineState, Gate, OperationName

CONTROL_PORT = 8001

Candidate = tuple[Engine, EngineState]


def quiesce(update: Update) -> Move:  # noqa: PLR0911 - one answer per case
    """One look at Quiescing."""
    seconds = update.weight_version.spec.deadlines.quiesce_seconds
    deadline = update.deadline(seconds)
    if update.pushed and (lost := loss(update)):
        return Move(update.status, failed(Reason.SENDER_LOST, lost))
    candidates = _candidates(update)
    if not candidates and not _awaited(update):
        return Move(update.status, failed(Reason.ENGINES_LOST, "no engine that staged the version is left"))
    enough = len(candidates) >= update.least
    if not enough and not _awaited(update):
        return Move(update.status, failed(Reason.TOO_FEW_ENGINES, update.too_few(len(candidates))))
    for engine, state in candidates:
        broken = failed_operation(state, OperationName.CLOSE, update.epoch, update.version)
        if broken is not None and broken.failure is not None:
            text = f"{engine.name}: {broken.failure.message}"
            return Move(update.status, failed(broken.failure.reason.value, text))
    staying = _staying(update, candidates)
    candidates = first_batch(update, candidates)
    loud = _close_all(update, candidates, deadline, staying)
    unarmed = [] if loud else _arm_all(update, candidates)
    status = _seen_closed(update, candidates)
    status = status.model_copy(
        update={"progress": progress(len(candidates) - len(loud or unarmed), len(candidates), loud or unarmed)}
    )
    if not loud and not unarmed and enough:
        frozen = update.enter(Phase.TRANSFERRING, status)
        return Move(
            frozen.model_copy(
                update={
                    "targets": _targets(candidates),
                    "progress": progress(0, len(candidates), []),
                    "closed_epoch": 0 if update.rolls else update.status.closed_epoch or update.epoch,
                }
            )
        )
    if deadline.passed(update.now):
        if not enough and not (loud or unarmed):
            return Move(status, failed(Reason.TOO_FEW_ENGINES, update.too_few(len(candidates))))
        return Move(status, overdue("Quiescing", seconds, loud or unarmed))
    return Move(status)


def _candidates(update: Update) -> tuple[Candidate, ...]:
    """Engines that staged this update's version and can take part, in the order of their ranks."""
    if update.pushed:
        return receivers(update)
    return tuple(
        (engine, state)
        for engine, state in update.world.usable
        if (found := staged(state, update.epoch, update.version)) and found.digest == update.status.digest
    )


def _staying(update: Update, candidates: tuple[Candidate, ...]) -> set[str]:
    """Who is not put aside: those that take part, and in a roll also who serves; their batch comes after the commit."""
    serving = (engine for engine in update.world.engines if update.rolls and engine.serves(update.record.committed))
    return {engine.name for engine, _ in candidates} | {engine.name for engine in serving}


def _awaited(update: Update) -> bool:
    """Whether an engine that does not answer now may still hold what it staged."""
    return any(
        engine.answering is None
        and not (engine.stopped or engine.pod.vanished)
        and (update.pushed or engine.state is None or staged(engine.state, update.epoch, update.version) is not None)
        for engine in update.world.engines
    )


def _close_all(
    update: Update, candidates: tuple[Candidate, ...], deadline: Deadline, staying: set[str]
) -> list[FailedEngine]:
    """Who is not closed and drained yet. `staying`: those that are not put aside."""
    loud: list[FailedEngine] = []
    for engine, state in candidates:
        if not quiet(engine, state, update.epoch):
            close(update, engine, state, deadline)
            text = f"gate {state.gate.value}, {state.in_flight} requests in flight"
            loud.append(hold_up(engine, Reason.QUIESCING, text))
    others = [engine for engine in update.world.engines if engine.name not in staying]
    found = [put_aside(update, engine, deadline) for engine in others]
    return loud + [each for each in found if each is not None]


def _arm_all(update: Update, candidates: tuple[Candidate, ...]) -> list[FailedEngine]:
    unarmed: list[FailedEngine] = []
    for engine, state in candidates:
        if not state.armed:
            arm(update, engine, state)
            unarmed.append(hold_up(engine, Reason.QUIESCING, "is being armed"))
    return unarmed


def _seen_closed(update: Update, candidates: tuple[Candidate, ...]) -> WeightVersionStatus:
    """The record, with the time at which the first gate was seen closed."""
    status = update.status
    if update.rolls:
        return status
    if status.paused_at is None and any(state.gate is Gate.CLOSED for _, state in candidates):
        return status.model_copy(update={"paused_at": update.now})
    return status


def _targets(candidates: tuple[Candidate, ...]) -> tuple[Target, ...]:
    places = place((engine.name, state.facts.world_size) for engine, state in candidates)
    return tuple(
        Target(
            name=engine.name,
            pod_uid=engine.pod.uid,
            incarnation=state.incarnation,
            url=f"https://{engine.pod.ip}:{CONTROL_PORT}",
            rank_offset=each.rank_offset,
            world_size=each.world_size,
        )
        for (engine, state), each in zip(candidates, places, strict=True)
    )
