"""What a trainer sent: who joins late, the stored copy, and what is stored nowhere."""

import pytest

from rollfleet_operator.api.weightversion import Checkpoint, Recovery
from rollfleet_operator.core.actions import DeletePod
from tests.support.simulated_pushes import ask, make_world, push
from tests.support.simulated_trainer import digest_sent
from tests.support.simulated_updates import fleet_condition
from tests.support.simulated_world import World

ANOTHER = "another-operator-uid"


def test_a_late_joiner_waits_for_weights_and_is_fed_by_the_next_push() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    world.delete_pod(world.uid_of(1))
    assert world.run(60, lambda: fleet_condition(world, "WeightsCurrent").status == "False")
    world.run(30)
    assert world.open_versions() == [1, 1]
    assert "stored nowhere" in "".join(each.message for each in world.fleet.status.engines.details)
    assert world.lease.trainer is not None
    ask(world, 2)
    world.lease.trainer.offer(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))


def _with_recovery(world: World, version: int, path: str) -> None:
    ask(world, version, recovery=Recovery(checkpoint=Checkpoint(path=path)))


def test_a_copy_that_is_named_later_is_part_of_the_commit_and_feeds_late_joiners() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    world.store.digests["copy-1"] = digest_sent(1)
    _with_recovery(world, 1, "copy-1")
    assert world.run(10, lambda: world.fleet.status.committed.checkpoint == "copy-1")  # type: ignore[union-attr]
    assert world.status().history[-1].checkpoint == "copy-1", "a rollback finds it"
    world.delete_pod(world.uid_of(1))
    assert world.run(60, lambda: world.all_serve(1) and len(world.committed_versions) == 2)


def test_a_copy_that_holds_other_weights_is_not_loaded() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    _with_recovery(world, 1, "something-else")
    world.run(5)
    world.delete_pod(world.uid_of(1))
    world.run(60)
    assert world.open_versions() == [1, 1]


def test_joiners_catch_up_while_an_update_waits_for_its_sender() -> None:
    world = make_world()
    ask(world, 1)
    world.run(5)
    world.delete_pod(world.uid_of(2))
    assert world.run(40, lambda: len(world.pods) == 3 and world.all_serve(0))
    assert not world.ended(1)


# --- an operator that was installed anew


def _deletes(world: World) -> int:
    return sum(isinstance(call, DeletePod) for each in world.decisions for call in each.actions)


@pytest.mark.parametrize("replicas", [1, 3])
def test_pods_of_another_operator_stay_where_what_they_hold_is_stored_nowhere_and_the_status_says_what_helps(
    replicas: int,
) -> None:
    world = make_world(replicas)
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    before = set(world.pods)
    world.replace_operator(ANOTHER)
    world.run(60)
    assert (set(world.pods), world.open_versions()) == (before, [1] * replicas)
    details = world.fleet.status.engines.details
    assert [each.state for each in details] == ["Unreachable"] * replicas
    for each in details:
        assert "version 1 is stored nowhere, so this pod is not replaced: name a copy in spec.recovery" in each.message
        assert "or delete such pods and let a trainer send the next version" in each.message
    assert "stored nowhere" in fleet_condition(world, "Degraded").message
    assert _deletes(world) == 0


def test_a_copy_that_is_named_lets_them_be_replaced() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    before = set(world.pods)
    world.replace_operator(ANOTHER)
    world.run(10)
    world.store.digests["copy-1"] = digest_sent(1)
    _with_recovery(world, 1, "copy-1")
    assert world.run(60, lambda: world.all_serve(1) and before.isdisjoint(world.pods))


def test_who_deletes_them_all_is_told_to_let_a_trainer_send_the_next_version_which_serves() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    world.replace_operator(ANOTHER)
    for uid in list(world.pods):
        world.delete_pod(uid)
    assert world.run(60, lambda: fleet_condition(world, "Available").reason == "WeightsLost")
    told = fleet_condition(world, "Available").message
    assert "no engine holds version 1, and it is stored nowhere: let a trainer send the next version" in told
    push(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
