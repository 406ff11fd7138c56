"""spec.minServing and spec.retryRequest, before, in and after a failure, and weights that are lost without one."""

import pytest

from rollfleet_operator.api.rolloutengine import Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase
from rollfleet_protocol.state import FailureReason, OperationName
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import (
    BROKEN,
    DEADLINES,
    ROLLBACK,
    SLACK_S,
    bump,
    condition,
    diagnosed,
    fail_once,
    failed,
    fleet_condition,
    make_world,
)
from tests.support.simulated_world import slow

# minServing before the pause -----------------------------------------------------------------------------------------


def test_too_few_engines_for_min_serving_make_it_wait_and_then_fail_untouched() -> None:
    world = make_world(version=1)
    bump(world, 2, min_serving=4)
    world.run(5)
    assert condition(world, "Active")[:2] == ("False", "TooFewEngines")
    assert "spec.minServing is 4 and spec.replicas 3" in condition(world, "Active")[2]
    assert world.open_versions() == [1, 1, 1]
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    assert failed(world, 2, "TooFewEngines").endswith("no weights were touched, version 1 stays")
    assert world.open_versions() == [1, 1, 1]


def test_an_engine_that_comes_up_in_time_makes_them_enough() -> None:
    world = make_world(version=1, load_s=10.0)
    world.crash(world.uid_of(0))
    world.run(1)
    bump(world, 2, min_serving=3)
    world.run(3)
    assert condition(world, "Active")[1] == "TooFewEngines"
    assert world.run(40, lambda: world.ended(2) and world.all_serve(2))


def test_an_engine_lost_while_quiescing_leaves_too_few_and_nothing_is_touched() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.CLOSE, 3.0)().seconds
    bump(world, 2, min_serving=3)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    world.crash(world.uid_of(1))
    assert world.run(10, lambda: world.ended(2))
    failed(world, 2, "TooFewEngines")
    assert world.run(30, lambda: world.all_serve(1))


def test_engines_lost_while_transferring_leave_too_few_then_on_failure() -> None:
    world = make_world(version=1, load_s=3.0)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.TRANSFER, 1.0)().seconds
    bump(world, 2, min_serving=3)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.crash(world.uid_of(1))
    assert world.run(30, lambda: world.ended(2))
    last = world.status().last_attempt
    assert last is not None
    assert last.reason == "EnginesLost"
    assert "1 engines of the update restarted or vanished (qwen-1-0-" in last.message, "and who"
    assert "spec.minServing is 3" in last.message
    assert world.status().phase is Phase.ACTIVE, "the second attempt waited for the engine that came back"
    assert world.all_serve(2)


# retryRequest --------------------------------------------------------------------------------------------------------


def test_a_retry_request_retries_a_failed_version_and_attempts_count_from_one() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-2")
    bump(world, 2)
    assert world.run(90, lambda: world.ended(2))
    world.store.faults.clear()
    bump(world, 2, retry_request="put back")
    assert world.run(30, lambda: world.status().phase is Phase.ACTIVE and world.all_serve(2))
    assert world.status().retry_request == "put back"
    assert world.status().attempt == 1
    assert [entry.outcome for entry in world.status().history][-2:] == [Outcome.FAILED, Outcome.ACTIVE]


def test_a_retry_request_is_followed_once() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-2")
    bump(world, 2, retry_request="left over")
    assert world.run(90, lambda: world.ended(2))
    ends = len(world.status().history)
    world.run(30)
    assert world.ended(2)
    for request in ("once more", "once more", ""):
        bump(world, 2, retry_request=request)
        world.run(200)
        assert world.ended(2)
    assert len(world.status().history) == ends + 1


def test_a_retry_request_that_is_withdrawn_while_it_runs_is_finished_all_the_same() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(2) and world.all_serve(1))
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2, retry_request="x")
    assert world.run(10, lambda: world.in_phase(Phase.TRANSFERRING))
    bump(world, 2)
    assert world.run(30, lambda: world.status().phase is Phase.ACTIVE)
    assert world.run(10, lambda: world.all_serve(2))


@pytest.mark.parametrize("when", [Phase.PREPARING, Phase.TRANSFERRING])
def test_a_retry_survives_an_operator_that_restarts(when: Phase) -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(2) and world.all_serve(1))
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2, retry_request="x")
    assert world.run(10, lambda: world.in_phase(when))
    world.restart_operator(down_s=30)
    assert world.run(90, lambda: world.status().phase is Phase.ACTIVE and world.all_serve(2))


# WeightsLost outside an update ---------------------------------------------------------------------------------------


def test_weights_lost_says_what_is_gone_and_the_cure_until_the_folder_is_back() -> None:
    world = make_world(replicas=2, version=1)
    world.store.faults["step-1"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-1: no such directory")
    for uid in list(world.pods):
        world.crash(uid)
    world.run(20)
    available, degraded = fleet_condition(world, "Available"), fleet_condition(world, "Degraded")
    assert (available.reason, degraded.reason, degraded.status.value) == ("WeightsLost", "WeightsLost", "True")
    assert "no engine holds version 1" in available.message
    assert "step-1: no such directory" in available.message
    assert "put 'step-1' back as it was, or raise spec.version" in available.message
    writes = world.fleet_writes
    world.run(300)
    assert {fleet_condition(world, "Available").reason} == {"WeightsLost"}
    assert world.fleet_writes - writes < 60, "told with the back-off of the retries, not more"
    world.store.faults.clear()
    assert world.run(60, lambda: world.all_serve(1))


def test_one_engine_that_holds_the_version_keeps_it_from_being_lost() -> None:
    world = make_world(replicas=2, version=1)
    world.store.faults["step-1"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-1: no such directory")
    world.crash(world.uid_of(0))
    world.run(60)
    assert world.open_versions() == [1]
    assert fleet_condition(world, "Available").reason == "Serving"
    degraded = fleet_condition(world, "Degraded")
    assert (degraded.status.value, degraded.reason) == ("True", "EnginesNotWell")
    world.run(300)
    assert fleet_condition(world, "Degraded").status.value == "True"
    told = [event.message for event in world.events if event.reason == "EnginesNotWell"]
    assert len([text for text in told if "is CatchingUp: CheckpointNotFound" in text]) == 1, "not with each try"
    assert "CatchingUp" in {finding.reason for finding in diagnosed(world)}
    world.store.faults.clear()
    assert world.run(60, lambda: world.all_serve(1))
    assert world.run(5, lambda: fleet_condition(world, "Degraded").reason == "AllWell")


def test_an_engine_that_stumbles_once_on_its_way_is_no_fault_of_the_fleet() -> None:
    world = make_world(replicas=2, version=1)
    world.crash(world.uid_of(0))
    world.pods[world.uid_of(0)].temper.fails[OperationName.TRANSFER] = BROKEN
    seen: set[str] = set()
    while not world.all_serve(1) or world.time < 10:
        world.step()
        seen.add(fleet_condition(world, "Degraded").message)
    assert not [text for text in seen if "CatchingUp" in text]


def test_a_new_fleet_has_lost_nothing() -> None:
    assert RolloutEngineStatus().committed is None
    world = make_world(replicas=1)
    world.crash(world.uid_of(0))
    world.run(0.5)
    assert fleet_condition(world, "Available").reason != "WeightsLost"
