"""Late joiners: the next command from wherever an engine is, and what happens to those that get no further."""

from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.records import ProbeAnswer
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.core.actions import Decision, GuardCall
from rollfleet_operator.core.observed import Observed
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.commands import Arm, Cancel, Close, Command, Open, Prepare, Transfer, Verify
from rollfleet_protocol.state import (
    EngineState,
    Failure,
    FailureReason,
    OperationName,
    OperationStatus,
    Staged,
    WeightsState,
)
from tests.support.builders import (
    NOW,
    digest_of,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_operation,
    make_pod,
    make_probe,
    make_state,
    make_weights,
)

EPOCH = 5
QUIET: dict[str, Any] = {"open": False, "epoch": EPOCH, "paused": True, "closed_reason": "Starting"}
UNCERTAIN = make_weights(None, WeightsState.UNCERTAIN)
INITIAL = make_weights(None, WeightsState.INITIAL)


def staged(version: int = 3, **changes: Any) -> Staged:
    path = f"step-{version}"
    given = {"epoch": EPOCH, "version": version, "path": path, "digest": digest_of(path)}
    return Staged(**(given | {"tensors": 1, "bytes": 1, "seconds": 0.1} | changes))


def closed(**changes: Any) -> EngineState:
    """An engine that is closed, drained and paused under this epoch, with weights that nobody knows."""
    return make_state(None, **(QUIET | {"weights": UNCERTAIN, "probe": None, "incarnation": "inc-1"} | changes))


def fleet_at(version: int = 3) -> Any:
    return make_fleet(status=RolloutEngineStatus(epoch=EPOCH, committed=make_committed(version)))


def observed(state: EngineState, *, version: int = 3, pod: dict[str, Any] | None = None, **guard: Any) -> Observed:
    """One engine that serves the version, and the joiner."""
    pods = (make_pod(0), make_pod(1, **(pod or {})))
    well = make_state(version, epoch=EPOCH, incarnation="inc-0", probe=make_probe(version))
    return make_observed(
        fleet_at(version), pods=pods, guards={"pod-0": make_guard(well), "pod-1": make_guard(state, **guard)}
    )


def told(decision: Decision) -> Command | None:
    """The one command of the pass, to the joiner."""
    calls = [action for action in decision.actions if isinstance(action, GuardCall)]
    assert all(call.pod_uid == "pod-1" for call in calls)
    assert len(calls) <= 1
    return calls[0].command if calls else None


LADDER: dict[str, tuple[EngineState, int, type[Command] | None]] = {
    "new, version 0": (closed(weights=INITIAL, paused=False), 0, Verify),
    "new, a later version": (closed(weights=INITIAL, paused=False), 3, Prepare),
    "uncertain": (closed(), 3, Prepare),
    "uncertain, version 0": (closed(), 0, Prepare),
    "staged another version": (closed(staged=staged(2)), 3, Prepare),
    "staged under an older epoch": (closed(staged=staged(epoch=4)), 3, Prepare),
    "staged, never paused": (closed(staged=staged(), paused=False), 3, Close),
    "staged, draining": (closed(staged=staged(), in_flight=2), 3, Close),
    "staged and quiet": (closed(staged=staged()), 3, Arm),
    "staged and armed": (closed(staged=staged(), armed=True), 3, Transfer),
    "loaded": (closed(staged=staged(), armed=True, weights=make_weights(3, WeightsState.LOADED)), 3, Verify),
    "loaded another version": (closed(armed=True, weights=make_weights(4, WeightsState.LOADED)), 3, Prepare),
    "verified": (make_state(3, open=False, epoch=EPOCH), 3, Open),
    "verified and paused": (make_state(3, open=False, epoch=EPOCH, paused=True), 3, Cancel),
    "verified another version": (make_state(2, open=False, epoch=EPOCH), 3, Prepare),
    "open at another version": (make_state(2, epoch=EPOCH), 3, Close),
    "open at another digest": (make_state(3, weights=make_weights(3).model_copy(update={"digest": "x"})), 3, Close),
    "busy with what it was told": (
        closed(operation=make_operation(OperationName.PREPARE, OperationStatus.RUNNING, epoch=EPOCH, version=3)),
        3,
        None,
    ),
    "busy with an update that was given up": (
        closed(operation=make_operation(OperationName.PREPARE, OperationStatus.RUNNING, epoch=4, version=4)),
        3,
        Prepare,
    ),
    "busy under this very epoch with what looks given up": (
        closed(operation=make_operation(OperationName.PREPARE, OperationStatus.RUNNING, epoch=EPOCH, version=4)),
        3,
        None,
    ),
    "busy with a transfer of an older epoch": (
        closed(operation=make_operation(OperationName.TRANSFER, OperationStatus.RUNNING, epoch=4, version=4)),
        3,
        None,
    ),
    "dead": (closed(alive=False), 3, None),
    "well": (make_state(3, epoch=EPOCH), 3, None),
    "well, holding on to what it staged": (make_state(3, epoch=EPOCH, staged=staged(4, epoch=4)), 3, Cancel),
    "well, holding on to what it staged under this very epoch": (make_state(3, epoch=EPOCH, staged=staged(4)), 3, None),
}


@pytest.mark.parametrize("case", LADDER)
def test_the_next_command(case: str) -> None:
    state, version, expected = LADDER[case]
    command = told(plan(observed(state, version=version), NOW))
    assert (None if command is None else type(command)) is expected
    if command is not None:
        assert (command.epoch, command.incarnation) == (EPOCH, state.incarnation)


def test_what_is_held_under_this_very_epoch_is_taken_away_under_the_next() -> None:
    """Recorded first: another operator may have begun an update that this one has not heard of."""
    decision = plan(observed(make_state(3, epoch=EPOCH, staged=staged(4))), NOW)
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.epoch == EPOCH + 1


def test_version_zero_is_read_from_the_model_again() -> None:
    command = told(plan(observed(closed(), version=0), NOW))
    assert isinstance(command, Prepare)
    assert (command.source.root, command.source.path, command.version) == ("Model", ".", 0)


def test_it_opens_at_exactly_what_it_holds() -> None:
    command = told(plan(observed(make_state(3, open=False, epoch=EPOCH)), NOW))
    assert isinstance(command, Open)
    assert (command.version, command.digest) == (3, "sha256:step-3")


def test_nobody_is_opened_before_the_kubelet_confirms_that_it_is_up() -> None:
    """What never passed its startup probe counts as never opened: the fence relies on it."""
    state = make_state(3, open=False, epoch=EPOCH)
    assert told(plan(observed(state, pod={"started": False}), NOW)) is None


def details(decision: Decision) -> dict[str, tuple[str, str]]:
    """(state, text) by ordinal of those that are not well."""
    assert decision.fleet_status is not None
    found = decision.fleet_status.status.engines.details
    return {detail.name: (detail.state, detail.message) for detail in found}


def test_a_checkpoint_that_is_another_one_now_is_not_loaded() -> None:
    command = told(plan(observed(closed(staged=staged(digest="sha256:other"))), NOW))
    assert isinstance(command, Prepare)
    assert command.digest == make_committed(3).digest


def test_c11_a_checkpoint_that_is_another_one_now_is_told_and_read_again() -> None:
    """With back-off, for as long as it takes: somebody may put it back."""
    text = "'step-3' now has digest sha256:other, committed was sha256:step-3"
    failure = Failure(reason=FailureReason.CHECKPOINT_CHANGED, message=text)
    failed = make_operation(OperationName.PREPARE, OperationStatus.FAILED, epoch=EPOCH, version=3, failure=failure)
    decision = plan(observed(closed(operation=failed)), NOW)
    assert isinstance(told(decision), Prepare)
    state, text = details(decision)["qwen-1-0-abc1"]
    assert state == "Broken"
    assert "'step-3' now has digest sha256:other" in text


def test_of_two_that_are_let_in_at_once_the_second_is_measured_by_the_first() -> None:
    odd = make_probe(3, logprobs=(-1.0, -2.0, -0.5, -3.0, -9.0))
    states = (make_state(3, open=False, epoch=EPOCH), make_state(3, open=False, epoch=EPOCH, probe=odd))
    world = make_observed(
        fleet_at(), pods=(make_pod(0), make_pod(1)), guards={f"pod-{n}": make_guard(states[n]) for n in (0, 1)}
    )
    decision = plan(world, NOW)
    opened = [each.pod for each in decision.actions if isinstance(each, GuardCall)]
    assert opened == ["qwen-0-0-abc0"]
    assert "qwen-0-0-abc0 and qwen-1-0-abc1 differ" in details(decision)["qwen-1-0-abc1"][1]


def test_an_engine_that_served_and_does_not_answer_still_measures_the_others() -> None:
    """Clients may reach it all the same."""
    odd = make_probe(3, logprobs=(-1.0, -2.0, -0.5, -3.0, -9.0))
    serving = make_guard(make_state(3, epoch=EPOCH), reachable=False, error="timed out")
    joiner = make_guard(make_state(3, open=False, epoch=EPOCH, probe=odd))
    world = make_observed(fleet_at(), pods=(make_pod(0), make_pod(1)), guards={"pod-0": serving, "pod-1": joiner})
    assert not [each for each in plan(world, NOW).actions if isinstance(each, GuardCall)]


def test_one_that_serves_and_answers_unlike_the_rest_keeps_nobody_out() -> None:
    odd = make_probe(3, logprobs=(-1.0, -2.0, -0.5, -3.0, -9.0))
    strange = make_probe(3).model_copy(update={"tokens": (2**31 - 1, 2**31 - 1)})
    for lie in (odd, strange):
        states = (
            make_state(3, epoch=EPOCH, incarnation="liar", probe=lie),
            make_state(3, epoch=EPOCH, incarnation="inc-1"),
            make_state(3, epoch=EPOCH, incarnation="inc-2"),
            make_state(3, epoch=EPOCH, incarnation="inc-3", open=False),
            closed(weights=make_weights(3, WeightsState.LOADED), incarnation="inc-4"),
        )
        pods = tuple(make_pod(n) for n in range(len(states)))
        guards = {f"pod-{n}": make_guard(state) for n, state in enumerate(states)}
        decision = plan(make_observed(fleet_at(), pods=pods, guards=guards), NOW)
        calls = {each.pod_uid: each.command for each in decision.actions if isinstance(each, GuardCall)}
        assert isinstance(calls["pod-3"], Open)
        verify = calls["pod-4"]
        assert isinstance(verify, Verify)
        assert verify.probe_tokens == make_probe(3).tokens


def test_an_answer_to_the_probe_that_differs_keeps_it_closed() -> None:
    odd = make_probe(3, logprobs=(-1.0, -2.0, -0.5, -3.0, -9.0))
    decision = plan(observed(make_state(3, open=False, epoch=EPOCH, probe=odd)), NOW)
    assert told(decision) is None
    state, text = details(decision)["qwen-1-0-abc1"]
    assert state == "Broken"
    assert "qwen-0-0-abc0 and qwen-1-0-abc1 differ" in text


def record(template: str) -> ProbeAnswer:
    probe = make_probe(3)
    return ProbeAnswer(tokens=probe.tokens, logprobs=tuple(map(str, probe.logprobs)), template_hash=template)


@pytest.mark.parametrize(
    ("logprobs", "template", "opens"),
    [
        (make_probe(3).logprobs, make_pod().template_hash, True),
        ((-1.0, -2.0, -0.5, -3.0, -9.0), make_pod().template_hash, False),
        ((-1.0, -2.0, -0.5, -3.0, -9.0), "another template", True),
    ],
)
def test_where_nobody_serves_the_answer_recorded_with_the_commit_is_the_measure(
    logprobs: tuple[float, ...], template: str, *, opens: bool
) -> None:
    status = RolloutEngineStatus(epoch=EPOCH, committed=make_committed(3, probe=record(template)))
    alone = make_state(3, open=False, epoch=EPOCH, probe=make_probe(3, EPOCH, logprobs=logprobs))
    guards = {"pod-0": make_guard(alone)}
    decision = plan(make_observed(make_fleet(status=status), pods=(make_pod(0),), guards=guards), NOW)
    assert any(isinstance(each, GuardCall) and isinstance(each.command, Open) for each in decision.actions) is opens
    if not opens:
        state, text = details(decision)["qwen-0-0-abc0"]
        assert state == "Broken"
        assert "qwen-0-0-abc0 and the commit of version 3 differ by 8.75" in text
        assert "delete the pod to have it load this one anew" in text


def test_who_serves_is_the_measure_before_the_record() -> None:
    """A cause that all share, a changed image under one tag for instance, keeps nobody out who is like the rest."""
    changed = make_probe(3, EPOCH, logprobs=(-7.0,) * 5)
    status = RolloutEngineStatus(epoch=EPOCH, committed=make_committed(3, probe=record(make_pod().template_hash)))
    serving = make_state(3, epoch=EPOCH, probe=changed, incarnation="inc-0")
    joiner = make_state(3, open=False, epoch=EPOCH, probe=changed)
    guards = {"pod-0": make_guard(serving), "pod-1": make_guard(joiner)}
    decision = plan(make_observed(make_fleet(status=status), pods=(make_pod(0), make_pod(1)), guards=guards), NOW)
    assert isinstance(told(decision), Open)


def test_a_joiner_is_asked_for_the_recorded_probe() -> None:
    status = RolloutEngineStatus(
        epoch=EPOCH, committed=make_committed(3, probe=record("").model_copy(update={"tokens": (8, 9)}))
    )
    loaded = closed(weights=make_weights(3, WeightsState.LOADED))
    guards = {"pod-1": make_guard(loaded)}
    decision = plan(make_observed(make_fleet(status=status), pods=(make_pod(1),), guards=guards), NOW)
    verify = told(decision)
    assert isinstance(verify, Verify)
    assert verify.probe_tokens == (8, 9)


def test_a_version_that_is_stored_nowhere_is_waited_for() -> None:
    pods = (make_pod(0), make_pod(1))
    status = RolloutEngineStatus(epoch=EPOCH, committed=make_committed(3, checkpoint=None))
    guards = {"pod-0": make_guard(make_state(3, epoch=EPOCH, incarnation="inc-0")), "pod-1": make_guard(closed())}
    decision = plan(make_observed(make_fleet(status=status), pods=pods, guards=guards), NOW)
    assert told(decision) is None
    assert details(decision)["qwen-1-0-abc1"][0] == "WaitingForWeights"


def test_a_failure_is_repeated_with_back_off_and_told_in_its_own_words() -> None:
    failure = Failure(reason=FailureReason.CHECKPOINT_INCOMPLETE, message="model.safetensors is truncated")
    operation = make_operation(OperationName.PREPARE, OperationStatus.FAILED, epoch=EPOCH, version=3, failure=failure)
    waiting = plan(observed(closed(operation=operation), setbacks=3, last_setback=NOW), NOW)
    assert told(waiting) is None
    assert waiting.wake_at is not None
    assert (waiting.wake_at - NOW).total_seconds() == 4
    state, text = details(waiting)["qwen-1-0-abc1"]
    assert (state, text) == ("CatchingUp", "CheckpointIncomplete: model.safetensors is truncated")
    again = plan(observed(closed(operation=operation), setbacks=3, last_setback=NOW), waiting.wake_at)
    assert isinstance(told(again), Prepare)


def test_what_failed_under_an_older_epoch_holds_nothing_up() -> None:
    refused = {"refusals": (("Prepare", "busy"),), "setbacks": 9, "last_setback": NOW}
    for epoch, given in ((EPOCH - 1, Prepare), (EPOCH, None), (None, None)):
        decision = plan(observed(closed(), **refused, setback_epoch=epoch), NOW)
        command = told(decision)
        assert isinstance(command, given) if given else command is None


def test_a_refusal_does_not_make_a_hot_loop() -> None:
    refused = {"refusals": (("Arm", "busy"),), "setbacks": 2, "last_setback": NOW}
    operation = make_operation(OperationName.CLOSE, OperationStatus.SUCCEEDED, epoch=4, version=3)
    decision = plan(observed(closed(staged=staged(), operation=operation), **refused), NOW)
    assert isinstance(told(decision), Close), "a guard that refuses Arm was paused under an older epoch"


def test_where_close_and_arm_were_refused_close_comes_first_once_they_have_backed_off() -> None:
    """Else Arm would be refused for ever: the guard was paused under an older epoch. A Close ends that."""
    refused = {"refusals": (("Close", "busy"), ("Arm", "not quiesced")), "setbacks": 2, "last_setback": NOW}
    operation = make_operation(OperationName.PREPARE, OperationStatus.SUCCEEDED, epoch=EPOCH, version=3)
    engine = closed(staged=staged(), operation=operation)
    assert told(plan(observed(engine, **refused), NOW)) is None
    for seconds in (2, 60):
        assert isinstance(told(plan(observed(engine, **refused), NOW + timedelta(seconds=seconds))), Close)
    forgotten = refused | {"refusals": (("Close", "busy"),)}
    assert isinstance(told(plan(observed(engine, **forgotten), NOW)), Arm)


def test_an_engine_that_leaves_is_a_measure_as_long_as_it_answers() -> None:
    """Else one that answers the probe otherwise would be let in beside it."""
    odd = make_probe(3, EPOCH, logprobs=(-9.0,) * 5)
    pods = (make_pod(0, deleting=True), make_pod(1))
    serving, other = make_state(3, epoch=EPOCH), make_state(3, open=False, epoch=EPOCH, probe=odd, incarnation="inc-2")
    guards = {"pod-0": make_guard(serving), "pod-1": make_guard(other)}
    decision = plan(make_observed(fleet_at(), pods=pods, guards=guards), NOW)
    assert not [action for action in decision.actions if isinstance(action, GuardCall)]


def test_files_that_changed_since_they_were_staged_are_staged_anew_under_a_new_epoch() -> None:
    failure = Failure(reason=FailureReason.CHECKPOINT_CHANGED, message="model.safetensors has another size")
    operation = make_operation(OperationName.TRANSFER, OperationStatus.FAILED, epoch=EPOCH, version=3, failure=failure)
    state = closed(staged=staged(), armed=True, operation=operation)
    waiting = plan(observed(state, setbacks=1, last_setback=NOW), NOW)
    assert told(waiting) is None
    assert waiting.wake_at is not None
    decision = plan(observed(state, setbacks=1, last_setback=NOW), waiting.wake_at)
    assert told(decision) is None
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.epoch == EPOCH + 1


def test_a_quarantined_engine_is_not_followed_and_loses_its_label() -> None:
    decision = plan(observed(make_state(3, epoch=2**61)), NOW)
    assert told(decision) is None
    state, text = details(decision)["qwen-1-0-abc1"]
    assert state == "Broken"
    assert "quarantined" in text
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.epoch == EPOCH
    assert any(getattr(action, "serving", None) is False for action in decision.actions)
