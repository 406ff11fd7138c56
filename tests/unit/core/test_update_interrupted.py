"""Updates that are interrupted: bumped again, deleted, an operator that goes, commands that arrive late."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import Pause, PauseMode, Phase, WeightVersionStatus
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.commands import Open
from rollfleet_protocol.state import FailureReason, OperationName
from tests.support.builders import make_weight_version
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import DEADLINES, SLACK_S, bump, condition, fail_once, failed, make_world
from tests.support.simulated_world import World, slow


def test_an_open_that_is_still_on_its_way_opens_nobody_later() -> None:
    """A late joiner's Open of the old version arrives after everybody was quiesced for the new one."""
    world = make_world(version=1, load_s=2.0)
    world.crash(world.uid_of(2))
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(30, lambda: bool(world.held))
    bump(world, 2)
    assert world.run(30, lambda: world.in_phase(Phase.VERIFYING))
    assert world.release() > 0
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))


def test_a_joiner_opens_under_the_epoch_before_while_others_stage() -> None:
    """It joins while the update prepares, and what it was told then counts no more once the update goes on."""
    world = make_world(version=1, load_s=1.0)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.PREPARE, 8.0)().seconds
    world.crash(world.uid_of(2))
    bump(world, 2)
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(8, lambda: bool(world.held))
    assert world.in_phase(Phase.PREPARING)
    (call,) = {call.command for call in world.held}
    assert call.epoch < world.fleet.status.epoch
    assert world.run(30, lambda: world.in_phase(Phase.VERIFYING))
    assert world.release() > 0
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))


def test_bumped_before_the_touch_it_reopens_and_starts_anew() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 5.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING) and world.open_versions() != [1, 1, 1])
    bump(world, 3)
    assert world.run(5, lambda: world.open_versions() == [1, 1, 1])
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))
    assert [(entry.version, entry.outcome) for entry in world.status().history] == [
        (1, Outcome.ACTIVE),
        (2, Outcome.SUPERSEDED),
        (3, Outcome.ACTIVE),
    ]
    for entry in world.status().history:
        assert entry.checkpoint.endswith(str(entry.version)), "of what went on before it ended, too"
    assert world.committed_versions == [0, 1, 3]


def test_bumped_after_the_touch_it_goes_straight_on() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.05)
    bump(world, 3)
    begun = world.time
    while not world.ended(3):
        world.step()
        assert set(world.open_versions()) <= {3}, "the version before reopens no more"
        assert world.time < begun + 30
    assert world.status().history[-2].outcome is Outcome.SUPERSEDED
    assert 0 < float(world.status().history[-2].paused_seconds) < begun
    assert float(world.status().history[-1].paused_seconds) >= world.time - begun - 0.1, "it found the fleet closed"
    assert world.run(10, lambda: world.all_serve(3))
    assert world.committed_versions == [0, 1, 3]


def test_an_operator_that_has_not_heard_of_the_bump_takes_nothing_from_the_update() -> None:
    """A second operator began it: the fleet's record is read before the WeightVersion's."""
    world = make_world(version=1)
    old = world.weight_versions["qwen-policy"]
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    decision = plan(replace(world.observe(), weight_versions=(old,)), world.now)
    assert not [action for action in decision.actions if isinstance(action, GuardCall)]
    world._apply(replace(decision, weight_version_statuses=()))  # the WeightVersion's would be refused: it is old
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().history[-1].outcome is Outcome.ACTIVE


def test_bumped_while_opening_the_committed_one_counts_as_active() -> None:
    world = make_world(version=1)
    world.hold = lambda command: isinstance(command, Open) and command.version == 2
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.OPENING))
    bump(world, 3)
    world.run(0.1)
    world.release()
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))
    assert [entry.outcome for entry in world.status().history] == [Outcome.ACTIVE] * 3


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING])
def test_deleted_in_mid_update_the_fleet_returns_to_what_is_committed(phase: Phase) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(phase))
    world.run(0.2)
    del world.weight_versions["qwen-policy"]
    assert world.run(30, lambda: world.all_serve(1))
    assert world.committed_versions == [0, 1]
    assert world.run(5, lambda: all(not pod.process or not pod.process.state.staged for pod in world.pods.values()))


def test_deleted_after_the_commit_the_fleet_opens_and_stays() -> None:
    world = make_world(version=1)
    world.hold = lambda command: isinstance(command, Open)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.OPENING))
    del world.weight_versions["qwen-policy"]
    world.release()
    assert world.run(30, lambda: world.all_serve(2))


def test_one_engine_that_does_not_open_does_not_keep_it_from_being_active() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.VERIFYING))
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(5, lambda: world.in_phase(Phase.OPENING))
    world.cut_off(world.uid_of(0), 100)
    world.hold = lambda _: False
    assert world.run(70, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(100, lambda: world.all_serve(2))


@pytest.mark.parametrize(
    "phase", [Phase.PENDING, Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING]
)
def test_an_operator_that_comes_back_goes_on_where_the_one_before_was(phase: Phase) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.4
    bump(world, 2)
    if phase is not Phase.PENDING:
        assert world.run(10, lambda: world.in_phase(phase))
    world.restart_operator(down_s=90.0)
    assert world.run(200, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().phase is Phase.ACTIVE


def test_an_operator_without_any_memory_between_passes_finishes_all_the_same() -> None:
    world = make_world(version=1)
    world.forget_everything = True
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().phase is Phase.ACTIVE


def test_pods_stay_as_they_are_while_an_update_runs() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.TRANSFER, 5.0)().seconds
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.TRANSFERRING))
    spec = world.fleet.spec.model_copy(update={"replicas": 1, "image": "registry.example/engine:2"})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    pods = set(world.pods)
    while not world.ended(2):
        assert set(world.pods) == pods
        world.step()
    assert world.run(30, lambda: len(world.pods) == 1 and world.all_serve(2) and set(world.pods).isdisjoint(pods))


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING])
def test_bumped_to_what_is_not_accepted_the_fleet_returns_to_what_is_committed(phase: Phase) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(phase))
    world.run(0.1)
    bump(world, 3, path="../elsewhere")
    assert world.run(30, lambda: world.all_serve(1))
    world.run(20)
    assert condition(world, "Accepted")[:2] == ("False", "InvalidSpec")
    assert "spec.source.checkpoint.path" in condition(world, "Active")[2]
    assert world.status().phase is Phase.PENDING
    assert world.committed_versions == [0, 1]
    bump(world, 4)
    assert world.run(30, lambda: world.ended(4) and world.all_serve(4))


def test_one_that_is_accepted_again_begins_anew_with_all_its_time() -> None:
    world = make_world(version=1, load_s=20.0)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-2")
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.PREPARING))
    bump(world, 2, pause=Pause(mode=PauseMode.WAIT, drain_timeout_seconds=DEADLINES.quiesce_seconds))
    assert world.run(5, lambda: world.in_phase(Phase.PENDING))
    assert condition(world, "Accepted")[1] == "InvalidSpec"
    world.run(DEADLINES.prepare_seconds * 2)
    for uid in list(world.pods):
        world.crash(uid)
    world.run(1)
    world.store.faults.clear()
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2))
    assert (world.status().phase, world.status().attempt) == (Phase.ACTIVE, 1)


def test_made_again_under_the_same_name_it_must_name_a_higher_version() -> None:
    world = make_world(version=5)
    del world.weight_versions["qwen-policy"]
    world.run(5)
    world.apply_weight_version(make_weight_version(5, uid="made-again"))
    world.run(20)
    assert world.all_serve(5)
    assert condition(world, "Accepted")[1] == "VersionNotHigher"
    world.apply_weight_version(make_weight_version(6, uid="made-again"))
    assert world.run(30, lambda: world.ended(6) and world.all_serve(6))


def test_a_pod_that_is_being_deleted_but_whose_hook_does_not_run_stays_closed() -> None:
    """Its kubelet is gone, the engine and the network are not: only Arm keeps it from opening on the old version."""
    world = make_world(version=1)
    going = world.uid_of(2)
    world.delete_pod(going, hook_after_s=1000.0)
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    world.restart_operator(down_s=60)
    world.run(90)
    assert going in world.pods
    assert world.open_versions() == [2, 2, 2]


def lose_what_tells_of(world: World, told: Callable[[WeightVersionStatus], bool]) -> None:
    """The fleet's write of the next epoch arrives; the operator dies before the WeightVersion's."""
    write = world._write_weight_version

    def lose(name: str, status: WeightVersionStatus) -> None:
        if told(status):
            world._write_weight_version = write  # type: ignore[method-assign]
            world.restart_operator()
        else:
            write(name, status)

    world._write_weight_version = lose  # type: ignore[method-assign]


def test_an_operator_that_dies_between_the_two_writes_of_a_retry_forgets_no_touch() -> None:
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2)
    lose_what_tells_of(world, lambda status: status.attempt > 1)
    assert world.run(20, lambda: world.in_phase(Phase.TRANSFERRING))
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-2")
    assert world.run(5, lambda: world.in_phase(Phase.PREPARING))
    assert world.status().attempt == 2
    assert "attempt 1 failed: Interrupted: its epoch 3 ended in Transferring" in condition(world, "Active")[2]
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    assert failed(world, 2, "CheckpointNotFound").endswith("version 1 is restored from 'step-1'")
    assert world.run(30, lambda: world.all_serve(1))


def test_nor_one_that_dies_while_a_higher_version_goes_straight_on() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.05)
    world.store.faults["step-3"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-3")
    bump(world, 3)
    lose_what_tells_of(world, lambda status: status.version == 3)
    assert world.run(DEADLINES.prepare_seconds + 2 * SLACK_S, lambda: world.ended(3))
    assert failed(world, 3, "CheckpointNotFound").endswith("version 1 is restored from 'step-1'")
    assert world.run(30, lambda: world.all_serve(1))
