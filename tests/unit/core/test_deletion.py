"""C22: either object is deleted, and made again, at any point. There are no finalizers: nothing holds anything up."""

from datetime import timedelta

import pytest

from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.plan import plan, plan_orphan
from rollfleet_protocol.state import OperationName
from tests.support.builders import NOW, WEIGHT_VERSION, make_fleet, make_weight_version
from tests.support.simulated_updates import DEADLINES, bump, make_world
from tests.support.simulated_world import World, slow

PHASES = (Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING)
LONGEST_S = sum(DEADLINES.model_dump().values()) + 120
SLOW = (OperationName.PREPARE, OperationName.CLOSE, OperationName.TRANSFER, OperationName.VERIFY)


def delete_weight_version(world: World) -> None:
    del world.weight_versions[WEIGHT_VERSION]


def recreate(world: World, version: int) -> None:
    """kubectl apply after kubectl delete: another uid, no status, the same spec."""
    created = NOW + timedelta(seconds=world.time)
    again = make_weight_version(version, uid=f"again-{world.time}", created=created, deadlines=DEADLINES)
    world.weight_versions[WEIGHT_VERSION] = again


def recreate_fleet(world: World, replicas: int) -> None:
    """Deleted and made again under its name. The garbage collector takes the pods; the WeightVersion stays."""
    fleet = make_fleet(replicas=replicas)
    meta = fleet.metadata.model_copy(
        update={"uid": "another-fleet-uid", "creation_timestamp": NOW + timedelta(seconds=world.time)}
    )
    world.fleet = fleet.model_copy(update={"metadata": meta})
    world.pods.clear()
    world.views.clear()
    world.children.clear()


def in_mid_update(phase: Phase, step: OperationName | None = None) -> World:
    """Version 1 is served, and the update to 2 is in this phase."""
    world = make_world(replicas=3, version=1)
    if step is not None:
        for pod in world.pods.values():
            pod.temper.seconds = slow(step, 5.0)().seconds
    bump(world, 2)
    assert world.run(60, lambda: world.in_phase(phase))
    return world


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [None, *SLOW])
def test_a_weight_version_that_is_deleted_in_mid_update(phase: Phase, step: OperationName | None) -> None:
    """The fleet goes on with what is committed, whatever was on its way."""
    world = in_mid_update(phase, step)
    delete_weight_version(world)
    committed = world.fleet.status.committed
    assert committed is not None
    assert committed.version == (2 if phase is Phase.OPENING else 1)
    assert world.run(LONGEST_S, lambda: world.all_serve(committed.version))
    world.run(10)
    assert world.fleet.status.serving_replicas == 3
    writes = world.fleet_writes
    world.run(60)
    assert world.fleet_writes == writes


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("after_s", [0.0, 3.0])
def test_a_weight_version_that_is_deleted_and_made_again(phase: Phase, after_s: float) -> None:
    world = in_mid_update(phase, OperationName.TRANSFER)
    delete_weight_version(world)
    if after_s:
        world.run(after_s)
    recreate(world, 2 if phase is not Phase.OPENING else 3)
    version = world.weight_versions[WEIGHT_VERSION].spec.version
    assert world.run(LONGEST_S, lambda: world.ended(version) and world.all_serve(version))
    committed = world.fleet.status.committed
    assert committed is not None
    assert committed.weight_version_uid == world.weight_versions[WEIGHT_VERSION].metadata.uid


def test_one_of_the_committed_version_that_is_made_again_has_nothing_to_do() -> None:
    """Its version does not exceed the committed one: it says so, and nothing is touched."""
    world = make_world(replicas=2, version=1)
    delete_weight_version(world)
    world.run(5)
    recreate(world, 1)
    assert world.run(10, lambda: world.status().observed_generation == 1)
    (accepted,) = (one for one in world.status().conditions if one.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "VersionNotHigher")
    assert world.all_serve(1)


@pytest.mark.parametrize("phase", PHASES)
def test_a_fleet_that_is_deleted_and_made_again_in_mid_update(phase: Phase) -> None:
    """What its WeightVersion remembers is of the fleet before: the new one begins with version 0, and gets there."""
    world = in_mid_update(phase)
    recreate_fleet(world, 2)
    assert world.run(LONGEST_S, lambda: world.ended(2) and world.all_serve(2))
    assert world.committed_versions[-2:] == [0, 2]


@pytest.mark.parametrize("phase", PHASES)
def test_both_are_deleted_and_made_again(phase: Phase) -> None:
    world = in_mid_update(phase)
    delete_weight_version(world)
    recreate_fleet(world, 2)
    recreate(world, 1)
    assert world.run(LONGEST_S, lambda: world.ended(1) and world.all_serve(1))


def test_a_fleet_that_is_being_deleted_gets_no_commands_and_no_writes() -> None:
    """The garbage collector takes its children; an engine that drains must not be told anything else."""
    world = in_mid_update(Phase.TRANSFERRING, OperationName.TRANSFER)
    meta = world.fleet.metadata.model_copy(update={"deletion_timestamp": NOW})
    world.fleet = world.fleet.model_copy(update={"metadata": meta})
    assert plan(world.observe(), world.now) == Decision()


def test_a_weight_version_whose_fleet_is_gone_says_so() -> None:
    world = in_mid_update(Phase.VERIFYING)
    orphan = world.weight_versions[WEIGHT_VERSION]
    (write,) = plan_orphan(orphan, world.now).weight_version_statuses
    (accepted,) = (one for one in write.status.conditions if one.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "EngineNotFound")
    assert write.status.phase is Phase.PENDING, "nothing is under way"
    told = orphan.model_copy(update={"status": write.status})
    assert plan_orphan(told, world.now) == Decision(), "once"
