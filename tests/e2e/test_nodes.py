"""An engine of two pods: it serves, is updated in place, and comes back whole when the pod that follows is lost."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl
from examples.demo.kubectl import until as until_object
from examples.demo.load import Load, Plan, completed
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import REAL, SIMULATED
from tests.e2e.outputs import known_outputs
from tests.support.victims import give_signal, processes_of
from tests.support.waiting import until

NODES = 2
BACK_S = 300.0  # two starts of vLLM beside each other, and the kubelet's back-off
ANSWERS_EACH = 5
NODE = "rollfleet.io/node"


async def _pods(fleet: Fleet) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one that leads, and the one that follows; those that are going left out."""
    present = [pod for pod in await fleet.pods() if "deletionTimestamp" not in pod["metadata"]]
    by_node = {pod["metadata"]["labels"].get(NODE, "0"): pod for pod in present}
    assert sorted(by_node) == ["0", "1"], [pod["metadata"]["name"] for pod in present]
    return by_node["0"], by_node["1"]


async def _serving(fleet: Fleet) -> int:
    return int((await get("rolloutengine", fleet.name, fleet.namespace))["status"].get("servingReplicas", 0))


async def _answers(load: Load, version: int, count: int) -> None:
    async def answered() -> bool:
        return completed(load.samples, version) >= count

    await until(answered, 60.0, lambda: f"too few answers of version {version}: {load.samples[-1]}")


async def _comes_back(fleet: Fleet, load: Load, version: int, lose: Callable[[], Any]) -> float:
    """Lose something of a fleet that serves: it serves no more, and then again; seconds until an answer."""
    began = time.monotonic()
    await lose()

    async def out() -> bool:
        return await _serving(fleet) == 0

    await until(out, 60.0, lambda: "the engine goes on without a node")
    before = completed(load.samples, version)
    await fleet.serving(1, timeout_s=BACK_S)

    await _answers(load, version, before + 1)
    return time.monotonic() - began


# With real vLLM the contract suite has an engine of two launchers.
@pytest.mark.parametrize("engines", [SIMULATED, pytest.param(REAL, marks=pytest.mark.full)])
async def test_an_engine_of_two_pods(environment: Environment, fleet: Fleet, engines: str) -> None:
    kind = environment.real() if engines == REAL else environment.simulated()
    known = known_outputs(environment, engines)
    paths = [folder.name for folder in folders(kind.models)]
    await fleet.create(kind, 1, parallelism={"tensor": NODES, "nodes": NODES})
    await fleet.serving(1)
    leader, follower = await _pods(fleet)
    assert not any(name in follower["spec"]["containers"][0] for name in ("ports", "readinessProbe"))
    pace = {"clients": 1, "pace_s": 0.2, "sentinel_pause_s": 0.5}
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), **pace)
    async with Load(plan) as load:
        for version in (1, 2):
            await fleet.bump(version, paths[version])
            document = await fleet.active(version)
            assert document["status"]["targets"][0]["worldSize"] == NODES
            await _answers(load, version, ANSWERS_EACH)
        assert [pod["metadata"]["uid"] for pod in await _pods(fleet)] == [
            each["metadata"]["uid"] for each in (leader, follower)
        ]

        async def kill_it() -> None:
            give_signal(processes_of(follower["metadata"]["uid"]))

        killed_s = await _comes_back(fleet, load, 2, kill_it)
        again, same = await _pods(fleet)
        assert (again["metadata"]["uid"], same["metadata"]["uid"]) == (
            leader["metadata"]["uid"],
            follower["metadata"]["uid"],
        )
        status = again["status"]["containerStatuses"][0]
        assert status["restartCount"] >= 1
        assert "node 1" in status["lastState"]["terminated"]["message"]
        gone_s = await _comes_back(fleet, load, 2, lambda: fleet.remove_pod(follower["metadata"]["name"]))
        again, fresh = await _pods(fleet)
        assert again["metadata"]["uid"] == leader["metadata"]["uid"], "a leader keeps its place"
        assert fresh["metadata"]["uid"] != follower["metadata"]["uid"]
    print(f"{engines}: answers again {killed_s:.0f} s after its node was killed, {gone_s:.0f} s after it was deleted")
    assert checks.wrong_answers(load.samples, known) == []
    assert checks.stale_answers(load.samples) == []
    await kubectl("delete", "rolloutengine", fleet.name, "-n", fleet.namespace, "--wait=true")


async def test_two_engines_with_places_for_one_do_not_keep_each_other_from_starting(
    environment: Environment, fleet: Fleet
) -> None:
    """The node has 16 NPUs, an engine takes them all in two pods of 8: each may have got the half of it."""
    await fleet.create(environment.simulated(npus=8), 2, parallelism={"tensor": NODES, "nodes": NODES})

    def told(document: dict[str, Any]) -> dict[str, int]:
        return dict(((document.get("status") or {}).get("engines") or {}).get("counts") or {})

    def settled(document: dict[str, Any]) -> bool:
        return told(document) == {"Serving": 1, "Unschedulable": 1}

    document = await until_object("rolloutengine", fleet.name, fleet.namespace, settled, 180.0)
    (detail,) = document["status"]["engines"]["details"]
    assert detail["state"] == "Unschedulable"
    assert "Insufficient huawei.com/Ascend910" in detail["message"]
    assert "meanwhile" not in detail["message"], "it holds nothing"

    async def all_pods_are_there() -> bool:  # what was given back may still end
        ordinals = [
            pod["metadata"]["labels"]["rollfleet.io/engine"]
            for pod in await fleet.pods()
            if "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(ordinals) == ["0", "0", "1", "1"]

    await until(all_pods_are_there, 60.0)
