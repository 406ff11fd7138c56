"""What the statuses say, and when they are written."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.launch import RlConfig
from rollfleet_operator.api.meta import ConditionStatus
from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus, Startup
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.observed import ContainerState, GuardView, Observed
from rollfleet_operator.core.plan import plan, plan_orphan
from rollfleet_protocol.state import Failure, FailureReason, OperationName, OperationStatus
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_operation,
    make_pod,
    make_state,
    make_weight_version,
)
from tests.support.simulated_world import World

SILENT = GuardView(state=None, reachable=False, last_contact=None, error="connection refused")


def fleet(**spec: Any) -> RolloutEngine:
    return make_fleet(status=RolloutEngineStatus(epoch=1, committed=make_committed(0)), **spec)


def one(pod: dict[str, Any], guard: GuardView | None, **spec: Any) -> Observed:
    """A fleet of this single engine."""
    guards = {} if guard is None else {"pod-0": guard}
    return make_observed(fleet(replicas=1, **spec), pods=(make_pod(0, **pod),), guards=guards)


def status(decision: Decision) -> RolloutEngineStatus:
    assert decision.fleet_status is not None
    return decision.fleet_status.status


WAITING = {"container": ContainerState.WAITING, "started": False, "phase": "Pending"}
DEAD = make_state(0, open=False, alive=False, closed_reason="EngineDead")
STATES: dict[str, tuple[dict[str, Any], GuardView | None, str, str]] = {
    "no node": (
        {"phase": "Pending", "unschedulable": True, "message": "0/3 nodes: Insufficient huawei.com/Ascend910"},
        None,
        "Unschedulable",
        "Insufficient huawei.com/Ascend910",
    ),
    "pulling": ({**WAITING, "message": "ContainerCreating"}, None, "Starting", "ContainerCreating"),
    "no image": ({**WAITING, "message": "ImagePullBackOff: no such image"}, None, "Broken", "no such image"),
    "loading": ({"started": False}, SILENT, "Starting", ""),
    "crash loop": (
        {"container": ContainerState.WAITING, "message": "CrashLoopBackOff: back-off", "restarts": 4, "exit_code": 78},
        SILENT,
        "Broken",
        "restarted 4 times, exit code 78: CrashLoopBackOff",
    ),
    "evicted": (
        {"phase": "Failed", "container": ContainerState.TERMINATED, "message": "Evicted"},
        None,
        "Broken",
        "the pod is Failed: Evicted",
    ),
    "deleted, and nobody says that it ended": (
        {"deleting": True, "deleted_by": NOW},
        SILENT,
        "Unfenced",
        "kubectl taint nodes node-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    ),
    "going": ({"deleting": True}, SILENT, "Terminating", ""),
    "silent": ({}, make_guard(make_state(), reachable=False, error="timed out"), "Unreachable", "timed out"),
    "dead core": ({}, make_guard(DEAD), "Broken", "dead"),
    "well": ({}, make_guard(), "Serving", ""),
}


@pytest.mark.parametrize("case", STATES)
def test_what_an_engine_is_doing_is_told_in_one_word_and_in_its_own(case: str) -> None:
    pod, guard, doing, words = STATES[case]
    told = status(plan(one(pod, guard), NOW)).engines
    assert told.counts == {doing: 1}
    if doing == "Serving":
        assert told.details == ()
    else:
        assert words in told.details[0].message
        assert told.details[0].state == doing


def test_c06_an_engine_that_is_not_up_in_time_is_told_when_the_time_is_over() -> None:
    loading = one({"started": False}, SILENT, startup=Startup(timeout_seconds=60))
    before = plan(loading, NOW)
    assert status(before).engines.counts == {"Starting": 1}
    assert before.wake_at == NOW + timedelta(seconds=60)
    after = status(plan(loading, NOW + timedelta(seconds=60)))
    assert after.engines.counts == {"Broken": 1}
    condition = find(after.conditions, "Degraded")
    assert condition is not None
    assert "spec.startup.timeoutSeconds" in condition.message


def test_ten_details_at_most_the_worst_first() -> None:
    pods = (
        *(make_pod(i, started=False) for i in range(20)),
        make_pod(20, phase="Failed", container=ContainerState.TERMINATED),
    )
    told = status(plan(make_observed(fleet(replicas=21), pods=pods, guards={}), NOW)).engines
    assert len(told.details) == 10
    assert told.details[0].state == "Broken"
    assert told.counts == {"Broken": 1, "Starting": 20}


def test_since_is_when_the_state_began() -> None:
    first = status(plan(one({"started": False}, SILENT), NOW))
    later = NOW + timedelta(seconds=30)
    given = make_fleet(replicas=1, status=first)
    pod = make_pod(0, started=False, restarts=1, exit_code=1)
    again = status(plan(make_observed(given, pods=(pod,), guards={"pod-0": SILENT}), later))
    assert again.engines.details[0].since == NOW
    assert "restarted 1 times" in again.engines.details[0].message
    changed = make_fleet(replicas=1, status=again)
    gone = make_guard(make_state(), reachable=False, error="timed out")
    third = status(
        plan(make_observed(changed, pods=(make_pod(0),), guards={"pod-0": gone}), later + timedelta(seconds=9))
    )
    assert third.engines.details[0].since == later + timedelta(seconds=9)


def test_an_operator_that_has_asked_nobody_yet_leaves_the_summary_as_it_is() -> None:
    serving = status(plan(one({}, make_guard()), NOW))
    given = make_fleet(replicas=1, status=serving)
    decision = plan(make_observed(given, pods=(make_pod(0),), guards={}), NOW)
    assert decision.fleet_status is None


def test_counts_alone_are_written_once_a_second_at_most() -> None:
    first = status(plan(make_observed(fleet()), NOW))
    given = make_fleet(status=first)
    moment = NOW + timedelta(seconds=0.4)
    pods = (make_pod(0), make_pod(1))
    guards = {"pod-0": make_guard(make_state(0)), "pod-1": make_guard(make_state(0, open=False, incarnation="b"))}
    soon = plan(make_observed(given, pods=pods, guards=guards), moment)
    later = plan(make_observed(given, pods=pods, guards=guards), NOW + timedelta(seconds=1))
    told = status(later)
    assert told.serving_replicas == 1
    if soon.fleet_status is None:
        assert soon.wake_at is not None
        assert soon.wake_at <= NOW + timedelta(seconds=1)
    else:  # a condition changed along with the counts: that is told at once
        assert soon.fleet_status.status.conditions != first.conditions


def test_progress_of_an_update_is_written_once_a_second_at_most() -> None:
    world = World(make_fleet(replicas=8))
    spread = iter(range(1, 100))
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.1
    assert world.run(60, lambda: world.all_serve(0))
    for pod in world.pods.values():
        wait = next(spread) * 0.3
        pod.temper.seconds = lambda step, wait=wait: wait if step is OperationName.PREPARE else 0.1  # type: ignore[misc]
    before = world.weight_version_writes
    world.apply_weight_version(make_weight_version(1))
    assert world.run(30, lambda: world.ended(1))
    assert world.weight_version_writes - before <= 12


def test_the_columns_are_right() -> None:
    told = status(plan(make_observed(fleet()), NOW))
    assert (told.replicas, told.ready_replicas, told.serving_replicas) == (2, 2, 2)
    assert told.selector == "rollfleet.io/fleet=qwen,rollfleet.io/component=engine"
    assert told.endpoint == "http://qwen.rl.svc:8000"
    assert told.ca_bundle == "Q0E="
    assert told.observed_generation == 1
    conditions = {found.type: (found.status.value, found.reason) for found in told.conditions}
    assert conditions == {
        "Accepted": ("True", "Accepted"),
        "Available": ("True", "Serving"),
        "Progressing": ("False", "Steady"),
        "WeightsCurrent": ("True", "Current"),
        "Degraded": ("False", "AllWell"),
    }


def test_a_fleet_that_is_broken_says_why_in_the_engines_words() -> None:
    failure = Failure(reason=FailureReason.ENGINE_DEAD, message="EngineCore: HCCL error 5")
    operation = make_operation(OperationName.VERIFY, OperationStatus.FAILED, failure=failure)
    dead = make_state(0, open=False, alive=False, operation=operation)
    told = status(plan(one({}, make_guard(dead)), NOW))
    for kind in ("Available", "Degraded"):
        condition = find(told.conditions, kind)
        assert condition is not None
        assert "HCCL error 5" in condition.message


def test_an_orphan_is_told_once() -> None:
    weight_version = make_weight_version(1)
    decision = plan_orphan(weight_version, NOW)
    (write,) = decision.weight_version_statuses
    accepted = find(write.status.conditions, "Accepted")
    assert accepted is not None
    assert (accepted.status, accepted.reason) == ("False", "EngineNotFound")
    assert [event.reason for event in decision.events] == ["EngineNotFound"]
    told = weight_version.model_copy(update={"status": write.status})
    assert plan_orphan(told, NOW + timedelta(minutes=1)) == Decision()


def test_a_second_weight_version_is_refused_without_disturbing_the_first() -> None:
    world = World(make_fleet())
    assert world.run(30, lambda: world.all_serve(0))
    world.apply_weight_version(make_weight_version(1))
    later = NOW + timedelta(seconds=5)
    world.apply_weight_version(make_weight_version(9, name="second", uid="uid-2", created=later))
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    world.run(20)
    told = {found.type: found for found in world.status("second").conditions}
    assert told["Accepted"].reason == "AnotherWeightVersion"
    assert told["Active"].status == "False"
    assert world.committed_versions == [0, 1]
    del world.weight_versions["qwen-policy"]
    assert world.run(30, lambda: world.all_serve(9))


def test_every_field_of_the_statuses_survives_the_schema() -> None:
    """C31: what is written equals what is read back, so that nothing is written again."""
    world = World(make_fleet())
    world.apply_weight_version(make_weight_version(1, step="7"))
    assert world.run(60, lambda: world.all_serve(1) and world.ended(1))
    for model in (world.fleet.status, world.status()):
        assert type(model).model_validate(model.dump()) == model


def test_what_the_api_server_refuses_is_told_where_no_pod_can_tell_it() -> None:
    refusal = "create Pod rl/*: exceeded quota: compute (HTTP 403)"
    refused = make_observed(fleet(replicas=2), pods=(), guards={}, rejected=refusal)
    told = status(plan(refused, NOW))
    for kind, value in (("Available", "False"), ("Degraded", "True")):
        condition = find(told.conditions, kind)
        assert condition is not None
        assert (condition.status, condition.reason, condition.message) == (value, "ApplyFailed", refusal)
    again = replace(refused, fleet=refused.fleet.model_copy(update={"status": told}))
    assert plan(again, NOW + timedelta(seconds=30)).fleet_status is None, "the same refusal is written once"


def test_optional_flags_without_enabled_are_told_until_they_are_gone() -> None:
    flags = RlConfig(enabled=False, sleep_mode_extra_cleanup=True, enable_batch_invariant=True)
    first = status(plan(make_observed(fleet(rl_config=flags)), NOW))
    told = find(first.conditions, "SettingsIgnored")
    assert told is not None
    assert (told.status, told.reason) == (ConditionStatus.TRUE, "RlConfigDisabled")
    assert "spec.rlConfig.sleepModeExtraCleanup, spec.rlConfig.enableBatchInvariant without effect" in told.message
    second = status(plan(make_observed(make_fleet(status=first)), NOW))
    told = find(second.conditions, "SettingsIgnored")
    assert told is not None
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "NothingIgnored")
    assert find(status(plan(make_observed(fleet()), NOW)).conditions, "SettingsIgnored") is None
