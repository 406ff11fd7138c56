"""What a pass sees, and pods that are looked at one by one."""

from dataclasses import replace

import pytest

from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import Busy, Denied, Unreachable
from rollfleet_operator.core.accept import judge_weight_version
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, SERVICES, WEIGHT_VERSIONS, Listing
from tests.support.desk import KEY, NOW, SERVICE, SETTINGS, Desk, make_fleet, make_version
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime


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


async def test_a_pod_that_follows_gets_its_node_back_and_nobody_asks_it_anything(desk: Desk) -> None:
    led_by = {"rollfleet.io/leader": "qwen-0-0-abcde"}
    led = make_pod(uid="p-2", name="qwen-0-1-fghij", annotations=led_by)
    desk.records.pods.upsert(led | {"metadata": led["metadata"] | {"resourceVersion": "0"}})
    desk.cluster.put(PODS, "rl", led)
    desk.records.pods.doubt("p-2")
    await desk.run()
    assert desk.stored("pods", "qwen-0-1-fghij")["metadata"]["labels"]["rollfleet.io/node"] == "1"
    assert desk.observed is not None
    assert desk.observed.guards == {}


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


async def test_a_pod_that_may_not_be_labelled_again_holds_up_nobody(desk: Desk) -> None:
    desk.records.pods.upsert(make_pod(revision=1))
    desk.records.pods.upsert(make_pod(uid="p-2", name="qwen-1-0-b"))
    bare = make_pod()
    bare["metadata"]["labels"] = {"app": "theirs"}
    desk.cluster.put(PODS, "rl", bare)
    words = "patch Pod rl/qwen-0-0-abcde: admission webhook denied the request (HTTP 403)"
    desk.cluster.failures["patch", "qwen-0-0-abcde"] = Denied(words)
    desk.records.pods.doubt("p-1")
    for _ in range(2):
        await desk.run()
        assert desk.observed is not None
        assert [pod.uid for pod in desk.observed.pods] == ["p-1", "p-2"]
        assert desk.observed.rejected == words
    del desk.cluster.failures["patch", "qwen-0-0-abcde"]
    await desk.run()
    assert desk.observed.rejected == ""


@pytest.mark.parametrize("has_one", [True, False])
async def test_a_certificate_that_cannot_be_looked_after_stops_no_fleet_that_has_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, has_one: bool
) -> None:
    async def refuse(*_: object) -> str:
        raise Denied("get Secret rl/qwen-engine-tls: forbidden (HTTP 403)")

    status = {"status": {"caBundle": "Q0E="}} if has_one else {}
    desk.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet() | status)
    monkeypatch.setattr(Certificates, "ensure", refuse)
    await desk.run()
    if has_one:
        assert desk.observed is not None
        assert (desk.observed.ca_bundle, "HTTP 403" in desk.observed.rejected) == ("Q0E=", True)
    else:
        assert desk.observed is None
        assert await desk.said() == ["get Secret rl/qwen-engine-tls: forbidden (HTTP 403)"]


@pytest.mark.parametrize("error", [Unreachable("no answer"), Busy("too many requests")])
async def test_reads_that_fail_cost_no_deadline(desk: Desk, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> Listing:
        raise error

    await desk.run()
    with monkeypatch.context() as patch:
        patch.setattr(desk.cluster, "list", fail)
        await desk.run()
    await desk.run()
    assert desk.observed is not None
    assert desk.observed.settings.away == ((NOW, NOW),)


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
