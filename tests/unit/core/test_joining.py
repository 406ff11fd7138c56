"""Engines that join a fleet which serves: nothing stale is answered, and labels follow membership."""

from rollfleet_protocol.state import FailureReason, OperationName
from tests.support.builders import make_fleet, make_weight_version
from tests.support.simulated_engine import fault
from tests.support.simulated_world import World, slow


def test_c01_a_replaced_engine_answers_nobody_before_it_holds_the_version() -> None:
    world = World(make_fleet(replicas=3))
    world.apply_weight_version(make_weight_version(5))
    assert world.run(60, lambda: world.ended(5) and world.all_serve(5))
    gone = world.uid_of(1)
    world.delete_pod(gone)
    counts = set()
    begun = world.time
    while not world.all_serve(5):
        world.step()
        assert set(world.open_versions()) == {5}
        counts.add(world.fleet.status.serving_replicas)
        assert world.time < begun + 30
    assert 2 in counts
    assert gone not in world.pods
    assert all(pod.view.serving_label for pod in world.pods.values()) or world.run(1)


def test_c05_a_removed_label_is_restored_and_the_gate_never_depended_on_it() -> None:
    world = World(make_fleet())
    assert world.run(30, lambda: world.all_serve(0))
    world.run(1)
    uid = world.uid_of(0)
    world.change(uid, serving_label=False)
    assert world.run(10, lambda: world.pods[uid].view.serving_label)
    world.change(uid, ready=False)
    world.run(1)
    assert world.all_serve(0)


def test_an_engine_that_crashes_loses_its_label_until_it_serves_again() -> None:
    world = World(make_fleet(), load_s=5.0)
    assert world.run(30, lambda: world.all_serve(0))
    world.run(1)
    uid = world.uid_of(0)
    world.crash(uid)
    assert world.run(3, lambda: not world.pods[uid].view.serving_label)
    assert world.run(30, lambda: world.all_serve(0) and world.pods[uid].view.serving_label)


def test_the_label_stays_in_an_ordinary_update() -> None:
    world = World(make_fleet())
    world.temper = slow(OperationName.TRANSFER, 2.0)
    assert world.run(30, lambda: world.all_serve(0) and all(pod.view.serving_label for pod in world.pods.values()))
    world.apply_weight_version(make_weight_version(1))
    while not world.all_serve(1):
        world.step()
        assert all(pod.view.serving_label for pod in world.pods.values())


def test_an_engine_that_can_not_read_the_checkpoint_is_told_and_joins_when_it_can() -> None:
    world = World(make_fleet())
    world.apply_weight_version(make_weight_version(1))
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    world.store.faults["step-1"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-1 was cleaned up")
    world.crash(world.uid_of(0))
    passes = len(world.decisions)
    world.run(120)
    assert len(world.decisions) - passes < 200, "retries back off"
    assert world.open_versions() == [1]
    (detail,) = world.fleet.status.engines.details
    assert (detail.state, detail.message) == ("CatchingUp", "CheckpointNotFound: step-1 was cleaned up")
    world.store.faults.clear()
    assert world.run(60, lambda: world.all_serve(1))
