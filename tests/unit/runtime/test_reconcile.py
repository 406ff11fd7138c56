"""One pass: when it comes again, and whose fleet it is."""

import asyncio
from datetime import timedelta

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.clients.errors import Conflict, Denied, RollfleetError, Unreachable
from rollfleet_operator.core.actions import (
    ApplyObject,
    CreatePod,
    Decision,
    EngineStatusWrite,
)
from rollfleet_operator.ports import ROLLOUT_ENGINES, WEIGHT_VERSIONS
from rollfleet_operator.runtime.reconcile import IDLE_S
from tests.support.desk import KEY, NOW, SERVICE, Desk, make_fleet, make_version
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime


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


WEDGES: dict[str, Exception] = {
    "a bug": ZeroDivisionError("a bug"),
    "a status that is not taken": Denied("update RolloutEngine rl/qwen/status: forbidden (HTTP 403)"),
    "a webhook that is down": Unreachable("update RolloutEngine rl/qwen/status: failed calling webhook (HTTP 500)"),
    "somebody who writes without a pause": Conflict("update RolloutEngine rl/qwen/status (HTTP 409)"),
}


@pytest.mark.parametrize("wedge", WEDGES)
async def test_an_operator_that_cannot_act_is_silent_to_guards(desk: Desk, wedge: str) -> None:
    """Else a guard that it closed, and has not armed, waits for it for ever."""
    desk.records.pods.upsert(make_pod())
    desk.decision = good = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)))
    await desk.run()
    error = WEDGES[wedge]
    if isinstance(error, RollfleetError):
        desk.cluster.failures["status", "qwen"] = error
        desk.decision = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=4)))
    else:
        desk.decision = error
    await desk.run()
    await asyncio.sleep(IDLE_S - 1)
    await desk.run()
    assert desk.guards.looks == 0
    await asyncio.sleep(1)
    await desk.run()
    await asyncio.sleep(0.1)
    assert desk.guards.looks == 1
    desk.cluster.failures.clear()
    desk.decision = good
    await desk.run()
    await asyncio.sleep(30)
    assert desk.guards.looks == 1, "it speaks again"


async def test_calls_that_fail_after_the_status_are_no_silence(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod())
    desk.cluster.failures["create", "qwen-1-0-b"] = Denied("create Pod rl/*: exceeded quota (HTTP 403)")
    desk.decision = Decision(actions=(CreatePod(make_pod(uid="p-2", name="qwen-1-0-b")),))
    for _ in range(3):
        await desk.run()
        await asyncio.sleep(IDLE_S)
    assert desk.guards.looks == 0


async def test_nobody_follows_the_guards_of_a_fleet_that_is_being_deleted(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod())
    await desk.run()
    assert desk.followers.count() == 1
    desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet(deletionTimestamp="2026-11-29T12:00:00Z"))
    await desk.run()
    assert desk.followers.count() == 0


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
