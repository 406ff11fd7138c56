"""One pass: what is done in which order, and what becomes of it when something fails."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import HistoryEntry, Phase, WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import Denied, InvalidSpec, Unreachable
from rollfleet_operator.clients.events import Recorder
from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.guards import Endpoint
from rollfleet_operator.core.accept import judge_weight_version
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
from rollfleet_operator.core.observed import Observed, Settings
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, SERVICES, WEIGHT_VERSIONS, Manifest
from rollfleet_operator.runtime.apply import CALL_GRACE_S, Applier
from rollfleet_operator.runtime.observe import FIRST_WORDS_S, Observer
from rollfleet_operator.runtime.queue import KeyedQueue
from rollfleet_operator.runtime.reconcile import Reconciler
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_protocol.commands import Arm, Command
from rollfleet_protocol.state import EngineState
from tests.support.cluster import MemoryCluster, SilentMeter
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime

KEY = "rl/qwen"
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SETTINGS = Settings("system:serviceaccount:rollfleet:operator", "o-1", "router", host_path_allowed=True)
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen", "namespace": "rl"}, "spec": {}}


def make_fleet(**metadata: Any) -> Manifest:
    spec = {"image": "i", "model": {"path": "m", "servedName": "policy"}, "volumes": {"model": {}}}
    identity = {"name": "qwen", "namespace": "rl", "uid": "f-1", "generation": 1}
    return {
        "apiVersion": "rollfleet.io/v1alpha1",
        "kind": "RolloutEngine",
        "metadata": identity | metadata,
        "spec": spec,
    }


def make_version(fleet: str = "qwen") -> Manifest:
    source = {"type": "Checkpoint", "checkpoint": {"path": "step-1"}}
    return {
        "apiVersion": "rollfleet.io/v1alpha1",
        "kind": "WeightVersion",
        "metadata": {"name": "policy", "namespace": "rl", "uid": "w-1", "generation": 1},
        "spec": {"engineRef": {"name": fleet}, "version": 1, "source": source},
    }


class SilentGuards:
    """Guards that never answer, and remember what they were told."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        self.commands.append(command)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Tally(SilentMeter):
    """Counts the ends of updates."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str, str]] = []

    def update_finished(self, namespace: str, name: str, outcome: str) -> None:
        self.finished.append((namespace, name, outcome))


class Desk:
    """A reconciler whose plan a test gives."""

    def __init__(self) -> None:
        self.cluster, self.guards = MemoryCluster(), SilentGuards()
        self.decision: Decision | Exception = Decision()
        self.observed: Observed | None = None
        self.queue = KeyedQueue()
        self.followers = Followers(self.guards, self.queue.put, lambda: NOW)
        self.records = Records(self.queue, self.followers)
        self.recorder = Recorder(self.cluster, "operator-0", lambda: NOW)
        self.meter = meter = Tally()
        certificates = Certificates(self.cluster, "rollfleet", lambda: NOW)
        uptime = Uptime(lambda: NOW)
        observer = Observer(self.cluster, certificates, self.records, SETTINGS, uptime)
        applier = Applier(self.cluster, self.recorder, self.records, meter)
        self.reconciler = Reconciler(observer, applier, self._plan, self._plan_orphan, self.records, meter, lambda: NOW)
        self.before_plan: Callable[[], object] = lambda: None

    def _plan(self, observed: Observed, _: datetime) -> Decision:
        self.before_plan()
        self.observed = observed
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision

    def _plan_orphan(self, weight_version: WeightVersion, _: datetime) -> Decision:
        write = WeightVersionStatusWrite(weight_version.metadata.name, WeightVersionStatus(observed_generation=7))
        return Decision(weight_version_statuses=(write,))

    async def run(self) -> None:
        """One pass over the fleet."""
        self.queue.put(KEY)
        await self.reconciler.reconcile(await self.queue.get())

    async def is_due(self, within_s: float) -> bool:
        """Whether the key comes again within so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                await self.queue.get()
        except TimeoutError:
            return False
        return True

    def stored(self, plural: str, name: str) -> Manifest:
        return self.cluster.objects[plural, "rl", name]

    def writes(self) -> list[tuple[str, str, str]]:
        """Without the certificates'."""
        return [write for write in self.cluster.writes if write[1] not in ("secrets", "events")]

    async def said(self) -> list[str]:
        """Notes of the events that were recorded."""
        writing = asyncio.create_task(self.recorder.run())
        await self.recorder.drain()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        return [item["note"] for (plural, _, _), item in self.cluster.objects.items() if plural == "events"]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    made.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet())
    yield made
    await made.followers.close()


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


async def test_a_weight_version_that_cannot_be_read_holds_up_no_other(desk: Desk) -> None:
    bad = make_version()
    bad["metadata"] |= {"name": "odd", "uid": "w-2"}
    bad["spec"]["strategy"] = {"type": "Sideways"}
    bad["status"] = {"phase": "Dancing"}
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    desk.cluster.put(WEIGHT_VERSIONS, "rl", bad)
    await desk.run()
    assert desk.observed is not None
    found = {each.metadata.name: each for each in desk.observed.weight_versions}
    assert found["policy"].unreadable == ""
    assert "WeightVersion rl/odd: spec.strategy.type" in found["odd"].unreadable
    verdict = judge_weight_version(found["odd"], desk.observed.fleet, found["odd"], None)
    assert (verdict.accepted, verdict.reason.value) == (False, "InvalidSpec")
    assert "spec.strategy.type" in verdict.message


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


async def test_a_bug_is_logged_with_its_trace_and_retried_later(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.decision = ZeroDivisionError("a bug")
    await desk.run()
    assert "pass crashed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert await desk.is_due(0.2)


async def test_the_decision_names_when_to_look_again(desk: Desk) -> None:
    desk.decision = Decision(wake_at=NOW + timedelta(seconds=40))
    await desk.run()
    assert not await desk.is_due(39)
    assert await desk.is_due(2)
    desk.queue.done(KEY)
    desk.decision = Decision(wake_at=NOW - timedelta(seconds=1))
    await desk.run()
    assert await desk.is_due(0.001)


async def test_a_fleet_that_is_gone_is_forgotten_and_its_weight_versions_are_told(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod())
    await desk.run()
    assert desk.followers.count() == 1
    del desk.cluster.objects["rolloutengines", "rl", "qwen"]
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    await desk.run()
    assert (desk.followers.count(), desk.records.fleets.all()) == (0, [])
    desk.records.pods.doubt("p-1")
    await desk.run()
    assert desk.records.pods.keys() == set()
    assert desk.stored("weightversions", "policy")["status"]["observedGeneration"] == 7


async def test_a_fleet_that_is_being_deleted_is_left_to_the_garbage_collector(desk: Desk) -> None:
    desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet(deletionTimestamp="2026-11-29T12:00:00Z"))
    desk.decision = Decision(actions=(ApplyObject(SERVICE, "h-1"),))
    await desk.run()
    assert desk.observed is None
    assert desk.writes() == []


@pytest.mark.parametrize(("label", "is_ours"), [(None, True), ("", True), ("canary", False)])
async def test_a_fleet_of_another_operator_is_left_to_it(desk: Desk, label: str | None, is_ours: bool) -> None:
    labels = {} if label is None else {"rollfleet.io/operator": label}
    desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet(labels=labels))
    desk.decision = Decision(actions=(ApplyObject(SERVICE, "h-1"),))
    await desk.run()
    assert (desk.observed is not None) == is_ours
    assert bool(desk.writes()) == is_ours
    assert len(desk.records.fleets.all()) == is_ours


async def test_a_pod_that_lost_our_labels_is_labelled_again(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod(revision=1))
    bare = make_pod()
    bare["metadata"]["labels"] = {"app": "theirs"}
    desk.cluster.put(PODS, "rl", bare)
    desk.records.pods.doubt("p-1")
    await desk.run()
    expected = {"rollfleet.io/fleet": "qwen", "rollfleet.io/component": "engine", "rollfleet.io/engine": "0"}
    assert desk.stored("pods", "qwen-0-0-abcde")["metadata"]["labels"] == expected | {"app": "theirs"}
    assert desk.observed is not None
    assert [pod.uid for pod in desk.observed.pods] == ["p-1"]
    assert desk.records.pods.doubtful(KEY) == ()


@pytest.mark.parametrize("known", [True, False], ids=["while we run", "before we came"])
async def test_a_pod_that_lost_its_owner_is_adopted_again(desk: Desk, known: bool) -> None:
    """It may be open, and Services and routers find it by its labels: an update that passes it by would leave it so."""
    if known:
        desk.records.pods.upsert(make_pod(revision=1))
    orphan = make_pod()
    theirs = {"kind": "App", "name": "theirs", "uid": "a-1"}
    orphan["metadata"]["ownerReferences"] = [theirs]
    assert desk.records.pods.upsert(desk.cluster.put(PODS, "rl", orphan)) == KEY
    await desk.run()
    owners = desk.stored("pods", "qwen-0-0-abcde")["metadata"]["ownerReferences"]
    assert owners[0] == theirs
    assert [(owner["uid"], owner.get("controller")) for owner in owners[1:]] == [("f-1", True)]
    assert desk.observed is not None
    assert [pod.uid for pod in desk.observed.pods] == ["p-1"]
    assert desk.records.pods.doubtful(KEY) == ()


@pytest.mark.parametrize("successor", [None, "p-2"])
async def test_a_pod_that_is_gone_is_forgotten_by_the_next_pass(desk: Desk, successor: str | None) -> None:
    desk.records.pods.upsert(make_pod(revision=1))
    if successor:
        desk.cluster.put(PODS, "rl", make_pod(uid=successor))
    desk.records.pods.doubt("p-1")
    await desk.run()
    assert desk.observed is not None
    assert desk.observed.pods == ()


async def test_what_a_pass_sees(desk: Desk) -> None:
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    desk.cluster.put(
        WEIGHT_VERSIONS, "rl", make_version("another") | {"metadata": make_version()["metadata"] | {"name": "other"}}
    )
    desk.records.pods.upsert(make_pod())
    desk.records.children.applied(KEY, "h-1", SERVICE, desk.cluster.put(SERVICES, "rl", SERVICE))
    await desk.run()
    seen = desk.observed
    assert seen is not None
    assert [one.metadata.name for one in seen.weight_versions] == ["policy"]
    assert [pod.uid for pod in seen.pods] == list(seen.guards) == ["p-1"]
    assert seen.settings == replace(SETTINGS, up_since=NOW)
    assert seen.children == {"Service/qwen": "h-1"}
    assert seen.ca_bundle
