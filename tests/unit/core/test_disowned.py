"""An operator that was installed anew: the guards of the pods before it refuse its ServiceAccount."""

from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.actions import DeletePod
from rollfleet_operator.core.observed import GuardView, Observed, PodView
from rollfleet_operator.core.plan import plan
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_state,
)
from tests.support.simulated_updates import DEADLINES, bump, make_world
from tests.support.simulated_world import World

ANOTHER = "another-operator-uid"
REFUSED = "system:serviceaccount:rollfleet:rollfleet-operator (uid b) does not control this engine"
EACH_S = 10.0  # a simulated pod is up and serves sooner


def refusing(**changes: Any) -> GuardView:
    return GuardView(state=None, reachable=False, last_contact=None, error=REFUSED, disowned=True, **changes)


def observed(*engines: tuple[PodView, GuardView], epoch: int = 1, committed: bool = True) -> Observed:
    status = RolloutEngineStatus(epoch=epoch, committed=make_committed(0) if committed else None)
    pods = tuple(pod for pod, _ in engines)
    guards = {pod.uid: guard for pod, guard in engines}
    return make_observed(make_fleet(status=status, replicas=len(pods)), pods=pods, guards=guards)


def old(ordinal: int) -> tuple[PodView, GuardView]:
    return make_pod(ordinal, template_hash="old"), refusing()


def new(ordinal: int, **state: Any) -> tuple[PodView, GuardView]:
    return make_pod(ordinal), make_guard(make_state(0, incarnation=f"inc-{ordinal}", **state))


def deletes(given: Observed) -> list[str]:
    return [action.uid for action in plan(given, NOW).actions if isinstance(action, DeletePod)]


def test_one_goes_at_a_time_and_the_next_when_its_successor_serves() -> None:
    assert deletes(observed(old(0), old(1), old(2))) == ["pod-2"]
    assert deletes(observed(old(0), old(1), new(2, open=False))) == []
    assert deletes(observed(old(0), old(1), new(2))) == ["pod-1"]


def test_who_is_silent_for_another_reason_is_waited_for() -> None:
    silent = make_pod(0, template_hash="old"), make_guard(reachable=False, error="connection refused")
    assert deletes(observed(silent, old(1), old(2))) == []


def test_a_guard_of_a_pod_that_is_made_as_asked_for_is_left_alone() -> None:
    """It refuses us for a reason that no other pod cures."""
    assert deletes(observed((make_pod(0), refusing()), (make_pod(1), refusing()))) == []


def test_where_the_record_is_lost_too_nobody_goes() -> None:
    assert deletes(observed(old(0), old(1), epoch=7, committed=False)) == []


def test_the_status_says_it_in_the_guards_own_words() -> None:
    write = plan(observed(old(0), old(1)), NOW).fleet_status
    assert write is not None
    assert [(each.state, each.message) for each in write.status.engines.details] == [("Unreachable", REFUSED)] * 2


def replaced(world: World, before: set[str], version: int) -> bool:
    return world.all_serve(version) and before.isdisjoint(world.pods)


def test_a_fleet_that_serves_goes_on_serving_while_it_gets_pods_that_obey() -> None:
    world = make_world(replicas=3, version=1)
    before = set(world.pods)
    world.replace_operator(ANOTHER)
    end = world.time + 3 * EACH_S
    while not replaced(world, before, 1):
        world.step()
        assert len(world.open_versions()) >= 2
        assert world.time < end
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))


def test_a_fleet_that_has_not_committed_yet_gets_pods_that_obey() -> None:
    world = World(make_fleet(replicas=2))
    assert world.run(10, lambda: any(pod.process is not None for pod in world.pods.values()))
    assert world.fleet.status.committed is None
    before = set(world.pods)
    world.replace_operator(ANOTHER)
    assert world.run(2 * EACH_S, lambda: replaced(world, before, 0))


@pytest.mark.parametrize(
    "phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING]
)
def test_in_mid_update_the_update_ends_first(phase: Phase) -> None:
    world = make_world(replicas=3, version=1)
    before = set(world.pods)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(phase))
    world.replace_operator(ANOTHER)
    while world.status().phase in (Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING):
        assert set(world.pods) == before
        world.step()
    longest = sum(DEADLINES.model_dump().values()) + 60
    assert world.run(longest, lambda: world.ended(2))
    version = 2 if world.status().phase is Phase.ACTIVE else 1
    assert version == (2 if phase is Phase.OPENING else 1)
    assert world.run(3 * EACH_S, lambda: replaced(world, before, version))
