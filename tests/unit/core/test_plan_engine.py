"""Pods: names, scaling, replacement, labels."""

from dataclasses import replace
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus, UpdateStrategy
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.actions import CreatePod, Decision, DeletePod
from rollfleet_operator.core.observed import ContainerState, GuardView, Observed, PodView
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.state import OperationName
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_state,
)
from tests.support.simulated_updates import bump, fail_once, make_world
from tests.support.simulated_world import World, slow


def fleet(**spec: Any) -> RolloutEngine:
    return make_fleet(status=RolloutEngineStatus(epoch=1, committed=make_committed(0)), **spec)


def observed(
    given: RolloutEngine, *pods: PodView, closed: tuple[str, ...] = (), silent: tuple[str, ...] = ()
) -> Observed:
    """These pods; all serve but the closed and the silent ones, by uid."""
    guards: dict[str, GuardView] = {}
    for pod in pods:
        state = make_state(0, open=pod.uid not in closed, incarnation=pod.uid, closed_reason="Uncertain")
        guards[pod.uid] = make_guard(state, reachable=pod.uid not in silent)
    return make_observed(given, pods=pods, guards=guards)


def creates(decision: Decision) -> list[str]:
    return [a.manifest["metadata"]["name"] for a in decision.actions if isinstance(a, CreatePod)]


def deletes(decision: Decision) -> list[str]:
    return [a.uid for a in decision.actions if isinstance(a, DeletePod)]


def test_a_new_fleet_gets_a_pod_for_each_ordinal_with_names_that_do_not_change() -> None:
    decision = plan(make_observed(fleet(replicas=3), pods=(), guards={}), NOW)
    names = creates(decision)
    assert [name.rsplit("-", 1)[0] for name in names] == ["qwen-0-0", "qwen-1-0", "qwen-2-0"]
    assert creates(plan(make_observed(fleet(replicas=3), pods=(), guards={}), NOW)) == names


def test_names_fit_into_a_dns_label() -> None:
    long = fleet(replicas=1000)
    long = long.model_copy(update={"metadata": long.metadata.model_copy(update={"name": "q" * 40})})
    for name in creates(plan(make_observed(long, pods=(), guards={}), NOW)):
        assert len(name) <= 63


def test_scaling_down_removes_the_highest_ordinals_first() -> None:
    pods = tuple(make_pod(ordinal) for ordinal in range(4))
    decision = plan(observed(fleet(replicas=1), *pods), NOW)
    assert deletes(decision) == ["pod-3", "pod-2", "pod-1"]
    assert creates(decision) == []


def test_scaling_to_zero_removes_all() -> None:
    assert deletes(plan(observed(fleet(replicas=0), make_pod(0), make_pod(1)), NOW)) == ["pod-1", "pod-0"]


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_is_over_is_replaced_at_once_under_another_name(phase: str) -> None:
    over = make_pod(1, phase=phase, message="The node was low on resource: memory")
    first = plan(observed(fleet(), make_pod(0), over), NOW)
    assert deletes(first) == ["pod-1"]
    (name,) = creates(first)
    assert name != over.name
    assert creates(plan(observed(fleet(), make_pod(0), over), NOW)) == [name]


def test_a_pod_that_does_not_go_away_is_replaced_beside_itself() -> None:
    """A pod on a node that is gone stays Terminating until somebody confirms that it stopped."""
    stuck = make_pod(1, deleting=True)
    (name,) = creates(plan(observed(fleet(), make_pod(0), stuck), NOW))
    successor = make_pod(1, name=name, uid="pod-1b")
    assert creates(plan(observed(fleet(), make_pod(0), stuck, successor), NOW)) == []


def test_of_two_pods_in_one_place_the_one_that_serves_stays() -> None:
    twin = make_pod(1, name="qwen-1-0-zzz", uid="pod-1b", serving_label=False)
    decision = plan(observed(fleet(), make_pod(0), make_pod(1), twin, closed=("pod-1",)), NOW)
    assert deletes(decision) == ["pod-1"]


def outdated(ordinal: int, **changes: Any) -> PodView:
    return make_pod(ordinal, template_hash="old", **changes)


def test_an_outdated_pod_that_serves_is_replaced_alone_and_only_while_all_others_serve() -> None:
    pods = tuple(outdated(ordinal) for ordinal in range(3))
    assert deletes(plan(observed(fleet(replicas=3), *pods), NOW)) == ["pod-2"]
    waiting = observed(fleet(replicas=3), pods[0], pods[1], make_pod(2), closed=("pod-2",))
    assert deletes(plan(waiting, NOW)) == []
    assert deletes(plan(observed(fleet(replicas=3), pods[0], pods[1], make_pod(2)), NOW)) == ["pod-1"]


def test_as_many_may_be_out_of_service_as_the_strategy_allows() -> None:
    strategy = UpdateStrategy(max_unavailable=2)
    pods = tuple(outdated(ordinal) for ordinal in range(4))
    given = fleet(replicas=4, update_strategy=strategy)
    assert deletes(plan(observed(given, *pods), NOW)) == ["pod-3", "pod-2"]
    new = make_pod(3)
    assert deletes(plan(observed(given, *pods[:3], new, closed=("pod-3",)), NOW)) == ["pod-2"]
    assert deletes(plan(observed(given, *pods[:3], new, closed=("pod-3",), silent=("pod-0",)), NOW)) == []


def test_more_than_all_may_be_out_of_service_where_the_strategy_says_so() -> None:
    given = fleet(replicas=2, update_strategy=UpdateStrategy(max_unavailable=9))
    assert deletes(plan(observed(given, outdated(0), outdated(1)), NOW)) == ["pod-1", "pod-0"]


def test_outdated_pods_that_certainly_serve_nobody_are_replaced_at_once() -> None:
    """A fleet with a wrong image would never get a right one otherwise."""
    stuck = {"container": ContainerState.WAITING, "message": "ImagePullBackOff", "started": False, "ready": False}
    pods = tuple(outdated(ordinal, **stuck) for ordinal in range(3))
    assert deletes(plan(make_observed(fleet(replicas=3), pods=pods, guards={}), NOW)) == ["pod-0", "pod-1", "pod-2"]


def test_outdated_pods_of_which_nothing_is_known_stay() -> None:
    """An operator of a new release that has just started has heard of nobody."""
    pods = tuple(outdated(ordinal) for ordinal in range(3))
    assert deletes(plan(make_observed(fleet(replicas=3), pods=pods, guards={}), NOW)) == []
    assert deletes(plan(observed(fleet(replicas=3), *pods, silent=("pod-1",)), NOW)) == []


def test_a_fleet_that_is_not_accepted_is_left_alone() -> None:
    bad = fleet(volumes={"model": {"hostPath": {"path": "/models"}}})
    decision = plan(observed(bad, make_pod(0), make_pod(2)), NOW)
    assert creates(decision) == []
    assert deletes(decision) == []
    assert decision.fleet_status is not None
    conditions = {found.type: found for found in decision.fleet_status.status.conditions}
    assert conditions["Accepted"].reason == "HostPathNotAllowed"


def test_a_fleet_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    going = fleet()
    going = going.model_copy(update={"metadata": going.metadata.model_copy(update={"deletion_timestamp": NOW})})
    assert plan(make_observed(going, pods=(), guards={}), NOW) == Decision()


def test_a_template_change_goes_engine_by_engine() -> None:
    world = World(make_fleet(replicas=3))
    assert world.run(30, lambda: world.all_serve(0))
    before = set(world.pods)
    spec = world.fleet.spec.model_copy(update={"image": "registry.example/engine:2"})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    begun = world.time
    while not (world.all_serve(0) and before.isdisjoint(world.pods)):
        world.step()
        assert len(world.open_versions()) >= 2
        assert world.time < begun + 60
    world.run(5)
    assert world.all_serve(0)


@pytest.mark.parametrize("phase", [Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING])
def test_template_and_replicas_that_change_in_mid_update_wait_for_its_end(phase: Phase) -> None:
    world = make_world(replicas=3)
    bump(world, 1)
    assert world.run(30, lambda: world.in_phase(phase))
    changed = {"image": "registry.example/engine:2", "replicas": 4}
    world.fleet = world.fleet.model_copy(update={"spec": world.fleet.spec.model_copy(update=changed)})
    before = set(world.pods)
    while world.status().phase in (Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING):
        assert set(world.pods) == before
        world.step()
    assert world.ended(1)
    assert world.run(120, lambda: before.isdisjoint(world.pods) and world.all_serve(1))


def test_template_and_replicas_that_change_while_a_later_attempt_prepares_wait_for_its_end() -> None:
    world = make_world(replicas=3)
    fail_once(world, 1)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.PREPARE, 3.0)().seconds
    bump(world, 1)
    assert world.run(30, lambda: world.status().attempt == 2 and world.in_phase(Phase.PREPARING))
    changed = {"image": "registry.example/engine:2", "replicas": 2}
    world.fleet = world.fleet.model_copy(update={"spec": world.fleet.spec.model_copy(update=changed)})
    before = set(world.pods)
    while world.in_phase(Phase.PREPARING):
        world.step()
        assert set(world.pods) == before
    assert world.run(60, lambda: world.ended(1))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(120, lambda: before.isdisjoint(world.pods) and world.all_serve(1))


def test_what_is_gone_is_made_again_while_a_later_attempt_prepares() -> None:
    """Else an attempt that needs every engine (minServing) would wait for one that nobody makes."""
    world = make_world(replicas=3)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.TRANSFER, 1.0)().seconds
    bump(world, 1, min_serving=3)
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    world.delete_pod(world.uid_of(2))
    assert world.run(120, lambda: world.ended(1))
    assert (world.status().phase, world.status().attempt) == (Phase.ACTIVE, 2)
    assert world.all_serve(1)


def test_scaling_up_and_down_while_serving() -> None:
    world = World(make_fleet(replicas=1))
    assert world.run(30, lambda: world.all_serve(0))
    for replicas in (4, 2, 0, 1):
        spec = world.fleet.spec.model_copy(update={"replicas": replicas})
        world.fleet = world.fleet.model_copy(update={"spec": spec})
        assert world.run(30, lambda: world.all_serve(0))
        assert world.run(5, lambda: world.fleet.status.serving_replicas == world.fleet.spec.replicas)


def test_an_evicted_pod_of_a_fleet_that_serves_comes_back() -> None:
    world = World(make_fleet())
    assert world.run(30, lambda: world.all_serve(0))
    uid = world.uid_of(1)
    pod = world.pods[uid]
    pod.process, pod.view = None, replace(pod.view, phase="Failed", message="Evicted", started=False)
    assert world.run(30, lambda: world.all_serve(0) and uid not in world.pods)
