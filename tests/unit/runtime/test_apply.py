"""What is done of a decision in which order, and what becomes of it when something fails."""

import asyncio

import pytest

from rollfleet_operator.api.rolloutengine import Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import HistoryEntry, Phase, WeightVersionStatus
from rollfleet_operator.clients.errors import Denied, InvalidSpec, Unreachable
from rollfleet_operator.core.actions import (
    ApplyObject,
    CreatePod,
    Decision,
    DeletePod,
    EngineStatusWrite,
    Event,
    GuardCall,
    LabelPod,
    WeightVersionStatusWrite,
)
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, SERVICES, WEIGHT_VERSIONS, Manifest
from rollfleet_operator.runtime.apply import CALL_GRACE_S
from rollfleet_operator.runtime.observe import FIRST_WORDS_S
from rollfleet_operator.runtime.reconcile import LASTING_S
from rollfleet_protocol.commands import Arm
from tests.support.desk import KEY, NOW, SERVICE, Desk, make_fleet, make_version
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime


async def test_all_of_a_decision_is_carried_out_with_the_status_first(desk: Desk) -> None:
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    labelled = desk.cluster.put(PODS, "rl", make_pod(uid="p-2", name="qwen-1-0-b", podIP=""))
    doomed = desk.cluster.put(PODS, "rl", make_pod(uid="p-3", name="qwen-2-0-c", podIP=""))
    for pod in (labelled, doomed):
        desk.records.pods.upsert(pod)
    desk.decision = Decision(
        fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)),
        actions=(
            ApplyObject(SERVICE, "h-1"),
            CreatePod(make_pod(uid="p-1")),
            LabelPod("qwen-1-0-b", "p-2", serving=True),
            DeletePod("qwen-2-0-c", "p-3", "too many"),
        ),
        weight_version_statuses=(WeightVersionStatusWrite("policy", WeightVersionStatus(phase=Phase.PREPARING)),),
        events=(Event("RolloutEngine", "qwen", "Normal", "Made", "it is made"),),
    )
    await desk.run()
    assert desk.writes()[0] == ("status", "rolloutengines", "qwen")
    assert desk.writes()[-1] == ("status", "weightversions", "policy")
    assert desk.stored("rolloutengines", "qwen")["status"]["epoch"] == 3
    assert desk.stored("weightversions", "policy")["status"]["phase"] == "Preparing"
    assert desk.records.children.hashes(KEY) == {"Service/qwen": "h-1"}
    views = {pod.uid: pod.serving_label for pod in desk.records.pods.pods(KEY, "f-1")}
    assert views == {"p-1": False, "p-2": True}
    assert await desk.said() == ["it is made"]
    assert not await desk.is_due(3600)


@pytest.mark.parametrize("changed", [{"status": {"epoch": 9}}, {"metadata": make_fleet(generation=2)["metadata"]}])
async def test_a_lost_fence_ends_the_pass_at_once_and_silently(desk: Desk, changed: Manifest) -> None:
    desk.before_plan = lambda: desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet() | changed)
    desk.decision = Decision(
        fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)),
        actions=(ApplyObject(SERVICE, "h-1"),),
        events=(Event("RolloutEngine", "qwen", "Normal", "Made", "it is made"),),
    )
    await desk.run()
    assert desk.writes() == [("status", "rolloutengines", "qwen")]
    assert await desk.said() == []
    assert await desk.is_due(0.001)


async def test_a_foreign_annotation_in_between_costs_no_pass(desk: Desk) -> None:
    noted = make_fleet(annotations={"example.com/note": "hello"})
    desk.before_plan = lambda: desk.cluster.put(ROLLOUT_ENGINES, "rl", noted)
    desk.decision = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)))
    await desk.run()
    stored = desk.stored("rolloutengines", "qwen")
    assert (stored["status"]["epoch"], stored["metadata"]["annotations"]) == (3, {"example.com/note": "hello"})
    assert not await desk.is_due(60)


async def test_a_write_whose_answer_was_lost_is_no_lost_fence(desk: Desk) -> None:
    """It is sent again below us, and refused as too late: what follows of it is told all the same."""
    status = RolloutEngineStatus(epoch=3)
    desk.before_plan = lambda: desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet() | {"status": status.dump()})
    made = Event("RolloutEngine", "qwen", "Normal", "Made", "it is made")
    desk.decision = Decision(fleet_status=EngineStatusWrite(status), events=(made,))
    await desk.run()
    assert desk.writes() == [("status", "rolloutengines", "qwen")]
    assert await desk.said() == ["it is made"]


async def test_nothing_is_written_where_nothing_changes(desk: Desk) -> None:
    status = RolloutEngineStatus(epoch=3, replicas=1)
    desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet() | {"status": status.dump()})
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version() | {"status": WeightVersionStatus(epoch=3).dump()})
    write = WeightVersionStatusWrite("policy", WeightVersionStatus(epoch=3))
    desk.decision = Decision(fleet_status=EngineStatusWrite(status), weight_version_statuses=(write,))
    await desk.run()
    assert desk.writes() == []


async def test_what_fails_stops_nothing_else_and_is_said(desk: Desk) -> None:
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    desk.cluster.failures["apply", "qwen"] = InvalidSpec("patch Service rl/qwen: spec.ports: Required value (HTTP 422)")
    desk.cluster.failures["create", "qwen-0-0-abcde"] = Denied("create Pod rl/*: exceeded quota (HTTP 403)")
    desk.decision = Decision(
        actions=(ApplyObject(SERVICE, "h-1"), CreatePod(make_pod()), CreatePod(make_pod(uid="p-2", name="qwen-1-0-b"))),
        weight_version_statuses=(WeightVersionStatusWrite("policy", WeightVersionStatus(epoch=3)),),
    )
    await desk.run()
    assert [pod.uid for pod in desk.records.pods.pods(KEY, "f-1")] == ["p-2"]
    assert desk.stored("weightversions", "policy")["status"]["epoch"] == 3
    assert desk.records.children.hashes(KEY) == {}
    said = await desk.said()
    assert any("Required value" in note for note in said)
    assert any("exceeded quota" in note for note in said)
    assert await desk.is_due(0.2)


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_every_end_of_an_update_is_counted_once(desk: Desk, outcome: Outcome) -> None:
    ended = HistoryEntry(version=1, outcome=outcome, time=NOW)
    before = WeightVersionStatus(phase=Phase.VERIFYING, version=2, history=(ended,))
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version() | {"status": before.dump()})
    after = before.model_copy(update={"history": (ended, ended.model_copy(update={"version": 2}))})
    desk.decision = Decision(weight_version_statuses=(WeightVersionStatusWrite("policy", after),))
    await desk.run()
    assert desk.meter.finished == [("rl", "policy", outcome.value)]


async def test_the_next_pass_knows_what_was_refused_until_it_is_taken(desk: Desk) -> None:
    desk.cluster.failures["create", "qwen-0-0-abcde"] = Denied("create Pod rl/*: exceeded quota (HTTP 403)")
    desk.decision = Decision(actions=(CreatePod(make_pod()),))
    await desk.run()
    await desk.run()
    assert desk.observed is not None
    assert "exceeded quota" in desk.observed.rejected
    del desk.cluster.failures["create", "qwen-0-0-abcde"]
    await desk.run()
    assert desk.queue.depth() == 1, "the status still tells of it"
    desk.decision = Decision()
    await desk.run()
    assert desk.observed.rejected == ""


async def test_a_weight_version_that_is_deleted_meanwhile_is_no_event(desk: Desk) -> None:
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    desk.before_plan = lambda: desk.cluster.objects.pop(("weightversions", "rl", "policy"))
    write = WeightVersionStatusWrite("policy", WeightVersionStatus(epoch=3))
    desk.decision = Decision(weight_version_statuses=(write,))
    await desk.run()
    assert await desk.said() == []
    assert not await desk.is_due(60)


OURS = {"app.kubernetes.io/managed-by": "rollfleet", "rollfleet.io/fleet": "qwen"}


def service(metadata: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen", "namespace": "rl"} | metadata}


def owned_by(kind: str, name: str, uid: str) -> Manifest:
    return {"kind": kind, "name": name, "uid": uid, "controller": True}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "Service rl/qwen is not the operator's"),
        ({"labels": OURS | {"rollfleet.io/fleet": "llama"}}, "Service rl/qwen is not the operator's"),
        ({"ownerReferences": [owned_by("RolloutEngine", "q", "f-9")]}, "belongs to RolloutEngine 'q'"),
        ({"labels": OURS, "ownerReferences": [owned_by("App", "qwen", "f-1")]}, "belongs to App 'qwen'"),
        ({"labels": OURS, "ownerReferences": [owned_by("RolloutEngine", "qwen", "f-0")]}, ""),  # waits, no event
    ],
)
async def test_somebody_elses_object_of_that_name_is_not_taken_over(desk: Desk, metadata: Manifest, words: str) -> None:
    desk.cluster.put(SERVICES, "rl", service(metadata))
    desk.decision = Decision(actions=(ApplyObject(SERVICE, "h-1"),))
    await desk.run()
    assert not any(verb == "apply" for verb, _, _ in desk.writes())
    said = await desk.said()
    assert [words in note for note in said] == ([True] if words else [])
    assert await desk.is_due(0.2)


@pytest.mark.parametrize(
    "metadata", [{"labels": OURS}, {"ownerReferences": [owned_by("RolloutEngine", "qwen", "f-1")]}]
)
async def test_our_own_object_is_applied_again(desk: Desk, metadata: Manifest) -> None:
    desk.cluster.put(SERVICES, "rl", service(metadata))
    desk.decision = Decision(actions=(ApplyObject(SERVICE, "h-1"),))
    await desk.run()
    assert ("apply", "services", "qwen") in desk.writes()


async def test_an_api_server_that_does_not_answer_is_no_event(desk: Desk) -> None:
    desk.cluster.failures["apply", "qwen"] = Unreachable("patch Service rl/qwen: no answer within the deadline")
    desk.decision = Decision(actions=(ApplyObject(SERVICE, "h-1"),))
    await desk.run()
    assert await desk.said() == []
    assert await desk.is_due(0.2)


async def test_calls_that_get_no_answer_for_long_are_told_of_until_they_do(desk: Desk) -> None:
    words = "create Pod rl/qwen-0-0-abcde: failed calling webhook (HTTP 500)"
    desk.cluster.failures["create", "qwen-0-0-abcde"] = Unreachable(words)
    desk.decision = Decision(actions=(CreatePod(make_pod()),))
    await desk.run()
    await asyncio.sleep(LASTING_S)
    await desk.run()
    assert await desk.said() == [words]
    await desk.run()
    assert desk.observed is not None
    assert desk.observed.rejected == words
    del desk.cluster.failures["create", "qwen-0-0-abcde"]
    await desk.run()
    desk.cluster.failures["create", "qwen-0-0-abcde"] = Unreachable(words)
    await desk.run()
    await desk.run()
    assert desk.observed.rejected == "", "it counts anew"


async def test_a_status_that_is_not_taken_is_told_by_an_event(desk: Desk) -> None:
    words = "update RolloutEngine rl/qwen/status: status.epoch: Invalid value (HTTP 422)"
    desk.cluster.failures["status", "qwen"] = InvalidSpec(words)
    desk.decision = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)))
    await desk.run()
    assert await desk.said() == [words]


async def test_somebody_elses_pod_of_that_name_is_told_of(desk: Desk) -> None:
    theirs = make_pod(uid="p-7")
    theirs["metadata"] |= {"ownerReferences": [], "labels": {}}
    desk.cluster.put(PODS, "rl", theirs)
    desk.decision = Decision(actions=(CreatePod(make_pod(uid="")),))
    await desk.run()
    (said,) = await desk.said()
    assert said == "Pod rl/qwen-0-0-abcde has the name of an engine and is not the operator's: delete it"


async def test_a_guard_that_does_not_answer_holds_nobody_up(desk: Desk) -> None:
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    desk.records.pods.upsert(make_pod())
    arm = Arm(incarnation="i-1", epoch=1)
    desk.decision = Decision(
        actions=(GuardCall("qwen-0-0-abcde", "p-1", arm), GuardCall("gone", "p-9", arm)),
        weight_version_statuses=(WeightVersionStatusWrite("policy", WeightVersionStatus(epoch=3)),),
    )
    started = asyncio.get_running_loop().time()
    await desk.run()
    await desk.run()
    assert asyncio.get_running_loop().time() - started <= FIRST_WORDS_S + 2 * CALL_GRACE_S
    assert desk.stored("weightversions", "policy")["status"]["epoch"] == 3
    assert desk.guards.commands == [arm]


async def test_a_pod_that_was_replaced_under_the_same_name_is_left_alone(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod(uid="p-1", revision=1))
    desk.cluster.put(PODS, "rl", make_pod(uid="p-2"))
    desk.decision = Decision(actions=(DeletePod("qwen-0-0-abcde", "p-1", "too many"),))
    await desk.run()
    assert desk.stored("pods", "qwen-0-0-abcde")["metadata"]["uid"] == "p-2"
    assert [pod.uid for pod in desk.records.pods.pods(KEY, "f-1")] == []


async def test_a_pod_that_was_made_before_is_taken_as_it_is(desk: Desk) -> None:
    desk.cluster.put(PODS, "rl", make_pod(uid="p-7"))
    desk.decision = Decision(actions=(CreatePod(make_pod(uid="")),))
    await desk.run()
    assert [pod.uid for pod in desk.records.pods.pods(KEY, "f-1")] == ["p-7"]
    assert await desk.said() == []
