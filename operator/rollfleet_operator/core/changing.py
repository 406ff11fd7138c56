"""Transferring and Verifying: the targets' weights change behind closed gates, until one write commits.

What is safest and always ends:
- A failure that an engine tells of itself (coverage, digest, cache reset, probe), a probe on which two engines
  disagree, or the deadline fails the update. Its epoch is burnt with the same write, and whoever was touched reloads
  the committed version as a late joiner does. Nothing is committed on the strength of some engines while another says
  that the weights are wrong.
- An engine whose process is gone (another incarnation, a terminated container, a pod that vanished, a dead core) says
  nothing about the weights. It is out of this update and joins later; the others go on. Where none is left the update
  fails.
- An engine that does not answer may be in the middle of anything: it is waited for until the deadline, which fails
  the update.
"""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import FailedEngine, Phase, Target, WeightVersionStatus
from rollfleet_operator.core.moves import Move, Update, failed, hold_up, overdue, progress
from rollfleet_operator.core.policies import Deadline
from rollfleet_operator.core.probes import Disagreement, compare
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.work import busy
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.commands import Command, Transfer, Verify
from rollfleet_protocol.state import EngineState, OperationName, WeightsState

CHANGES = (OperationName.TRANSFER, OperationName.VERIFY)


class Standing(StrEnum):
    """How a target stands in the step that runs."""

    DONE = "Done"
    WORKING = "Working"
    SILENT = "Silent"
    FAILED = "Failed"
    OUT = "Out"


@dataclass(frozen=True)
class Seat:
    """A target and what became of it."""

    target: Target
    engine: Engine | None
    standing: Standing
    reason: str = ""
    text: str = ""


def find_target(update: Update, target: Target) -> tuple[Engine | None, EngineState | None]:
    """The target's engine and state, as long as the process that the update began with may still run."""
    engine = update.world.by_name(target.name)
    if engine is None or engine.ended:
        return None, None
    state = engine.answering
    if state is None and engine.stopped:
        return None, None
    known = state or engine.state
    if known is not None and (known.incarnation != target.incarnation or not known.alive):
        return None, None
    return engine, state


def transfer(update: Update) -> Move:
    """One look at Transferring."""
    seconds = update.weight_version.spec.deadlines.transfer_seconds
    deadline = update.deadline(seconds)
    seats = [_seat(update, target, OperationName.TRANSFER) for target in update.status.targets]
    move = _judge(update, seats, seconds, deadline, "Transferring")
    if move is not None:
        return move
    if all(seat.standing in (Standing.DONE, Standing.OUT) for seat in seats):
        # Verify is given in the pass that records the phase: whoever is Loaded stays so, whatever becomes of the write.
        _verify_all(update, update.weight_version.spec.deadlines.verify_seconds)
        return Move(update.enter(Phase.VERIFYING, _told(update, seats)))
    for seat in seats:
        if seat.standing is Standing.WORKING and seat.engine is not None:
            _give(update, seat, deadline)
    return Move(_told(update, seats))


def verify(update: Update) -> Move:
    """One look at Verifying; the last one commits."""
    seconds = update.weight_version.spec.deadlines.verify_seconds
    deadline = update.deadline(seconds)
    seats = [_seat(update, target, OperationName.VERIFY) for target in update.status.targets]
    move = _judge(update, seats, seconds, deadline, "Verifying")
    if move is not None:
        return move
    if not all(seat.standing in (Standing.DONE, Standing.OUT) for seat in seats):
        _verify_all(update, deadline.left_s(update.now))
        return Move(_told(update, seats))
    probed = [(seat.target.name, state.probe) for seat in seats if (state := _state(seat)) is not None]
    limit = update.weight_version.spec.verify.probe.max_abs_logprob_diff
    apart = compare(probed, Decimal(limit))
    if isinstance(apart, Disagreement):
        return Move(_told(update, seats), failed(Reason.PROBES_DISAGREE, apart.text))
    return Move(update.enter(Phase.OPENING, _told(update, seats)), commit=_commit(update))


def _commit(update: Update) -> Committed:
    return Committed(
        version=update.version,
        digest=update.status.digest,
        checkpoint=update.path,
        weight_version_uid=update.weight_version.metadata.uid,
        time=update.now,
    )


def _state(seat: Seat) -> EngineState | None:
    return seat.engine.state if seat.engine is not None and seat.standing is Standing.DONE else None


def _judge(update: Update, seats: list[Seat], seconds: int, deadline: Deadline, phase: str) -> Move | None:
    """The end of the update, if this is it."""
    told = _told(update, seats)
    broken = next((seat for seat in seats if seat.standing is Standing.FAILED), None)
    if broken is not None:
        return Move(told, failed(broken.reason, f"{broken.target.name}: {broken.text}"))
    if all(seat.standing is Standing.OUT for seat in seats):
        return Move(told, failed(Reason.ENGINES_LOST, f"{phase}: every engine of the update restarted or vanished"))
    finished = all(seat.standing in (Standing.DONE, Standing.OUT) for seat in seats)
    if deadline.passed(update.now) and not finished:
        return Move(told, overdue(phase, seconds, _held_up(seats)))
    return None


def _seat(update: Update, target: Target, step: OperationName) -> Seat:
    engine, state = find_target(update, target)
    if engine is None:
        return Seat(target, None, Standing.OUT)
    if state is None:
        return Seat(target, engine, Standing.SILENT, Reason.ENGINE_UNREACHABLE, _error(engine))
    return _standing(update, target, engine, state, step)


def _standing(update: Update, target: Target, engine: Engine, state: EngineState, step: OperationName) -> Seat:
    weights, operation = state.weights, state.operation
    failure = None if operation is None or operation.epoch != update.epoch else operation.failure
    if operation is not None and failure is not None and operation.name in CHANGES:
        return Seat(target, engine, Standing.FAILED, failure.reason.value, failure.message)
    if step is OperationName.VERIFY and weights.state is WeightsState.UNCERTAIN:
        return Seat(target, engine, Standing.FAILED, "Uncertain", "the guard no longer knows what the engine holds")
    if weights.state in (WeightsState.LOADED, WeightsState.VERIFIED) and weights.version == update.version:
        if weights.digest != update.status.digest:
            text = f"holds {weights.digest}, staged was {update.status.digest}"
            return Seat(target, engine, Standing.FAILED, Reason.DIGEST_DISAGREES, text)
        probed = state.probe is not None and (state.probe.epoch, state.probe.version) == (update.epoch, update.version)
        if step is OperationName.TRANSFER or (weights.state is WeightsState.VERIFIED and probed):
            return Seat(target, engine, Standing.DONE)
    doing = Reason.TRANSFERRING if step is OperationName.TRANSFER else Reason.VERIFYING
    return Seat(target, engine, Standing.WORKING, doing, _doing(engine))


def _error(engine: Engine) -> str:
    return f"does not answer: {engine.guard.error if engine.guard else ''}".rstrip(": ")


def _doing(engine: Engine) -> str:
    running = engine.running()
    refusals = () if engine.guard is None else engine.guard.refusals
    if running is None and refusals:
        return f"{refusals[-1][0]} was refused: {refusals[-1][1]}"
    return "has not finished" if running is None else f"{running.name} is running {running.progress}".rstrip()


def _held_up(seats: list[Seat]) -> list[FailedEngine]:
    waiting = (Standing.WORKING, Standing.SILENT)
    return [
        hold_up(seat.engine, seat.reason, seat.text)
        for seat in seats
        if seat.standing in waiting and seat.engine is not None
    ]


def _told(update: Update, seats: list[Seat]) -> WeightVersionStatus:
    done = sum(seat.standing is Standing.DONE for seat in seats)
    total = sum(seat.standing is not Standing.OUT for seat in seats)
    silent = [
        hold_up(seat.engine, seat.reason, seat.text)
        for seat in seats
        if seat.standing in (Standing.SILENT, Standing.FAILED) and seat.engine is not None
    ]
    return update.status.model_copy(update={"progress": progress(done, total, silent)})


def _give(update: Update, seat: Seat, deadline: Deadline) -> None:
    engine, state = find_target(update, seat.target)
    if engine is None or state is None or busy(state, update.epoch):
        return
    command: Command = Transfer(
        incarnation=state.incarnation,
        epoch=update.epoch,
        version=update.version,
        digest=update.status.digest,
        deadline_seconds=deadline.left_s(update.now),
    )
    update.work.give(engine, command)


def _verify_all(update: Update, seconds: float) -> None:
    """Whoever is Loaded resets its caches and answers the probe."""
    for target in update.status.targets:
        engine, state = find_target(update, target)
        if engine is None or state is None or busy(state, update.epoch):
            continue
        if (
            state.probe is not None
            and state.probe.epoch == update.epoch
            and state.weights.state is WeightsState.VERIFIED
        ):
            continue
        command = Verify(
            incarnation=state.incarnation,
            epoch=update.epoch,
            version=update.version,
            digest=update.status.digest,
            probe_tokens=update.weight_version.spec.verify.probe.tokens,
            deadline_seconds=seconds,
        )
        update.work.give(engine, command)
