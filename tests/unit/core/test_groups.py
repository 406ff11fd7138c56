"""Engines of several pods: what belongs together, what becomes of the others, and who gives places back."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_operator.api.launch import Parallelism
from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus, UpdateStrategy
from rollfleet_operator.core.actions import CreatePod, Decision, DeletePod, StopPod
from rollfleet_operator.core.objects.pod import template_hash
from rollfleet_operator.core.observed import ContainerState, Observed, PodView
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.policies import PLACES_S
from rollfleet_operator.core.vanished import to_follow
from rollfleet_operator.core.world import Fence, build_world
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_settings,
    make_state,
)

NODES = 3
WORDS = "0/4 nodes are available: 4 Insufficient huawei.com/Ascend910."
DOWN: dict[str, Any] = {"ready": False, "started": False}
UNPLACED: dict[str, Any] = {
    **DOWN,
    "phase": "Pending",
    "container": ContainerState.UNKNOWN,
    "node": "",
    "ip": "",
    "unschedulable": True,
    "message": WORDS,
}


def fleet(replicas: int = 1, **spec: Any) -> RolloutEngine:
    status = RolloutEngineStatus(epoch=1, committed=make_committed(0))
    parallelism = Parallelism(tensor=NODES, nodes=NODES)
    return make_fleet(status=status, replicas=replicas, **({"parallelism": parallelism} | spec))


def leader(ordinal: int = 0, **changes: Any) -> PodView:
    return make_pod(ordinal, **({"template_hash": template_hash(fleet(), make_settings())} | changes))


def peer(index: int, of: PodView, **changes: Any) -> PodView:
    name = f"qwen-{of.ordinal}-{index}-peer{index}"
    fields = {"name": name, "uid": f"{of.uid}-{index}", "ip": f"198.51.100.{100 + 10 * of.ordinal + index}"}
    return leader(of.ordinal, **(fields | {"node_index": index, "leader": of.name} | changes))


def whole(ordinal: int = 0, **changes: Any) -> tuple[PodView, ...]:
    """An engine with all its pods."""
    first = leader(ordinal, **changes)
    return first, *(peer(node, first) for node in range(1, NODES))


def observed(given: RolloutEngine, *pods: PodView, up: bool = True) -> Observed:
    guards = {pod.uid: make_guard(make_state(0, incarnation=pod.uid)) for pod in pods if pod.leads and up}
    return make_observed(given, pods=pods, guards=guards)


def creates(decision: Decision) -> list[tuple[str, str]]:
    """(name without suffix, leader) of each."""
    made = [action.manifest["metadata"] for action in decision.actions if isinstance(action, CreatePod)]
    return [(each["name"].rpartition("-")[0], each["annotations"].get("rollfleet.io/leader", "")) for each in made]


def deletes(decision: Decision) -> set[str]:
    return {action.uid for action in decision.actions if isinstance(action, DeletePod)}


def detail(decision: Decision) -> tuple[str, str]:
    assert decision.fleet_status is not None
    (found,) = decision.fleet_status.status.engines.details
    return found.state, found.message


def test_all_pods_of_an_engine_are_made_together_and_name_their_leader() -> None:
    decision = plan(observed(fleet(2)), NOW)
    names = [action.manifest["metadata"]["name"] for action in decision.actions if isinstance(action, CreatePod)]
    leaders = {name[: len("qwen-0")]: name for name in names if name.startswith(("qwen-0-0-", "qwen-1-0-"))}
    assert sorted(creates(decision)) == sorted(
        [(f"qwen-{k}-0", "") for k in range(2)]
        + [(f"qwen-{k}-{node}", leaders[f"qwen-{k}"]) for k in range(2) for node in range(1, NODES)]
    )
    again = [a.manifest["metadata"]["name"] for a in plan(observed(fleet(2)), NOW).actions if isinstance(a, CreatePod)]
    assert again == names, "a repeated create is harmless"


def test_a_whole_engine_is_left_alone_and_counts_as_one() -> None:
    decision = plan(observed(fleet(), *whole()), NOW)
    assert (creates(decision), deletes(decision)) == ([], set())
    assert decision.fleet_status is not None
    status = decision.fleet_status.status
    assert (status.replicas, status.ready_replicas, status.serving_replicas) == (1, 1, 1)
    assert status.selector.endswith(",!rollfleet.io/node")
    assert [member.uid for member in status.members] == ["pod-0"], "who follows can answer nobody"


def test_only_the_leading_pod_is_followed_fenced_and_led() -> None:
    pods = whole()
    assert to_follow(pods, ()) == (pods[0],)
    (engine,) = build_world(observed(fleet(), *pods)).engines
    assert (engine.pod, engine.peers) == (pods[0], pods[1:])
    ended = replace(pods[0], container=ContainerState.TERMINATED, exit_code=1, **DOWN)
    (engine,) = build_world(make_observed(fleet(), pods=(ended, *pods[1:]), guards={})).engines
    assert engine.fence(1) is Fence.HELD, "its leader's container has ended, whatever still runs elsewhere"


@pytest.mark.parametrize("lost", ["gone", "failed", "deleting"])
def test_a_pod_that_is_lost_is_made_again_for_the_same_leader(lost: str) -> None:
    first, second, third = whole()
    changed = {"failed": {"phase": "Failed", "container": ContainerState.TERMINATED}, "deleting": {"deleting": True}}
    pods = (first, third) if lost == "gone" else (first, replace(second, **changed[lost]), third)
    decision = plan(observed(fleet(), *pods), NOW)
    assert creates(decision) == [("qwen-0-1", first.name)]
    assert deletes(decision) == ({second.uid} if lost == "failed" else set())
    (made,) = [action.manifest["metadata"]["name"] for action in decision.actions if isinstance(action, CreatePod)]
    assert made != second.name


def test_of_two_pods_in_one_place_the_older_one_stays() -> None:
    first, second, third = whole()
    late = replace(second, name="qwen-0-1-later", uid="later", created=NOW + timedelta(seconds=1))
    assert deletes(plan(observed(fleet(), first, second, late, third), NOW)) == {"later"}


def test_pods_without_their_leader_go() -> None:
    first, *others = whole()
    decision = plan(observed(fleet(), *others), NOW)
    assert deletes(decision) == {pod.uid for pod in others}
    assert len(creates(decision)) == NODES, "and an engine is made in their place"
    vanished = observed(fleet(), *whole())
    known = plan(vanished, NOW).fleet_status
    assert known is not None
    remembers = fleet().model_copy(update={"status": known.status})
    decision = plan(observed(remembers, *others), NOW)
    assert deletes(decision) == {pod.uid for pod in others}, "the leader may run on where nobody sees it"
    assert first.uid in [member.uid for member in remembers.status.members]


def test_while_the_leader_drains_the_others_stay() -> None:
    first, *others = whole(deleting=True)
    decision = plan(observed(fleet(), first, *others), NOW)
    assert deletes(decision) == set()
    assert len(creates(decision)) == NODES


def test_on_a_dead_node_a_leader_is_being_deleted_for_ever_and_the_others_do_not_wait_for_it() -> None:
    first, *others = whole(deleting=True, deleted_by=NOW + timedelta(seconds=90))
    pods = (first, *(replace(pod, deleting=False, deleted_by=None) for pod in others))
    draining = plan(observed(fleet(), *pods), NOW)
    assert deletes(draining) == set()
    assert draining.wake_at is not None
    assert draining.wake_at <= NOW + timedelta(seconds=90)
    for up in (True, False):
        assert deletes(plan(observed(fleet(), *pods, up=up), NOW + timedelta(seconds=90))) == {"pod-0-1", "pod-0-2"}


def test_an_engine_that_serves_waits_for_no_place_whatever_was_made_for_it() -> None:
    """A pod that was deleted by force runs on, and the one in its place finds none."""
    first, second, third = whole(1, created=NOW - timedelta(seconds=PLACES_S + 1))
    pods = (*half(0, PLACES_S + 1), first, replace(second, **UNPLACED), third)
    given = observed(fleet(2), *pods, up=False)
    guards = {first.uid: make_guard(make_state(0, incarnation=first.uid))}
    decision = plan(replace(given, guards=guards), NOW)
    assert deletes(decision) == set()
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.engines.counts == {"Serving": 1, "Unschedulable": 1}


def test_a_roll_replaces_leaders_one_by_one_and_the_rest_follows() -> None:
    pods = tuple(pod for ordinal in range(2) for pod in whole(ordinal, template_hash="older"))
    old = tuple(replace(pod, template_hash="older") for pod in pods)
    given = fleet(2, update_strategy=UpdateStrategy(max_unavailable=1))
    decision = plan(observed(given, *old), NOW)
    assert (creates(decision), deletes(decision)) == ([], {"pod-1"})
    lost = tuple(pod for pod in old if pod.name != "qwen-0-1-peer1")
    assert [name for name, _ in creates(plan(observed(given, *lost), NOW))] == [], "nobody can make one of the older"


def test_scaling_down_removes_engines_whole() -> None:
    pods = (*whole(0), *whole(1))
    assert deletes(plan(observed(fleet(1), *pods), NOW)) == {"pod-1"}
    left = tuple(pod for pod in pods if pod.uid != "pod-1")
    assert deletes(plan(observed(fleet(1), *left), NOW)) == {"pod-1-1", "pod-1-2"}


def test_a_pod_that_cannot_start_stops_the_engine_and_says_so() -> None:
    first, second, third = whole(**DOWN)
    words = {"exit_code": 78, "message": "CrashLoopBackOff; model path /rollfleet/model/x: not found"}
    broken = replace(second, container=ContainerState.WAITING, restarts=1, **words, **DOWN)
    decision = plan(observed(fleet(), first, broken, third, up=False), NOW)
    stops = {action.uid: action.why for action in decision.actions if isinstance(action, StopPod)}
    assert set(stops) == {"pod-0", "pod-0-1", "pod-0-2"}
    assert stops["pod-0"].startswith(
        f"CannotStart: a restart cures nothing; pod {second.name}: exit code 78: CrashLoop"
    )
    assert stops["pod-0-2"].startswith(f"{first.name}, which leads it, is stopped: CannotStart")
    assert detail(decision) == ("Broken", f"pod {second.name}: restarted 1 times, exit code 78: {words['message']}")
    kept = [replace(pod, stopped=stops[pod.uid], phase="Failed") for pod in (first, broken, third)]
    later = plan(observed(fleet(), *kept, up=False), NOW)
    assert (creates(later), deletes(later)) == ([], set()), "they keep their places, to be read"


def test_what_keeps_a_pod_from_starting_is_told_of_the_engine() -> None:
    first, second, third = whole(**DOWN)
    waits = {"container": ContainerState.WAITING, "phase": "Pending", **DOWN}
    pulling = replace(second, message="ContainerCreating", **waits)
    assert detail(plan(observed(fleet(), first, pulling, third, up=False), NOW)) == (
        "Starting",
        f"pod {second.name}: ContainerCreating",
    )
    broken = replace(second, message="ImagePullBackOff: no such image", **waits)
    state, text = detail(plan(observed(fleet(), first, broken, third, up=False), NOW))
    assert (state, text) == ("Broken", f"pod {second.name}: ImagePullBackOff: no such image")


def half(ordinal: int, age_s: float) -> tuple[PodView, ...]:
    """An engine that holds one place of three."""
    created = NOW - timedelta(seconds=age_s)
    first = leader(ordinal, created=created, **DOWN)
    return first, *(peer(node, first, created=created, **UNPLACED) for node in range(1, NODES))


def test_two_half_placed_engines_do_not_keep_each_other_from_starting() -> None:
    given, late = fleet(3), PLACES_S + 1
    pods = (*half(0, late), *half(1, late))
    decision = plan(observed(given, *pods, up=False), NOW)
    assert deletes(decision) == {"pod-1"}, "the lower ordinal keeps what it has"
    assert creates(decision) == [], "and engine 2 is not made meanwhile"
    left = tuple(pod for pod in pods if pod.uid != "pod-1")
    decision = plan(observed(given, *left, up=False), NOW)
    assert deletes(decision) == {"pod-1-1", "pod-1-2"}
    assert creates(decision) == []
    decision = plan(observed(given, *whole(0), up=False), NOW)
    assert {name for name, _ in creates(decision)} == {f"qwen-{k}-{node}" for k in (1, 2) for node in range(NODES)}


def test_places_are_given_back_only_after_a_while_and_by_nobody_who_comes_first() -> None:
    given = fleet(2)
    decision = plan(observed(given, *half(0, 10), *half(1, 10), up=False), NOW)
    assert deletes(decision) == set()
    assert decision.wake_at is not None
    assert decision.wake_at <= NOW + timedelta(seconds=PLACES_S - 10)
    alone = plan(observed(fleet(1), *half(0, 10_000), up=False), NOW)
    assert (deletes(alone), creates(alone)) == (set(), [])
    state, text = detail(alone)
    assert state == "Unschedulable"
    assert text == f"pod qwen-0-1-peer1: {WORDS}; the engine holds 1 of its {NODES} places (node-1) meanwhile"


def test_an_engine_that_holds_nothing_waits_as_it_is() -> None:
    nothing = tuple(replace(pod, **UNPLACED) for pod in half(1, 10_000))
    assert deletes(plan(observed(fleet(2), *half(0, 10_000), *nothing, up=False), NOW)) == set()


STATES = st.sampled_from(("there", "gone", "failed", "deleting", "unplaced", "foreign"))


@given(st.lists(STATES, min_size=NODES, max_size=NODES), st.lists(STATES, min_size=NODES, max_size=NODES))
def test_whatever_is_lost_the_plan_leads_to_whole_engines(first: list[str], second: list[str]) -> None:
    """Carried out again and again, every plan ends with one live pod in each place, led by the pod that leads there."""
    pods = [pod for k, states in enumerate((first, second)) for pod in _engine(k, states)]
    given_fleet, serial = fleet(2), 0
    for _ in range(8):
        decision = plan(observed(given_fleet, *pods, up=False), NOW)
        gone = deletes(decision)
        pods = [pod for pod in pods if pod.uid not in gone and not pod.deleting]
        for action in decision.actions:
            if isinstance(action, CreatePod):
                serial += 1
                pods.append(_made(action.manifest, serial))
        pods = [replace(pod, unschedulable=False, node="node-1") for pod in pods]
    places = sorted((pod.ordinal, pod.node_index) for pod in pods)
    assert places == [(k, node) for k in range(2) for node in range(NODES)]
    leaders = {pod.ordinal: pod.name for pod in pods if pod.leads}
    assert all(pod.leads or pod.leader == leaders[pod.ordinal] for pod in pods)


def _engine(ordinal: int, states: list[str]) -> list[PodView]:
    changes: dict[str, dict[str, Any]] = {
        "there": {},
        "failed": {"phase": "Failed", "container": ContainerState.TERMINATED},
        "deleting": {"deleting": True},
        "unplaced": UNPLACED,
        "foreign": {"leader": "qwen-9-0-none"},
    }
    pods = [leader(ordinal), *(peer(node, leader(ordinal)) for node in range(1, NODES))]
    kept = [(pod, state) for pod, state in zip(pods, states, strict=True) if state != "gone"]
    return [replace(pod, **({} if pod.leads and state == "foreign" else changes[state])) for pod, state in kept]


def _made(manifest: dict[str, Any], serial: int) -> PodView:
    metadata = manifest["metadata"]
    node = int(metadata["labels"].get("rollfleet.io/node", "0"))
    fields = {"name": metadata["name"], "uid": f"made-{serial}", "created": NOW + timedelta(seconds=serial)}
    led_by = metadata["annotations"].get("rollfleet.io/leader", "")
    return leader(int(metadata["labels"]["rollfleet.io/engine"]), node_index=node, leader=led_by, **fields, **DOWN)
