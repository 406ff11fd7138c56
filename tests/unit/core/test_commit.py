"""What is committed where no update says so: a new fleet, and a lost record."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import Outcome, Previous, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Deadlines, HistoryEntry, Phase, WeightVersionStatus
from rollfleet_operator.core.actions import Decision, GuardCall
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.observed import GuardView, Observed
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.commands import Command, Verify
from rollfleet_protocol.state import (
    EngineState,
    Failure,
    FailureReason,
    OperationName,
    OperationStatus,
    WeightsState,
)
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_operation,
    make_pod,
    make_probe,
    make_state,
    make_weight_version,
    make_weights,
)
from tests.support.simulated_world import World

OTHER_BYTES = make_weights(7).model_copy(update={"digest": "sha256:other"})
ODD = (-1.0, -2.0, -0.5, -3.0, -9.0)


def fleet_of(epoch: int = 0) -> Any:
    return make_fleet(status=RolloutEngineStatus(epoch=epoch))


def observed(epoch: int, *states: EngineState | None, **changes: Any) -> Observed:
    """A fleet without a commit record, whose engines say this; None: silent."""
    pods = tuple(make_pod(ordinal) for ordinal in range(len(states)))
    silent = GuardView(state=None, reachable=False, last_contact=None, error="timed out")
    guards = {pod.uid: silent if state is None else make_guard(state) for pod, state in zip(pods, states, strict=True)}
    return make_observed(fleet_of(epoch), pods=pods, guards=guards, **changes)


def initial(**changes: Any) -> EngineState:
    """An engine that has loaded model.path."""
    weights = make_weights(None, WeightsState.INITIAL)
    given = {"open": False, "closed_reason": "Starting", "epoch": 0, "weights": weights, "probe": None}
    return make_state(None, **(given | changes))


def verified(**changes: Any) -> EngineState:
    """An engine that has answered the probe under model.path."""
    return make_state(0, **({"open": False, "closed_reason": "Starting"} | changes))


def commands(decision: Decision) -> list[Command]:
    return [action.command for action in decision.actions if isinstance(action, GuardCall)]


def status(decision: Decision) -> RolloutEngineStatus:
    assert decision.fleet_status is not None
    return decision.fleet_status.status


def unknown(decision: Decision) -> str:
    """Nothing is committed, nobody is commanded, and the condition says so; its message."""
    told = status(decision)
    assert told.committed is None
    assert commands(decision) == []
    condition = find(told.conditions, "Available") or find((), "")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "CommitUnknown")
    return condition.message


def test_a_new_fleet_records_epoch_one_before_it_asks() -> None:
    decision = plan(observed(0, initial(), initial()), NOW)
    assert status(decision).epoch == 1
    assert commands(decision) == []


def test_then_every_engine_that_is_up_answers_the_probe() -> None:
    decision = plan(observed(1, initial(), initial(epoch=1)), NOW)
    assert [type(command) for command in commands(decision)] == [Verify, Verify]
    assert {command.epoch for command in commands(decision)} == {1}


def test_it_waits_for_those_that_are_up_and_not_for_those_that_are_not() -> None:
    assert status(plan(observed(1, verified(), initial(epoch=1)), NOW)).committed is None
    seen = observed(1, verified(), None)
    loading = replace(seen, pods=(seen.pods[0], replace(seen.pods[1], started=False)))
    committed = status(plan(loading, NOW)).committed
    assert committed is not None
    assert (committed.version, committed.digest, committed.checkpoint) == (0, None, None)


def test_it_waits_for_an_engine_that_may_be_open_and_does_not_answer() -> None:
    """Where status, WeightVersion and this guard's word are lost together, the fleet looks new and is not."""
    told = status(plan(observed(1, verified(), None), NOW))
    assert told.committed is None
    condition = find(told.conditions, "Available")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "CommitUnknown")
    assert "qwen-1" in condition.message


@pytest.mark.parametrize(("ready_for_s", "alarm"), [(29, False), (30, True)])
def test_a_guard_that_is_about_to_be_met_is_no_cause_for_alarm(ready_for_s: int, alarm: bool) -> None:
    seen = observed(1, verified(), None)
    since = NOW - timedelta(seconds=ready_for_s)
    decision = plan(replace(seen, pods=(seen.pods[0], replace(seen.pods[1], ready_since=since))), NOW)
    told = status(decision)
    assert told.committed is None
    condition = find(told.conditions, "Available")
    assert condition is not None
    assert (condition.reason == "CommitUnknown") is alarm
    assert alarm or (decision.wake_at is not None and decision.wake_at <= since + timedelta(seconds=30))


def test_an_engine_that_fails_the_probe_does_not_keep_the_others_from_serving() -> None:
    failure = Failure(reason=FailureReason.PROBE_FAILED, message="token 11 is outside the vocabulary")
    operation = make_operation(OperationName.VERIFY, OperationStatus.FAILED, failure=failure)
    broken = initial(epoch=1, operation=operation)
    assert status(plan(observed(1, verified(), broken), NOW)).committed is not None
    nobody = plan(observed(1, broken), NOW)
    assert "token 11" in str(find(status(nobody).conditions, "Available"))


def test_engines_that_disagree_from_the_start_are_named_and_nothing_is_committed() -> None:
    other = verified(probe=make_probe(0, logprobs=(-9.0, -2.0, -0.5, -3.0, -0.25)))
    told = status(plan(observed(1, verified(), other), NOW))
    assert told.committed is None
    condition = find(told.conditions, "Degraded")
    assert condition is not None
    assert condition.reason == "ProbesDisagree"
    assert "qwen-0-0-abc0 and qwen-1-0-abc1" in condition.message


def test_one_that_answers_unlike_the_majority_is_named_in_the_first_commit() -> None:
    other = verified(probe=make_probe(0, logprobs=(-9.0, -2.0, -0.5, -3.0, -0.25)), incarnation="odd")
    told = status(plan(observed(1, other, verified(), verified()), NOW))
    assert told.committed is not None
    assert told.committed.excluded == ("odd",)


def test_an_engine_that_never_answers_the_probe_is_waited_for_in_its_time_only() -> None:
    seen = observed(1, verified(), initial(epoch=1))
    waiting = plan(seen, NOW)
    assert status(waiting).committed is None
    assert waiting.wake_at is not None
    due = timedelta(seconds=seen.fleet.spec.startup.timeout_seconds + Deadlines().verify_seconds)
    assert status(plan(seen, NOW + due)).committed is not None


def test_nobody_is_opened_in_the_pass_that_commits() -> None:
    assert commands(plan(observed(1, verified(), verified()), NOW)) == []


def test_a_lost_record_is_found_at_the_open_engines() -> None:
    weight_version = make_weight_version(7)
    decision = plan(
        observed(0, make_state(7, epoch=41), make_state(7, epoch=40), weight_versions=(weight_version,)), NOW
    )
    committed = status(decision).committed
    assert committed is not None
    assert (committed.version, committed.digest, committed.checkpoint) == (7, "sha256:step-7", "step-7")
    assert committed.weight_version_uid == weight_version.metadata.uid
    assert status(decision).epoch == 42
    assert commands(decision) == []


def test_a_lost_record_waits_for_engines_that_may_be_open() -> None:
    message = unknown(plan(observed(0, make_state(7, epoch=41), None), NOW))
    assert "qwen-1-0-abc1 may be open and does not answer" in message


def test_a_lost_record_with_nobody_open_stays_closed_and_says_how_to_decide() -> None:
    message = unknown(plan(observed(0, initial(epoch=41), initial(epoch=3)), NOW))
    assert "raise spec.version" in message


def test_a_record_lost_in_the_middle_of_a_roll_is_found_again_with_both_versions() -> None:
    """Nobody opens before the commit is recorded, so the higher version is the commit."""
    decision = plan(observed(0, make_state(6, epoch=41), make_state(7, epoch=41), make_state(6, epoch=41)), NOW)
    committed = status(decision).committed
    assert committed is not None
    assert (committed.version, committed.digest, committed.probe) == (7, "sha256:step-7", None)
    assert committed.previous == Previous(version=6, digest="sha256:step-6")


@pytest.mark.parametrize(
    "states",
    [
        (make_state(7, epoch=41), make_state(7, epoch=41, weights=OTHER_BYTES)),
        (make_state(5, epoch=41), make_state(6, epoch=41), make_state(7, epoch=41)),
    ],
)
def test_open_engines_that_disagree_decide_nothing(states: tuple[EngineState, ...]) -> None:
    assert "different weights (qwen-0-0-abc0 at " in unknown(plan(observed(0, *states), NOW))


@pytest.mark.parametrize(("answered", "kept"), [((None, None), True), ((None, ODD, None), True), ((None,), False)])
def test_the_commit_of_a_new_fleet_keeps_an_answer_that_two_gave(
    answered: tuple[tuple[float, ...] | None, ...], *, kept: bool
) -> None:
    probes = [make_probe(0, 1) if odd is None else make_probe(0, 1, logprobs=odd) for odd in answered]
    states = [verified(probe=probe, epoch=1, incarnation=f"inc-{n}") for n, probe in enumerate(probes)]
    committed = status(plan(observed(1, *states), NOW)).committed
    assert committed is not None
    if not kept:
        assert committed.probe is None
        return
    assert committed.probe is not None
    assert committed.probe.tokens == probes[0].tokens
    assert tuple(map(float, committed.probe.logprobs)) == probes[0].logprobs
    assert committed.probe.template_hash == make_pod(0).template_hash


@pytest.mark.parametrize(("logprobs", "kept"), [(None, True), (ODD, False)])
def test_an_answer_that_one_engine_gave_is_kept_once_another_that_serves_gave_it_too(
    logprobs: tuple[float, ...] | None, *, kept: bool
) -> None:
    """A fleet that came up one by one, or the first batch of a roll."""
    other = make_probe(7) if logprobs is None else make_probe(7, logprobs=logprobs)
    states = (make_state(7, epoch=4, incarnation="inc-0"), make_state(7, epoch=4, incarnation="inc-1", probe=other))
    fleet = make_fleet(status=RolloutEngineStatus(epoch=4, committed=make_committed(7)))
    pods = (make_pod(0), make_pod(1))
    guards = {pod.uid: make_guard(state) for pod, state in zip(pods, states, strict=True)}
    committed = status(plan(make_observed(fleet, pods=pods, guards=guards), NOW)).committed
    assert committed is not None
    assert (committed.probe is not None) is kept
    assert committed.model_copy(update={"probe": None}) == fleet.status.committed


def test_it_is_still_unknown_after_the_epoch_was_recorded_and_the_engines_restarted() -> None:
    unknown(plan(observed(42, initial(), initial()), NOW))


@pytest.mark.parametrize(("age_s", "is_new"), [(-60, True), (60, False)])
def test_a_weight_version_remembers_updates_of_this_fleet_only(age_s: float, is_new: bool) -> None:
    entry = HistoryEntry(version=3, outcome=Outcome.ACTIVE, time=NOW + timedelta(seconds=age_s))
    remembered = WeightVersionStatus(phase=Phase.ACTIVE, version=3, history=(entry,))
    decision = plan(observed(0, initial(), weight_versions=(make_weight_version(3, status=remembered),)), NOW)
    if is_new:
        assert status(decision).epoch == 1
    else:
        unknown(decision)


def lose_record(world: World) -> None:
    world.fleet = world.fleet.model_copy(update={"status": RolloutEngineStatus()})


def test_a_fleet_that_serves_goes_on_serving_when_its_status_is_lost() -> None:
    world = World(make_fleet())
    world.apply_weight_version(make_weight_version(1))
    assert world.run(60, lambda: world.all_serve(1) and world.ended(1))
    lose_record(world)
    world.check = lambda: None  # type: ignore[method-assign]  # until it is found again there is nothing to compare with
    assert world.run(10, lambda: world.fleet.status.committed is not None)
    assert world.all_serve(1)
    world.apply_weight_version(make_weight_version(2))
    assert world.run(30, lambda: world.all_serve(2) and world.ended(2))


def test_a_higher_weight_version_decides_where_nobody_knows() -> None:
    world = World(make_fleet())
    world.apply_weight_version(make_weight_version(1))
    assert world.run(60, lambda: world.all_serve(1) and world.ended(1))
    for uid in list(world.pods):
        world.crash(uid)
    lose_record(world)
    world.run(120)
    assert world.open_versions() == []
    assert world.fleet.status.committed is None
    world.apply_weight_version(make_weight_version(2))
    assert world.run(60, lambda: world.all_serve(2) and world.ended(2))


def test_a_version_of_which_nobody_knows_whether_it_is_served_is_not_called_active() -> None:
    world = World(make_fleet())
    world.apply_weight_version(make_weight_version(1))
    assert world.run(60, lambda: world.all_serve(1) and world.ended(1))
    lose_record(world)
    for uid in list(world.pods):
        world.crash(uid)
    world.restart_operator()
    world.run(60)
    assert world.open_versions() == []
    active = find(world.status().conditions, "Active")
    assert active is not None
    assert (active.status, active.reason) == ("False", "CommitUnknown")
    assert world.status().phase is Phase.ACTIVE, "what it was"
    writes = world.weight_version_writes
    world.run(300)
    assert world.weight_version_writes == writes
    world.apply_weight_version(make_weight_version(2))
    assert world.run(60, lambda: world.all_serve(2) and world.ended(2))
    active = find(world.status().conditions, "Active")
    assert active is not None
    assert active.status == "True"


def test_a_lost_record_is_found_again_where_model_path_was_loaded_at_the_start_and_read_again_since() -> None:
    """Both are version 0; only an engine that was restored from model.path knows a digest of it."""
    weights = make_weights(0).model_copy(update={"digest": "sha256:model"})
    read_again = make_state(0, epoch=4, weights=weights)
    decision = plan(observed(0, make_state(0, epoch=4), read_again), NOW)
    committed = status(decision).committed
    assert committed is not None
    assert (committed.version, committed.digest) == (0, None)
