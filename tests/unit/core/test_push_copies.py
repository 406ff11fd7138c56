"""What a trainer sent: who joins late, the stored copy, and what is stored nowhere."""

from typing import Any

import pytest

from rollfleet_operator.api.weightversion import Checkpoint, Recovery, Stored
from rollfleet_operator.core.actions import DeletePod
from tests.support.simulated_pushes import NO_RETRY, ask, make_world, push
from tests.support.simulated_trainer import digest_sent
from tests.support.simulated_updates import failed, fleet_condition
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


def _with_recovery(world: World, version: int, path: str, **spec: Any) -> None:
    ask(world, version, recovery=Recovery(checkpoint=Checkpoint(path=path)), **spec)


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


def _stored(version: int, path: str) -> dict[str, Any]:
    """What publish leaves in the spec, whatever is asked for next."""
    return {"stored": Stored(version=version, checkpoint=Checkpoint(path=path))}


def _checkpoint(world: World) -> str | None:
    committed = world.fleet.status.committed
    return None if committed is None else committed.checkpoint


@pytest.mark.parametrize("operator", ["slow", "dead"])
def test_a_copy_that_was_named_just_before_the_next_version_was_asked_for_is_not_lost(operator: str) -> None:
    """Four versions, the next one asked for before an operator has looked at the copy of the one before."""
    world = make_world()
    trainer = push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    for version in (1, 2, 3):
        copy = f"copy-{version}"
        world.store.digests[copy] = digest_sent(version)
        _with_recovery(world, version, copy, **_stored(version, copy))
        ask(world, version + 1, **_stored(version, copy))
        if operator == "dead":
            world.restart_operator(down_s=40)
        assert world.run(50, lambda: _checkpoint(world) == f"copy-{version}")  # noqa: B023 - asked at once
        trainer.offer(world, version + 1)
        assert world.run(60, lambda: world.ended(version + 1) and world.all_serve(version + 1))  # noqa: B023
    assert [each.checkpoint for each in world.status().history] == ["copy-1", "copy-2", "copy-3", ""]


def test_a_copy_that_was_moved_is_not_put_back_by_what_stored_still_says() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    for copy in ("copy-1", "moved"):
        world.store.digests[copy] = digest_sent(1)
        _with_recovery(world, 1, copy, **_stored(1, "copy-1"))
        assert world.run(10, lambda: _checkpoint(world) == copy)  # noqa: B023 - asked at once
    ask(world, 2, **_stored(1, "copy-1"))
    world.run(10)
    assert (_checkpoint(world), world.status().history[-1].checkpoint) == ("moved", "moved")


@pytest.mark.parametrize("operator", ["slow", "dead"])
def test_of_two_copies_the_later_one_counts_though_the_next_version_was_asked_for_at_once(operator: str) -> None:
    """The first one may be gone by then: who published the second one was told that it recovers the version."""
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    for copy in ("first", "second"):
        world.store.digests[copy] = digest_sent(1)
    _with_recovery(world, 1, "first", **_stored(1, "first"))
    assert world.run(10, lambda: _checkpoint(world) == "first")
    _with_recovery(world, 1, "second", **_stored(1, "second"))
    ask(world, 2, **_stored(1, "second"))
    if operator == "dead":
        world.restart_operator(down_s=40)
    assert world.run(50, lambda: _checkpoint(world) == "second")
    assert world.status().history[-1].checkpoint == "second", "a rollback finds it"


def test_a_copy_that_was_named_while_the_version_was_not_accepted_is_not_lost() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    listed = world.fleet.spec.trainers
    world.store.digests["copy-1"] = digest_sent(1)
    world.fleet = world.fleet.model_copy(update={"spec": world.fleet.spec.model_copy(update={"trainers": ()})})
    _with_recovery(world, 1, "copy-1", **_stored(1, "copy-1"))
    world.run(5)
    ask(world, 2, **_stored(1, "copy-1"))
    world.fleet = world.fleet.model_copy(update={"spec": world.fleet.spec.model_copy(update={"trainers": listed})})
    assert world.run(10, lambda: _checkpoint(world) == "copy-1")
    assert world.status().history[-1].checkpoint == "copy-1"


def test_weights_that_cannot_be_loaded_end_at_the_copy_that_was_named_just_before() -> None:
    world = make_world(2)
    trainer = push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    world.store.digests["copy-1"] = digest_sent(1)
    _with_recovery(world, 1, "copy-1", **_stored(1, "copy-1"))
    trainer.tells_digest, trainer.received = False, {1: "sha256:another"}
    push(world, 2, trainer, on_failure=NO_RETRY, **_stored(1, "copy-1"))
    assert world.run(200, lambda: world.ended(2) and world.all_serve(1))
    failed(world, 2, "DigestDisagrees")


def test_a_copy_of_another_version_or_of_another_object_says_nothing_of_what_is_committed() -> None:
    world = make_world()
    push(world, 3)
    assert world.run(60, lambda: world.ended(3) and world.all_serve(3))
    ask(world, 4, **_stored(2, "copy-2"))
    world.run(5)
    assert (_checkpoint(world), world.status().history[-1].checkpoint) == (None, "")


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
