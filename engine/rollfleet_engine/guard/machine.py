"""The guard's state machine: pure.

An event, the time and the number of requests in flight give a new state and effects.

What holds whatever happens (tests/unit/guard/test_machine_properties.py tries to break it):
- the gate is open only over Verified weights, a running scheduler and a living core;
- from the first touched tensor until the next verification nothing opens it;
- a command of an older epoch or another incarnation changes nothing;
- once armed, only a word of the operator opens it; unarmed, silence reopens what was open on untouched weights;
- the scheduler is resumed once per pause.
"""

from dataclasses import replace
from functools import singledispatch
from math import isfinite

from rollfleet_engine.guard.held import push_source
from rollfleet_engine.guard.orders import NEVER_GIVEN_UP, give_up_running, hear, lose_weights, obey, opened, reopen
from rollfleet_engine.guard.states import (
    Decision,
    DrainBegan,
    Ended,
    EngineDied,
    Event,
    Failed,
    GuardState,
    Heard,
    OperationRecord,
    Paused,
    Progressed,
    ReleaseStaged,
    Resumed,
    Slept,
    Tick,
    Touching,
    Woken,
)
from rollfleet_protocol.commands import Close, Command, Prepare, Sleep, Transfer, Verify
from rollfleet_protocol.sleep import Sleeping, Tag
from rollfleet_protocol.state import (
    DigestSource,
    Failure,
    FailureReason,
    Gate,
    OperationName,
    OperationStatus,
    ProbeResult,
    Staged,
    Transferred,
    Weights,
    WeightsState,
)


def decide(state: GuardState, event: Event, now: float, in_flight: int = 0) -> Decision:
    """What follows from the event. `now` is monotonic seconds."""
    decision = obey(state, event, now, in_flight) if isinstance(event, Command) else _apply(event, state, now)
    if decision.state is not state and decision.state.told() != state.told():
        return replace(decision, state=replace(decision.state, sequence=state.sequence + 1))
    return decision


@singledispatch
def _apply(event: Event, state: GuardState, now: float) -> Decision:
    raise TypeError(f"not an event of the guard: {type(event).__name__}")


@_apply.register
def _heard(event: Heard, state: GuardState, now: float) -> Decision:
    return Decision(hear(state, now))


@_apply.register
def _tick(event: Tick, state: GuardState, now: float) -> Decision:
    if state.reopen_at is None or now < state.reopen_at or not _may_reopen_alone(state):
        return Decision(state)
    new, effects = give_up_running(state, "the operator was silent for too long: reopening", now)
    return reopen(new, effects, now)


def _may_reopen_alone(state: GuardState) -> bool:
    busy = state.running is not None and state.running.name in (OperationName.REOPEN, *NEVER_GIVEN_UP)
    return not (state.armed or busy) and _may_open(state)


def _may_open(state: GuardState) -> bool:
    untouched = state.reopens and state.weights.state is WeightsState.VERIFIED
    return untouched and state.gate is Gate.CLOSED and state.alive and not state.draining


@_apply.register
def _paused(event: Paused, state: GuardState, now: float) -> Decision:
    return Decision(replace(state, paused=True))


@_apply.register
def _resumed(event: Resumed, state: GuardState, now: float) -> Decision:
    return Decision(replace(state, paused=False, quiesced_epoch=0))


@_apply.register
def _slept(event: Slept, state: GuardState, now: float) -> Decision:
    """What wakes up has to be verified, even where nothing was dropped: it went through host memory."""
    weights = state.weights
    if event.level > 1:
        weights = Weights(state=WeightsState.ABSENT)
    elif weights.state is WeightsState.VERIFIED:
        weights = _unverified(weights)
    slept = replace(state, sleep=Sleeping(level=event.level, awake=()), weights=weights, weights_before=None)
    return Decision(replace(slept, member=False, reopens=False, silence_s=None, reopen_at=None))


def _unverified(weights: Weights) -> Weights:
    if weights.digest is None:
        return weights.model_copy(update={"state": WeightsState.INITIAL, "version": None})
    return weights.model_copy(update={"state": WeightsState.LOADED})


@_apply.register
def _woken(event: Woken, state: GuardState, now: float) -> Decision:
    awake = tuple(tag for tag in Tag if tag in (*state.sleep.awake, *event.tags))
    return Decision(
        replace(state, sleep=Sleeping() if len(awake) == len(Tag) else Sleeping(level=state.sleep.level, awake=awake))
    )


@_apply.register
def _engine_died(event: EngineDied, state: GuardState, now: float) -> Decision:
    return Decision(replace(state, alive=False, gate=Gate.CLOSED, member=False, silence_s=None, reopen_at=None))


@_apply.register
def _drain_began(event: DrainBegan, state: GuardState, now: float) -> Decision:
    return Decision(replace(state, draining=True, gate=Gate.CLOSED, member=False, silence_s=None, reopen_at=None))


@_apply.register
def _progressed(event: Progressed, state: GuardState, now: float) -> Decision:
    running = _running(state, event.operation_id)
    if running is None:
        return Decision(state)
    return Decision(replace(state, operation=replace(running, progress=event.progress)))


@_apply.register
def _touching(event: Touching, state: GuardState, now: float) -> Decision:
    running = _running(state, event.operation_id)
    if running is None or running.epoch != state.epoch or state.push is None:
        return Decision(state)
    return Decision(replace(state, weights=Weights(state=WeightsState.UPDATING, source=push_source(state.push))))


def _running(state: GuardState, operation_id: int) -> OperationRecord | None:
    """The running operation, if the report is about it; a report of one that was given up counts for nothing."""
    running = state.running
    return running if running is not None and running.id == operation_id else None


@_apply.register
def _ended(event: Ended, state: GuardState, now: float) -> Decision:
    running = _running(state, event.operation_id)
    if running is None:
        return Decision(state)
    if running.epoch != state.epoch:
        return Decision(_fail(state, running, _outlived(running), now, touched=True))
    fault = _fault(running, event.result, state.weights_before)
    if fault is not None:
        effects = (ReleaseStaged(),) if running.name is OperationName.PREPARE else ()
        return Decision(_fail(state, running, fault, now, touched=True), effects)
    ended = replace(state, operation=replace(running, status=OperationStatus.SUCCEEDED, ended=now))
    return Decision(_succeed(ended, running, event.result))


def _outlived(running: OperationRecord) -> Failure:
    message = f"{running.name} ended after a newer epoch had begun"
    return Failure(reason=FailureReason.CANCELLED, message=message)


def _fault(
    running: OperationRecord, result: Staged | Transferred | ProbeResult | None, before: Weights | None
) -> Failure | None:
    """What is wrong with a result that the engine calls a success."""
    command = running.command
    if isinstance(command, Prepare):
        return _staging_fault(command, result)
    if isinstance(command, Transfer):
        return _transfer_fault(command, result, before)
    if isinstance(command, Verify):
        return _probe_fault(command, result)
    return None


def _staging_fault(command: Prepare, result: object) -> Failure | None:
    if command.digest is None or not isinstance(result, Staged) or result.digest == command.digest:
        return None
    message = f"{result.path!r} now has digest {result.digest}, committed was {command.digest}"
    return Failure(reason=FailureReason.CHECKPOINT_CHANGED, message=message)


def _transfer_fault(command: Transfer, result: object, before: Weights | None) -> Failure | None:
    if not isinstance(result, Transferred) or result.tensors < 1 or result.bytes < 1 or not result.digest:
        return Failure(
            reason=FailureReason.TRANSFER_FAILED, message=f"the engine reports an empty transfer: {result!r}"
        )
    if command.digest is not None and result.digest != command.digest:
        source = "staged" if command.push is None else "announced"
        message = f"the workers received {result.digest}, {source} was {command.digest}"
        return Failure(reason=FailureReason.DIGEST_MISMATCH, message=message)
    unchanged = before is not None and result.digest == before.digest
    if unchanged and result.digest_source is DigestSource.ENGINES_ONLY:
        message = (
            f"the workers received just what they held before ({result.digest}), and the trainer did not say that it "
            "sent that: finish_weight_update takes the digest of what was sent"
        )
        return Failure(reason=FailureReason.DIGEST_MISMATCH, message=message)
    return None


def _probe_fault(command: Verify, result: object) -> Failure | None:
    if not isinstance(result, ProbeResult):
        return Failure(reason=FailureReason.PROBE_FAILED, message="the engine did not answer the probe")
    wanted = len(command.probe_tokens) - 1
    for rank, logprobs in enumerate(result.by_rank):
        if len(logprobs) != wanted or not all(isfinite(value) for value in logprobs):
            message = f"the probe must give {wanted} finite log-probabilities, rank {rank} gave {logprobs}"
            return Failure(reason=FailureReason.PROBE_FAILED, message=message)
    return None


def _succeed(
    state: GuardState, ended: OperationRecord, result: Staged | Transferred | ProbeResult | None
) -> GuardState:
    if isinstance(result, Staged):
        source = getattr(ended.command, "source", None)
        return replace(state, staged=result, staged_source=source)
    if isinstance(result, Transferred):
        weights = Weights(
            state=WeightsState.LOADED, version=ended.version, digest=result.digest, source=state.weights.source
        )
        return replace(
            state, weights=weights, weights_before=None, transferred=result, needs_recovery=False, reopens=False
        )
    if isinstance(result, ProbeResult):
        verified = state.weights.model_copy(update={"state": WeightsState.VERIFIED, "version": ended.version})
        return replace(state, weights=verified, probe=result)
    if isinstance(ended.command, Close):
        return replace(state, quiesced_epoch=ended.epoch)
    return opened(state) if _may_open(state) and not state.paused else state


@_apply.register
def _failed(event: Failed, state: GuardState, now: float) -> Decision:
    running = _running(state, event.operation_id)
    if running is None:
        return Decision(state)
    failed = _fail(state, running, event.failure, now, touched=event.touched)
    return Decision(replace(failed, needs_recovery=failed.needs_recovery or event.unreset))


def _fail(state: GuardState, running: OperationRecord, failure: Failure, now: float, *, touched: bool) -> GuardState:
    record = replace(running, status=OperationStatus.FAILED, ended=now, failure=failure)
    new = replace(state, operation=record)
    if running.name is OperationName.TRANSFER:
        return _fail_transfer(new, running, touched=touched)
    if running.name is OperationName.VERIFY:
        return _fail_verify(new)
    if running.name in (OperationName.SLEEP, OperationName.WAKE) and touched:
        # Half asleep at the worst: it counts as asleep, and waking who is awake is harmless.
        command = running.command
        level = command.level if isinstance(command, Sleep) else state.sleep.level
        new = replace(new, sleep=Sleeping(level=level, awake=() if isinstance(command, Sleep) else state.sleep.awake))
        return lose_weights(new, needs_recovery=state.needs_recovery)
    if running.name is OperationName.REOPEN and new.silence_s is not None:
        return replace(new, reopen_at=now + new.silence_s)
    return new


def _fail_transfer(state: GuardState, running: OperationRecord, *, touched: bool) -> GuardState:
    if touched or state.weights_before is None or running.epoch != state.epoch:
        return lose_weights(state, needs_recovery=True)
    return replace(state, weights=state.weights_before, weights_before=None)


def _fail_verify(state: GuardState) -> GuardState:
    """Weights of model.path that nobody replaced may be verified again; others are known good no longer."""
    if state.weights.digest is not None:
        return lose_weights(state, needs_recovery=state.needs_recovery)
    return replace(
        state, weights=_unverified(state.weights), reopens=False, member=False, silence_s=None, reopen_at=None
    )
