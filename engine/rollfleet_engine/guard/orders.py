"""How the guard obeys or refuses the operator's commands: pure, part of the machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any

from rollfleet_engine.guard.held import holds, source_text, tell
from rollfleet_engine.guard.sleeping import LOADED, fell_asleep, is_awake, sleep_obstacle, wake_obstacle
from rollfleet_engine.guard.states import (
    AbandonPush,
    CancelOperation,
    Decision,
    Effect,
    GuardState,
    OperationRecord,
    Rejection,
    ReleaseStaged,
    Start,
)
from rollfleet_protocol.commands import (
    Arm,
    Cancel,
    Close,
    Command,
    Open,
    Prepare,
    Sleep,
    Transfer,
    Verify,
    Wake,
)
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import (
    Failure,
    FailureReason,
    Gate,
    OperationName,
    OperationStatus,
    Weights,
    WeightsState,
)

_NAME_OF = {
    Prepare: OperationName.PREPARE,
    Close: OperationName.CLOSE,
    Transfer: OperationName.TRANSFER,
    Verify: OperationName.VERIFY,
    Sleep: OperationName.SLEEP,
    Wake: OperationName.WAKE,
}


# Between repetitions of a command: how long it may take, and how what runs is ended, which the first one decided.
_MAY_DIFFER = {"deadline_seconds", "operator_silence_seconds", "mode", "drain_timeout_seconds", "keep_seconds"}


# What half of it leaves behind, nobody can tell: a newer epoch and Cancel wait for its end.
NEVER_GIVEN_UP = frozenset({OperationName.SLEEP, OperationName.WAKE})


def obey(state: GuardState, command: Command, now: float, in_flight: int) -> Decision:
    """Check who is meant and which epoch, then do it, or refuse and say what comes first."""
    if command.incarnation != state.incarnation:
        message = f"this is incarnation {state.incarnation}, not {command.incarnation}: read the state again"
        return _refused(state, RefusalReason.WRONG_INCARNATION, message)
    if command.epoch < state.epoch:
        message = f"epoch {command.epoch} is over: this engine follows epoch {state.epoch}"
        return _refused(state, RefusalReason.STALE_EPOCH, message)
    running = state.running
    if running is not None and running.name in NEVER_GIVEN_UP and not isinstance(command, Sleep | Wake):
        return _busy(state, running)
    if running is not None and running.name in NEVER_GIVEN_UP and command.epoch != state.epoch:
        return _busy(state, running)
    adopted = _adopt(hear(state, now), command.epoch, now)
    decision = _obey(command, adopted.state, now, in_flight)
    return replace(decision, effects=adopted.effects + decision.effects)


def hear(state: GuardState, now: float) -> GuardState:
    """The operator lives: its silence is counted anew."""
    return state if state.silence_s is None else replace(state, reopen_at=now + state.silence_s)


def _adopt(state: GuardState, epoch: int, now: float) -> Decision:
    """Follow a newer epoch: what the older one staged, armed or still does counts no more."""
    if epoch == state.epoch:
        return Decision(state)
    new = replace(state, epoch=epoch, armed=False, quiesced_epoch=0, staged=None, staged_source=None, push=None)
    if state.running is not None and state.running.name is OperationName.TRANSFER and not _awaits_trainer(state):
        # The transfer cannot be stopped safely half-way: it runs out, and whatever it says counts for nothing.
        return Decision(lose_weights(new, needs_recovery=True), (AbandonPush(state.running.id), ReleaseStaged()))
    cancelled, effects = give_up_running(new, "a newer epoch began", now)
    return Decision(cancelled, (*effects, ReleaseStaged()))


def _awaits_trainer(state: GuardState) -> bool:
    """Whether the running transfer is a push of which nothing has been touched."""
    command = None if state.running is None else state.running.command
    untouched = state.weights.state not in (WeightsState.UPDATING, WeightsState.UNCERTAIN)
    return isinstance(command, Transfer) and command.push is not None and untouched


def give_up_running(state: GuardState, why: str, now: float) -> tuple[GuardState, tuple[Effect, ...]]:
    """Stop the running operation, if any. Not for a transfer that may have touched the weights.

    Of a push the workers may be in the trainer's group: they leave it before the next transfer.
    """
    running = state.running
    if running is None:
        return state, ()
    failure = Failure(reason=FailureReason.CANCELLED, message=why)
    ended = replace(running, status=OperationStatus.FAILED, ended=now, failure=failure)
    recovers = state.needs_recovery or (isinstance(running.command, Transfer) and running.command.push is not None)
    return replace(state, operation=ended, needs_recovery=recovers), (CancelOperation(running.id),)


def lose_weights(state: GuardState, *, needs_recovery: bool) -> GuardState:
    """Nobody knows any more what the engine holds."""
    weights = Weights(state=WeightsState.UNCERTAIN, source=state.weights.source)
    return replace(
        state,
        weights=weights,
        weights_before=None,
        needs_recovery=needs_recovery,
        member=False,
        reopens=False,
        silence_s=None,
        reopen_at=None,
    )


def _refused(state: GuardState, reason: RefusalReason, message: str) -> Decision:
    return Decision(state, rejection=Rejection(reason, message))


def _out_of_order(state: GuardState, message: str) -> Decision:
    return _refused(state, RefusalReason.ORDER_VIOLATION, message)


@singledispatch
def _obey(command: Command, state: GuardState, now: float, in_flight: int) -> Decision:
    raise TypeError(f"not a command of this protocol: {type(command).__name__}")


def _start(state: GuardState, name: OperationName, version: int, now: float, command: Command | None) -> Decision:
    record = OperationRecord(state.operations + 1, name, state.epoch, version, now, command)
    return Decision(replace(state, operation=record, operations=record.id), (Start(record),))


def _begin(
    state: GuardState,
    command: Prepare | Close | Transfer | Verify | Sleep | Wake,
    now: float,
    *,
    done: bool,
    obstacle: Callable[[], Decision | None],
) -> Decision:
    """Repeat harmlessly, refuse, or start. Deadlines may differ between repetitions, what is asked for may not."""
    name = _NAME_OF[type(command)]
    running = state.running
    if running is not None:
        if running.name is name and running.command is not None and _asks(running.command) == _asks(command):
            return Decision(state)
        return _busy(state, running)
    if done:
        return Decision(state)
    version = state.weights.version or 0 if isinstance(command, Sleep | Wake) else command.version
    return obstacle() or _start(state, name, version, now, command)


def _asks(command: Command) -> dict[str, Any]:
    return command.model_dump(exclude=_MAY_DIFFER)


def _busy(state: GuardState, running: OperationRecord) -> Decision:
    message = f"{running.name} of epoch {running.epoch}, version {running.version} is running: wait for its end"
    cure = "" if state.touched or running.name in NEVER_GIVEN_UP else ", or Cancel"
    return _out_of_order(state, message + cure)


@_obey.register
def _prepare(command: Prepare, state: GuardState, now: float, in_flight: int) -> Decision:
    staged = state.staged
    done = (
        staged is not None
        and (staged.epoch, staged.version) == (command.epoch, command.version)
        and state.staged_source == command.source
        and command.digest in (None, staged.digest)
    )
    decision = _begin(state, command, now, done=done, obstacle=lambda: None)
    if not decision.effects or staged is None:
        return decision
    forgotten = replace(decision.state, staged=None, staged_source=None)
    return Decision(forgotten, (ReleaseStaged(), *decision.effects))


@_obey.register
def _close(command: Close, state: GuardState, now: float, in_flight: int) -> Decision:
    closed = state.gate is Gate.CLOSED
    quiesced = closed and state.quiesced_epoch == command.epoch and state.paused and in_flight == 0
    decision = _begin(state, command, now, done=quiesced or _is_past_close(state, command), obstacle=_none)
    if not decision.effects:
        return decision
    silence_s = command.operator_silence_seconds if not closed or state.silence_s is not None else None
    new = replace(
        decision.state,
        gate=Gate.CLOSED,
        reopens=state.reopens or not closed,
        quiesced_epoch=0,
        silence_s=silence_s,
        reopen_at=None if silence_s is None else now + silence_s,
    )
    return replace(decision, state=new)


def _none() -> None:
    return None


def _is_past_close(state: GuardState, command: Close) -> bool:
    """A late copy of the Close of an update that has gone on to Loaded, Verified or Open must not pause it again."""
    transferred = state.transferred
    return (
        transferred is not None
        and (transferred.epoch, transferred.version) == (command.epoch, command.version)
        and state.weights.state in (WeightsState.LOADED, WeightsState.VERIFIED)
        and state.weights.version == command.version
    )


@_obey.register
def _arm(command: Arm, state: GuardState, now: float, in_flight: int) -> Decision:
    if state.armed:
        return Decision(state)
    if state.running is not None:
        return _busy(state, state.running)
    if state.gate is Gate.OPEN:
        return _out_of_order(state, "the gate is open: Close comes before Arm")
    if state.quiesced_epoch != command.epoch or in_flight > 0:
        message = f"not quiesced under epoch {command.epoch} ({in_flight} requests in flight): Close comes before Arm"
        return _out_of_order(state, message)
    # Nor must silence reopen it later, under a newer epoch: the rest of the fleet may be at other weights by then.
    return Decision(replace(state, armed=True, silence_s=None, reopen_at=None))


@_obey.register
def _transfer(command: Transfer, state: GuardState, now: float, in_flight: int) -> Decision:
    transferred, weights = state.transferred, state.weights
    done = (
        transferred is not None
        and transferred.epoch == command.epoch
        and weights.state in (WeightsState.LOADED, WeightsState.VERIFIED)
        and weights.version == command.version
        and command.digest in (None, weights.digest)
    )
    decision = _begin(state, command, now, done=done, obstacle=lambda: _transfer_obstacle(command, state, in_flight))
    if not decision.effects:
        return decision
    if command.push is not None:  # touched once the trainer begins
        return replace(decision, state=replace(decision.state, weights_before=weights, push=command.push))
    source = "" if state.staged_source is None else source_text(state.staged_source)
    touched = Weights(state=WeightsState.UPDATING, source=source)
    return replace(decision, state=replace(decision.state, weights=touched, weights_before=weights))


def _transfer_obstacle(command: Transfer, state: GuardState, in_flight: int) -> Decision | None:
    staged = state.staged
    if command.push is None:
        if staged is None or (staged.epoch, staged.version) != (command.epoch, command.version):
            message = f"version {command.version} is not staged under epoch {command.epoch}: Prepare first"
            return _out_of_order(state, message)
        if staged.digest != command.digest:
            return _out_of_order(state, f"staged {staged.path!r} has digest {staged.digest}, not {command.digest}")
    if state.gate is Gate.OPEN or state.quiesced_epoch != command.epoch or not state.paused or in_flight > 0:
        return _out_of_order(state, "the engine is not quiesced: Close, then Arm, come before Transfer")
    if not state.armed or Tag.WEIGHTS in state.asleep:
        first = "the weights sleep: Wake with tag weights" if state.armed else "the engine is not armed: Arm"
        return _out_of_order(state, f"{first} comes before Transfer")
    return None


@_obey.register
def _verify(command: Verify, state: GuardState, now: float, in_flight: int) -> Decision:
    probe = state.probe
    done = (
        probe is not None
        and (probe.epoch, probe.version, probe.tokens) == (command.epoch, command.version, command.probe_tokens)
        and state.weights.state is WeightsState.VERIFIED
        and holds(state.weights, command.version, command.digest)
        and not state.paused
    )
    return _begin(state, command, now, done=done, obstacle=lambda: _verify_obstacle(command, state))


def _verify_obstacle(command: Verify, state: GuardState) -> Decision | None:
    weights = state.weights
    if state.gate is Gate.OPEN or (state.asleep and weights.state in LOADED):
        first = "the gate is open: Close" if state.gate is Gate.OPEN else f"{', '.join(state.asleep)} asleep: Wake"
        return _out_of_order(state, f"{first} comes before Verify")
    if weights.state is WeightsState.INITIAL:
        if command.version == 0 and command.digest is None:
            return None
        return _out_of_order(state, "the weights are those of model.path: they can only be version 0, without digest")
    if weights.state in (WeightsState.LOADED, WeightsState.VERIFIED):
        if holds(weights, command.version, command.digest):
            return None
        return _out_of_order(state, f"{tell(weights)} is held, not version {command.version} with {command.digest}")
    return _out_of_order(state, f"the weights are {weights.state}: Prepare, Close, Arm and Transfer come before Verify")


@_obey.register
def _open(command: Open, state: GuardState, now: float, in_flight: int) -> Decision:
    weights = state.weights
    if state.running is not None and not (state.gate is Gate.OPEN and state.running.name is OperationName.PREPARE):
        return _busy(state, state.running)
    if weights.state is not WeightsState.VERIFIED or not holds(weights, command.version, command.digest):
        message = f"{tell(weights)} is held: verify version {command.version} with digest {command.digest} first"
        return _refused(state, RefusalReason.NOT_VERIFIED, message)
    if state.gate is Gate.OPEN:
        return Decision(state)
    if not state.alive or state.draining:
        return _out_of_order(state, f"the engine is {state.closed_reason}: it can never be opened again")
    if state.paused:  # also while anything sleeps: Wake, too, comes before Verify then
        return _out_of_order(state, "the scheduler is paused: Verify comes before Open")
    return Decision(opened(replace(state, staged=None, staged_source=None)), (ReleaseStaged(),))


def opened(state: GuardState) -> GuardState:
    """With the gate open; the caller has made sure that it may."""
    return replace(
        state,
        gate=Gate.OPEN,
        opened_before=True,
        member=True,
        armed=False,
        push=None,
        quiesced_epoch=0,
        reopens=False,
        silence_s=None,
        reopen_at=None,
    )


@_obey.register
def _cancel(command: Cancel, state: GuardState, now: float, in_flight: int) -> Decision:
    if state.touched:
        message = f"the weights are {state.weights.state}: only a complete update or reload leads on from here"
        return _out_of_order(state, message)
    if state.running is not None and state.running.name is OperationName.REOPEN:
        return Decision(state)
    new, effects = give_up_running(state, "the operator gave the epoch up", now)
    if new.staged is not None:
        effects = (*effects, ReleaseStaged())
    new = replace(new, staged=None, staged_source=None, push=None, armed=False, quiesced_epoch=0)
    if new.gate is Gate.OPEN or new.asleep or not (new.reopens or new.paused or effects):
        return Decision(new, effects)
    return reopen(new, effects, now)


def reopen(state: GuardState, effects: tuple[Effect, ...], now: float) -> Decision:
    """Resume what is paused and open what was open."""
    decision = _start(state, OperationName.REOPEN, state.weights.version or 0, now, None)
    return replace(decision, effects=effects + decision.effects)


@_obey.register
def _sleep(command: Sleep, state: GuardState, now: float, in_flight: int) -> Decision:
    why = sleep_obstacle(state, command, in_flight)
    return _move_memory(command, state, now, done=fell_asleep(state, command), why=why)


@_obey.register
def _wake(command: Wake, state: GuardState, now: float, in_flight: int) -> Decision:
    return _move_memory(command, state, now, done=is_awake(state, command), why=wake_obstacle(state, command))


def _move_memory(command: Sleep | Wake, state: GuardState, now: float, *, done: bool, why: str) -> Decision:
    return _begin(state, command, now, done=done, obstacle=lambda: _out_of_order(state, why) if why else None)
