"""Transferring and Verifying: the targets' weights change behind closed gates, until one write commits.

What is safest and always ends:
- What fails everywhere, or may have spoilt others, fails the update: a transfer that broke or did not end, a deadline,
  fewer engines left than spec.minServing, probes among which no majority agrees. Its epoch is burnt with the same
  write; spec.onFailure says what follows.
- A check that one engine fails while others pass it over the same bytes (coverage, digest, cache reset, probe) is that
  engine's own: it is out of this update and stays closed. A process that answers the probe unlike the majority holds
  weights that its guard calls verified, so the commit itself names it as excluded.
- An engine whose process is gone (another incarnation, a terminated container, a pod that vanished, a dead core) says
  nothing about the weights. It is out of this update and joins later; the others go on.
- An engine that does not answer may be in the middle of anything: it is waited for until the deadline, which fails
  the update.
"""

from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum

from rollfleet_operator.api.rolloutengine import Committed, Previous
from rollfleet_operator.api.weightversion import FailedEngine, Phase, StrategyType, Target, WeightVersionStatus
from rollfleet_operator.core.moves import Move, Update, failed, hold_up, in_short, overdue, progress, with_record
from rollfleet_operator.core.policies import Deadline
from rollfleet_operator.core.probes import MAX_EXCLUDED, Disagreement, agree, unlike
from rollfleet_operator.core.pushing import is_untouched, push_command, with_digest
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.references import to_record
from rollfleet_operator.core.sender import loss
from rollfleet_operator.core.work import busy
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.commands import Command, Transfer, Verify
from rollfleet_protocol.state import (
    DigestSource,
    EngineState,
    FailureReason,
    OperationName,
    OperationStatus,
    ProbeResult,
    WeightsState,
)

OWN_FAULTS = (  # checks of one engine, over bytes that others read too
    FailureReason.COVERAGE_FAILED.value,
    FailureReason.DIGEST_MISMATCH.value,
    FailureReason.CACHE_RESET_FAILED.value,
    FailureReason.PROBE_FAILED.value,
    Reason.DIGEST_DISAGREES.value,
)
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

    @property
    def at_rest(self) -> bool:
        """Nothing more is awaited of it in this step."""
        return self.standing in (Standing.DONE, Standing.OUT, Standing.FAILED)


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
    move = _judge(update, seats, seconds, deadline, Phase.TRANSFERRING)
    if move is not None:
        return move
    if all(seat.at_rest for seat in seats):
        return _transferred(update, seats, seconds, deadline)
    if update.pushed and (lost := loss(update)):
        untouched = _is_untouched(update)
        return Move(_told(update, seats), failed(Reason.SENDER_LOST, lost), untouched=untouched, final=untouched)
    for seat in seats:
        if seat.standing is Standing.WORKING and seat.engine is not None:
            _give(update, seat, deadline)
    return Move(_told(update, seats))


def _transferred(update: Update, seats: list[Seat], seconds: int, deadline: Deadline) -> Move:
    """All that can have it. Verify is given in the pass that records the phase: whoever is Loaded stays so, whatever
    becomes of the write."""
    if update.pushed:
        held = [(seat.target.name, state) for seat in seats if (state := _state(seat)) is not None]
        found = with_digest(update, held)
        if isinstance(found, Move):
            return found
        update = with_record(update, found)
        seats = [_seat(update, seat.target, OperationName.TRANSFER) for seat in seats]
        move = _judge(update, seats, seconds, deadline, Phase.TRANSFERRING)
        if move is not None:
            return move
    _verify_all(update, seats, update.weight_version.spec.deadlines.verify_seconds)
    return Move(update.enter(Phase.VERIFYING, _told(update, seats)))


def verify(update: Update) -> Move:
    """One look at Verifying; the last one commits."""
    seconds = update.weight_version.spec.deadlines.verify_seconds
    deadline = update.deadline(seconds)
    seats = [_seat(update, target, OperationName.VERIFY) for target in update.status.targets]
    move = _judge(update, seats, seconds, deadline, Phase.VERIFYING)
    if move is not None:
        return move
    if not all(seat.at_rest for seat in seats):
        _verify_all(update, seats, deadline.left_s(update.now))
        return Move(_told(update, seats))
    out = _out(update, [(seat.target.name, state.probe) for seat in seats if (state := _state(seat)) is not None])
    if isinstance(out, Disagreement):
        # Bytes that nobody vouches for may have been garbled on their way, for all engines alike.
        final = out.settled and update.status.digest_source is not DigestSource.ENGINES_ONLY
        text = _never_again(update, out.text) if final else out.text
        return Move(_told(update, seats), failed(Reason.PROBES_DISAGREE, text), final=final)
    seats = [_odd_one_out(seat, out[seat.target.name]) if seat.target.name in out else seat for seat in seats]
    return Move(update.enter(Phase.OPENING, _told(update, seats)), commit=_commit(update, seats, frozenset(out)))


def _out(update: Update, probed: list[tuple[str, ProbeResult | None]]) -> dict[str, str] | Disagreement:
    """Whom its answer to the probe leaves out, and why: unlike the trainer's, or unlike those of the others."""
    probe = update.weight_version.spec.verify.probe
    limit = Decimal(probe.max_abs_logprob_diff)
    strange = unlike(probed, limit, MAX_EXCLUDED, probe.expected)
    if isinstance(strange, Disagreement):
        return strange
    odd = agree([each for each in probed if each[0] not in strange], limit, MAX_EXCLUDED - len(strange))
    if isinstance(odd, Disagreement):
        return odd
    out = strange | dict.fromkeys(odd, "its answer to the probe is not that of the others")
    if len(probed) - len(out) < _needed(update):
        whose = "the trainer" if strange else "the others"
        text = f"{', '.join(sorted(out))} answered unlike {whose}: {update.too_few(len(probed) - len(out))}"
        return Disagreement("; ".join([text, *sorted(strange.values())[:1]]))
    return out


def _odd_one_out(seat: Seat, text: str) -> Seat:
    return replace(seat, standing=Standing.FAILED, reason=Reason.PROBES_DISAGREE, text=text)


def _commit(update: Update, seats: list[Seat], odd: frozenset[str]) -> Committed:
    answers = [(seat.engine, state.probe) for seat in seats if seat.engine is not None and (state := _state(seat))]
    return Committed(
        version=update.version,
        digest=update.status.digest,
        checkpoint=update.path or None,
        weight_version_uid=update.weight_version.metadata.uid,
        time=update.now,
        excluded=tuple(seat.target.incarnation for seat in seats if seat.target.name in odd),
        previous=_previous(update),
        probe=to_record(answers, odd, confirmed=bool(update.weight_version.spec.verify.probe.expected)),
    )


def _previous(update: Update) -> Previous | None:
    """What may go on serving. It goes again as soon as nobody may be at it, which may be at once."""
    before = update.record.committed
    if before is None or update.weight_version.spec.strategy.type is not StrategyType.ROLLING:
        return None
    return Previous(version=before.version, digest=before.digest)


def _needed(update: Update) -> int:
    """How many targets must pass: of a fleet that rolls the others serve."""
    least = update.min_serving
    rolling = update.weight_version.spec.strategy.type is StrategyType.ROLLING
    return min(least, len(update.status.targets)) if rolling else least


def _state(seat: Seat) -> EngineState | None:
    return seat.engine.state if seat.engine is not None and seat.standing is Standing.DONE else None


def _judge(update: Update, seats: list[Seat], seconds: int, deadline: Deadline, phase: Phase) -> Move | None:
    """The end of the update, if this is it."""
    told = _told(update, seats)
    broken = [seat for seat in seats if seat.standing is Standing.FAILED]
    grave = next((seat for seat in broken if seat.reason not in OWN_FAULTS), None)
    left = sum(seat.standing not in (Standing.FAILED, Standing.OUT) for seat in seats)
    if grave is not None or (broken and left < _needed(update)):
        if phase is Phase.TRANSFERRING and _may_end_untouched(update, seats, deadline):
            return None
        misfit = _misfit(update, seats)
        first = misfit or grave or broken[0]
        text = f"{first.target.name}: {first.text}"
        if misfit is not None:
            text = _never_again(update, text)
        untouched = phase is Phase.TRANSFERRING and _is_untouched(update) and not _receive(update, seats)
        return Move(told, failed(first.reason, text), untouched=untouched, final=misfit is not None)
    gone = in_short([seat.target.name for seat in seats if seat.standing is Standing.OUT])
    if left == 0:
        text = f"{phase}: every engine of the update restarted or vanished: {gone}"
        return Move(told, failed(Reason.ENGINES_LOST, text))
    if left < _needed(update):
        text = f"{phase}: {len(seats) - left} engines of the update restarted or vanished ({gone})"
        return Move(told, failed(Reason.ENGINES_LOST, f"{text}: {update.too_few(left)}"))
    if deadline.passed(update.now) and not all(seat.at_rest for seat in seats):
        return Move(told, overdue(phase, seconds, _held_up(seats)))
    return None


def _may_end_untouched(update: Update, seats: list[Seat], deadline: Deadline) -> bool:
    """Whether to wait for the others of a push that has failed: they are as they were, and about to hear of it.

    Its trainer breaks off, or is lost. Fenced only then, one of them might take tensors after the end was told.
    """
    if deadline.passed(update.now) or not _receive(update, seats) or not _is_untouched(update):
        return False
    return not loss(update)


def _receive(update: Update, seats: list[Seat]) -> bool:
    """Whether an engine still takes what this update's trainer sends."""
    states = (seat.engine.state for seat in seats if seat.engine is not None)
    operations = (state.operation for state in states if state is not None)
    return any(
        each is not None
        and (each.name, each.status, each.epoch) == (OperationName.TRANSFER, OperationStatus.RUNNING, update.epoch)
        for each in operations
    )


def _is_untouched(update: Update) -> bool:
    """Of a push: by the word of every target it holds what it held."""
    states = [find_target(update, target)[1] for target in update.status.targets]
    return update.pushed and is_untouched(update, states)


def _never_again(update: Update, text: str) -> str:
    if update.weight_version.spec.on_failure.attempts > 1:
        return f"{text}; it is not tried again: the same weights would end alike"
    return text


def _misfit(update: Update, seats: list[Seat]) -> Seat | None:
    """An engine whose model has not the names, dtypes or shapes that the trainer sends, where no other one took them.

    The trainer then breaks off towards the others, who say only that; and whoever took them is a reason to try again.
    """
    if not update.pushed or any(seat.standing is Standing.DONE for seat in seats):
        return None
    coverage = FailureReason.COVERAGE_FAILED.value
    return next((seat for seat in seats if (seat.standing, seat.reason) == (Standing.FAILED, coverage)), None)


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
        return Seat(
            target, engine, Standing.FAILED, Reason.UNCERTAIN, "the guard no longer knows what the engine holds"
        )
    if _holds_it(update, state, step):
        text = _unlike(update, weights.digest)
        if text:
            return Seat(target, engine, Standing.FAILED, Reason.DIGEST_DISAGREES, text)
        probed = state.probe is not None and (state.probe.epoch, state.probe.version) == (update.epoch, update.version)
        if step is OperationName.TRANSFER or (weights.state is WeightsState.VERIFIED and probed):
            return Seat(target, engine, Standing.DONE)
    doing = Reason.TRANSFERRING if step is OperationName.TRANSFER else Reason.VERIFYING
    return Seat(target, engine, Standing.WORKING, doing, _doing(engine))


def _unlike(update: Update, digest: str | None) -> str:
    """How a digest is not the update's; empty where it is. Of a push it is not known before all hold the weights."""
    expected = update.status.digest
    if not update.pushed:
        return "" if digest == expected else f"holds {digest}, staged was {expected}"
    if not digest:
        return "says that it holds what the trainer sent, and names no digest"
    return "" if expected in ("", digest) else f"holds {digest}, most received {expected}"


def _holds_it(update: Update, state: EngineState, step: OperationName) -> bool:
    """Whether it has what this attempt gave it. What another attempt read may be other bytes, and is read again.

    A push that waits for its trainer has given nothing yet: what the attempt before brought is still there.
    """
    weights, operation = state.weights, state.operation
    if weights.state not in (WeightsState.LOADED, WeightsState.VERIFIED) or weights.version != update.version:
        return False
    given = operation is not None and operation.epoch == update.epoch and operation.name in CHANGES
    if given and operation is not None and operation.name is OperationName.TRANSFER:
        given = operation.status is not OperationStatus.RUNNING
    return given or step is OperationName.VERIFY or weights.digest == update.status.digest


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
    command: Command | None = push_command(update, seat.target, state, deadline)
    if not update.pushed:
        command = Transfer(
            incarnation=state.incarnation,
            epoch=update.epoch,
            version=update.version,
            digest=update.status.digest,
            deadline_seconds=deadline.left_s(update.now),
        )
    if command is not None:
        update.work.give(engine, command)


def _verify_all(update: Update, seats: list[Seat], seconds: float) -> None:
    """Whoever is Loaded resets its caches and answers the probe."""
    for seat in seats:
        engine, state = find_target(update, seat.target)
        if engine is None or state is None or seat.standing is Standing.FAILED or busy(state, update.epoch):
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
