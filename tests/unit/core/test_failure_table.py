"""The failure table of the design, row by row, with what spec.onFailure makes of it.

The row "sender's Lease expires" is about trainers and comes with them.
"""

from datetime import datetime
from itertools import pairwise

import pytest

from rollfleet_operator.api.rolloutengine import Aftermath, Outcome
from rollfleet_operator.api.weightversion import FailureType, OnFailure, Phase, Probe, VerifySpec
from rollfleet_operator.core.actions import GuardCall
from rollfleet_protocol.commands import Open, Prepare, Transfer
from rollfleet_protocol.state import FailureReason, OperationName, WeightsState
from tests.support.builders import make_committed
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import (
    BROKEN,
    DEADLINES,
    HOLD,
    ROLLBACK,
    SLACK_S,
    aftermath,
    bump,
    condition,
    fail_always,
    fail_once,
    failed,
    fleet_condition,
    make_world,
)
from tests.support.simulated_world import World, slow

OWN = {
    "cache reset": (OperationName.VERIFY, fault(FailureReason.CACHE_RESET_FAILED, "mm cache")),
    "digest": (OperationName.TRANSFER, fault(FailureReason.DIGEST_MISMATCH, "rank 1, layers.0.w: digest 00 is not 01")),
    "coverage": (OperationName.TRANSFER, fault(FailureReason.COVERAGE_FAILED, "layers.3.mlp: 12 of 16 loaded")),
    "probe": (OperationName.VERIFY, fault(FailureReason.PROBE_FAILED, "no answer")),
}


# a member changes before arming --------------------------------------------------------------------------------------


def test_a_member_changes_before_arming_new_targets_and_offsets_same_attempt_budget() -> None:
    world = make_world(version=1, load_s=2.0)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.CLOSE, 3.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    gone = world.uid_of(1)
    world.crash(gone)
    assert world.run(10, lambda: world.in_phase(Phase.TRANSFERRING))
    status = world.status()
    assert status.attempt == 1
    assert [(target.name[:6], target.rank_offset) for target in status.targets] == [("qwen-0", 1), ("qwen-2", 2)]
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))


# a member cannot be fenced -------------------------------------------------------------------------------------------


def test_a_member_cannot_be_fenced_failed_at_the_deadline_and_closed_ones_reopen() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    world.cut_off(world.uid_of(1), DEADLINES.quiesce_seconds + 30)
    assert world.run(DEADLINES.quiesce_seconds + SLACK_S, lambda: world.ended(2))
    message = failed(world, 2, "EngineUnreachable")
    assert message.endswith("no weights were touched, version 1 stays")
    assert aftermath(world) is Aftermath.REOPENED
    assert world.run(10, lambda: world.open_versions().count(1) >= 2)
    assert world.run(60, lambda: world.all_serve(1))


# transfer fails after some succeeded ---------------------------------------------------------------------------------


def test_transfer_fails_after_some_succeeded_retry_goes_on_under_the_next_epoch() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2)
    epoch = world.fleet.status.epoch
    while not world.ended(2):
        world.step()
        assert set(world.open_versions()) != {1} or world.status().attempt < 2, "closed engines stay closed"
    assert world.status().phase is Phase.ACTIVE
    assert world.status().attempt == 2
    assert world.status().epoch >= epoch + 2
    last = world.status().last_attempt
    assert last is not None
    assert (last.attempt, last.reason) == (1, "TransferFailed")
    assert world.run(10, lambda: world.all_serve(2))
    told = [event.message for event in world.events if event.reason == "TransferFailed"]
    assert len(told) == 1
    assert "attempt 1 failed, tried again" in told[0]


def test_transfer_fails_after_some_succeeded_retry_says_so_while_it_runs() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2)
    assert world.run(10, lambda: world.status().attempt == 2)
    status, reason, message = condition(world, "Active")
    assert (status, reason) == ("False", "Preparing")
    assert "Attempt 2, 1 s after the one before; attempt 1 failed: TransferFailed: qwen-1-0-" in message
    assert world.run(30, lambda: world.ended(2))


def test_transfer_fails_after_some_succeeded_retry_waits_longer_before_each_attempt() -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.fails[OperationName.TRANSFER] = BROKEN
    bump(world, 2, on_failure=OnFailure(type=FailureType.RETRY, max_attempts=5))
    tried: dict[int, datetime] = {}
    while not world.ended(2):
        world.step()
        calls = [action for action in world.decisions[-1].actions if isinstance(action, GuardCall)]
        if any(isinstance(call.command, Prepare) and call.command.version == 2 for call in calls):
            tried.setdefault(world.status().attempt, world.now)
        for pod in world.pods.values():
            pod.temper.fails[OperationName.TRANSFER] = BROKEN
    apart = [(later - earlier).total_seconds() for earlier, later in pairwise(tried.values())]
    assert [wait <= seconds < wait + 1.5 for wait, seconds in zip((1, 2, 4, 8), apart, strict=True)] == [True] * 4
    assert world.status().attempt == 5
    failed(world, 2, "TransferFailed")


def test_transfer_fails_after_some_succeeded_retry_reads_membership_again() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 10.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    fail_once(world, 0)
    world.run(1)
    world.load_s = 300.0
    world.crash(world.uid_of(1))
    assert world.run(60, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.open_versions() == [2, 2]


def test_transfer_fails_after_some_succeeded_retry_goes_on_without_an_engine_that_fell_silent() -> None:
    """It was armed: nothing opens it, so the second attempt need not wait for it while the fleet is closed."""
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.3)
    world.cut_off(world.uid_of(1), 200)
    assert world.run(DEADLINES.transfer_seconds + SLACK_S, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.open_versions() == [2, 2]
    assert world.run(300, lambda: world.all_serve(2))


def test_an_operator_that_never_heard_of_the_silent_engine_waits_for_it() -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.3)
    world.cut_off(world.uid_of(1), 400)
    world.restart_operator()
    assert world.run(DEADLINES.transfer_seconds + DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    assert failed(world, 2, "EngineUnreachable").endswith("version 1 is restored from 'step-1'")


def test_transfer_fails_after_some_succeeded_retry_ends_after_its_last_attempt() -> None:
    world = make_world(version=1)
    fail_always(world, 1)
    bump(world, 2, on_failure=OnFailure(type=FailureType.RETRY, max_attempts=2))
    assert world.run(2 * (DEADLINES.transfer_seconds + SLACK_S), lambda: world.ended(2))
    message = failed(world, 2, "DeadlineExceeded")
    assert message.startswith("attempt 2: qwen-1-0-")
    assert aftermath(world) is Aftermath.RESTORED
    world.pods[world.uid_of(1)].temper.seconds = lambda _: 0.1
    assert world.run(120, lambda: world.all_serve(1))


def test_transfer_fails_after_some_succeeded_rollback_reloads_the_version_before() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(2))
    assert failed(world, 2, "TransferFailed").endswith("version 1 is restored from 'step-1'")
    assert world.status().attempt == 1
    assert world.run(30, lambda: world.all_serve(1))


def test_transfer_fails_after_some_succeeded_else_failed_with_weights_lost() -> None:
    world = make_world(version=1)
    lose_the_record_of_where_it_is_stored(world)
    for ordinal in range(3):
        fail_once(world, ordinal)
    bump(world, 2, on_failure=OnFailure(type=FailureType.RETRY, max_attempts=1))
    assert world.run(30, lambda: world.ended(2))
    message = failed(world, 2, "WeightsLost")
    assert "TransferFailed" in message
    assert "version 1 is stored nowhere" in message
    assert aftermath(world) is Aftermath.LOST
    world.run(10)
    assert world.open_versions() == []
    available = fleet_condition(world, "Available")
    assert (available.status.value, available.reason) == ("False", "WeightsLost")
    assert "raise spec.version of the WeightVersion" in available.message
    bump(world, 3)
    assert world.run(60, lambda: world.ended(3) and world.all_serve(3))


def lose_the_record_of_where_it_is_stored(world: World) -> None:
    """As a version that a trainer pushed, without a stored copy."""
    committed = make_committed(1).model_copy(update={"checkpoint": None})
    status = world.fleet.status.model_copy(update={"committed": committed})
    world.fleet = world.fleet.model_copy(update={"status": status})
    world.stored_nowhere = {1}


def test_transfer_fails_after_some_succeeded_hold_leaves_everything_as_it_is() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2, on_failure=HOLD)
    assert world.run(30, lambda: world.ended(2))
    assert "spec.onFailure is Hold" in failed(world, 2, "TransferFailed")
    assert aftermath(world) is Aftermath.HELD
    assert world.run(5, lambda: bool(world.fleet.status.engines.details))
    told = {each.message for each in world.fleet.status.engines.details if each.state == "Uncertain"}
    assert told == {"stays closed as it is: an update failed, and its onFailure is Hold"}
    held = [pod.process.resident for pod in world.pods.values() if pod.process]
    world.run(120)
    assert world.open_versions() == []
    assert [pod.process.resident for pod in world.pods.values() if pod.process] == held
    available = fleet_condition(world, "Available")
    assert available.reason == "Held"
    assert "until a higher version, a new spec.retryRequest, or the deletion" in available.message
    assert {detail.state for detail in world.fleet.status.engines.details} == {"Uncertain"}


@pytest.mark.parametrize("cure", ["a higher version", "a retry request", "deletion", "another policy"])
def test_what_is_held_is_released(cure: str) -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2, on_failure=HOLD)
    assert world.run(30, lambda: world.ended(2))
    world.run(5)
    if cure == "a higher version":
        bump(world, 3, on_failure=HOLD)
    elif cure == "a retry request":
        bump(world, 2, on_failure=HOLD, retry_request="now")
    elif cure == "another policy":
        bump(world, 2, on_failure=ROLLBACK)
    else:
        world.weight_versions.clear()
    serves = {"a higher version": 3, "a retry request": 2}.get(cure, 1)
    assert world.run(60, lambda: world.all_serve(serves))


def test_what_is_held_and_was_never_touched_opens_again() -> None:
    world = make_world(version=1)
    world.hold = lambda command: isinstance(command, Transfer) and command.incarnation.startswith(world.uid_of(2))
    fail_once(world, 1)
    bump(world, 2, on_failure=HOLD)
    assert world.run(30, lambda: world.ended(2))
    assert world.run(30, lambda: world.open_versions() == [1])
    world.release()
    world.run(60)
    assert world.open_versions() == [1]


# cache reset, digest, coverage or probe fails on one engine ----------------------------------------------------------


@pytest.mark.parametrize("check", OWN)
def test_a_check_fails_on_one_engine_it_is_out_and_the_rest_commit(check: str) -> None:
    step, failure = OWN[check]
    world = make_world(version=1)
    odd = world.uid_of(1)
    world.pods[odd].temper.fails[step] = failure
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.OPENING))
    process = world.pods[odd].process
    assert process is not None
    assert process.state.weights.state is WeightsState.UNCERTAIN
    assert world.run(5, lambda: world.ended(2)), "nobody waits for the one that is out"
    assert world.status().phase is Phase.ACTIVE
    assert failure.message in world.status().history[-1].message
    assert world.run(30, lambda: world.all_serve(2)), "it joins later"
    assert world.committed_versions == [0, 1, 2]


@pytest.mark.parametrize("check", OWN)
def test_a_check_fails_on_one_engine_and_min_serving_does_not_hold_then_on_failure(check: str) -> None:
    step, failure = OWN[check]
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.fails[step] = failure
    bump(world, 2, on_failure=ROLLBACK, min_serving=3)
    assert world.run(30, lambda: world.ended(2))
    assert failure.message in failed(world, 2, failure.reason.value)
    assert world.run(30, lambda: world.all_serve(1))


@pytest.mark.parametrize("check", OWN)
def test_a_check_fails_on_every_engine_then_it_is_nobodys_own(check: str) -> None:
    step, failure = OWN[check]
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.fails[step] = failure
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(2))
    failed(world, 2, failure.reason.value)
    assert world.run(30, lambda: world.all_serve(1))


def test_one_engine_answers_the_probe_unlike_the_majority_it_is_out_and_never_opens() -> None:
    world = make_world(version=1)
    bump(world, 2, verify=VerifySpec(probe=Probe(tokens=(4, 5, 6))))
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    odd = world.uid_of(2)
    world.pods[odd].temper.skew = 0.5
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(10, lambda: world.in_phase(Phase.OPENING))
    for uid in set(world.pods) - {odd}:
        world.crash(uid)  # whoever could contradict it is gone before anybody opened
    world.release()
    process = world.pods[odd].process
    assert process is not None
    assert world.fleet.status.committed is not None
    assert world.fleet.status.committed.excluded == (process.state.incarnation,)
    assert world.run(30, lambda: world.ended(2))
    assert "its answer to the probe" in world.status().history[-1].message
    assert world.run(30, lambda: world.open_versions() == [2, 2])
    world.run(60)
    assert world.open_versions() == [2, 2]
    (detail,) = world.fleet.status.engines.details
    assert (detail.state, "delete the pod" in detail.message) == ("Broken", True)
    world.pods[odd].temper.skew = 0.0
    world.delete_pod(odd)
    assert world.run(30, lambda: world.all_serve(2))


def test_an_odd_answer_counts_against_min_serving() -> None:
    world = make_world(version=1)
    bump(world, 2, min_serving=3, on_failure=ROLLBACK)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.pods[world.uid_of(2)].temper.skew = 0.5
    assert world.run(10, lambda: world.ended(2))
    assert "qwen-2-0-" in failed(world, 2, "ProbesDisagree")
    world.pods[world.uid_of(2)].temper.skew = 0.0
    assert world.run(30, lambda: world.all_serve(1))


# bumped again in mid-update ------------------------------------------------------------------------------------------


def test_bumped_again_untouched_it_reopens_and_starts() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 5.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING) and world.open_versions() != [1, 1, 1])
    bump(world, 3)
    assert world.run(5, lambda: world.open_versions() == [1, 1, 1])
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))
    assert world.status().history[-2].outcome is Outcome.SUPERSEDED


@pytest.mark.parametrize("when", ["while it transfers", "while a later attempt prepares"])
def test_bumped_again_touched_it_goes_straight_on(when: str) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.PREPARE, 2.0)().seconds
    fail_once(world, 1)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.TRANSFERRING))
    if when == "while a later attempt prepares":
        assert world.run(10, lambda: world.status().attempt == 2 and world.in_phase(Phase.PREPARING))
        world.run(0.5)
    else:
        world.run(0.05)
    bump(world, 3)
    while not world.ended(3):
        world.step()
        assert set(world.open_versions()) <= {3}, "the version before reopens no more"
        assert world.time < 120
    assert world.status().history[-2].outcome is Outcome.SUPERSEDED
    assert world.run(10, lambda: world.all_serve(3))


def test_one_that_went_straight_on_and_fails_in_preparing_restores_what_was_touched() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.05)
    world.store.faults["step-3"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-3")
    bump(world, 3)
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(3))
    assert failed(world, 3, "CheckpointNotFound").endswith("version 1 is restored from 'step-1'")
    assert world.run(30, lambda: world.all_serve(1))
