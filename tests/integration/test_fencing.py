"""Pods that vanish from the API server: on the real node, and on one that has an object and no machine.

The second node stands for one that is cut off: what its kubelet would have said is written by the test.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from examples.demo.kubectl import KubectlError, kubectl
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, Manifest
from tests.support.fleet import World
from tests.support.waiting import until

LABEL = "rollfleet.test/place"
UNREACHABLE = "192.0.2.9"  # TEST-NET-1: nobody answers
TAINT = "node.kubernetes.io/out-of-service"
TOLERATIONS = [{"operator": "Exists"}]  # of what the control plane says about a node without a kubelet
DEADLINES = {"prepareSeconds": 6, "quiesceSeconds": 10}


@dataclass
class CutOff:
    """A fleet of two: engine 0 on the real node, engine 1 on a node that only seems to be there."""

    world: World
    node: str

    async def vanish(self) -> str:
        """Engine 1's pod goes; its uid."""
        _, victim = await self.world.pods()
        name = victim["metadata"]["name"]
        await kubectl("delete", "pod", name, "-n", self.world.namespace, "--force", "--grace-period=0")
        return str(victim["metadata"]["uid"])

    async def remembered(self) -> list[Manifest]:
        """What the fleet's status says of pods that vanished."""
        status = (await self.world.read_fleet())["status"]
        return [member for member in status.get("members") or () if member.get("vanishedSince")]

    async def told(self) -> str:
        """What the fleet's status says of engines that can't be fenced."""
        details = (await self.world.read_fleet())["status"]["engines"].get("details") or ()
        return " ".join(each["message"] for each in details if each["state"] == "Unfenced")


async def _bound(world: World, node: str) -> Manifest:
    found: list[Manifest] = []

    async def there() -> bool:
        found[:] = [pod for pod in await world.pods() if pod["spec"].get("nodeName") == node]
        return bool(found)

    await until(there, 30, world.operator.log)
    return found[0]


async def _seems_to_run(world: World, pod: Manifest) -> None:
    """What a kubelet would have said before the node was cut off."""
    now = pod["metadata"]["creationTimestamp"]
    engine = {
        "name": "engine",
        "image": "i",
        "imageID": "i",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    status = {
        "phase": "Running",
        "podIP": UNREACHABLE,
        "podIPs": [{"ip": UNREACHABLE}],
        "containerStatuses": [engine],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
    }
    patch = json.dumps({"status": status})
    name = pod["metadata"]["name"]
    await kubectl("patch", "pod", name, "-n", world.namespace, "--subresource=status", "--type=merge", "-p", patch)


@pytest_asyncio.fixture
async def cut_off(world: World) -> AsyncIterator[CutOff]:
    """Made on the cluster's own node first; the second engine finds only the other one."""
    real = (await kubectl("get", "nodes", "-l", f"!{LABEL}", "-o", "jsonpath={.items[0].metadata.name}")).strip()
    node, place = f"cut-off-{world.namespace}", f"{LABEL}-{world.namespace}"
    try:
        await kubectl("label", "node", real, f"{place}=here")
        await world.operator.start()
        await world.create_fleet(1, nodeSelector={place: "here"}, tolerations=TOLERATIONS)
        await world.serving(1)
        await kubectl("label", "node", real, f"{place}-")
        labels = {place: "here", LABEL: "none"}
        await kubectl(
            "create",
            "-f",
            "-",
            manifest={"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": labels}},
        )
        room = {"cpu": "4", "memory": "8Gi", "pods": "10"}
        status = {"status": {"capacity": room, "allocatable": room}}
        await kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        await world.cluster.merge_patch(ROLLOUT_ENGINES, world.namespace, world.fleet, {"spec": {"replicas": 2}})
        await _seems_to_run(world, await _bound(world, node))
        made = CutOff(world, node)

        async def recorded() -> bool:
            members = (await world.read_fleet())["status"].get("members") or ()
            return [member["node"] for member in members] == [real, node]

        await until(recorded, 30, world.operator.log)
        yield made
    finally:
        with contextlib.suppress(KubectlError):
            await kubectl("label", "node", real, f"{place}-")
        with contextlib.suppress(KubectlError):
            await kubectl("delete", "node", node, "--wait=false")
        await world.cluster.delete(ROLLOUT_ENGINES, world.namespace, world.fleet)
        await kubectl("delete", "pods", "--all", "-n", world.namespace, "--force", "--grace-period=0")


@pytest.mark.parametrize("word", ["taint", "annotation"])
async def test_an_engine_on_a_node_that_is_cut_off_stops_updates_until_a_person_says_that_it_is_off(
    cut_off: CutOff, word: str
) -> None:
    world = cut_off.world
    uid = await cut_off.vanish()

    async def missed() -> bool:
        return [member["uid"] for member in await cut_off.remembered()] == [uid] and bool(await cut_off.told())

    await until(missed, 20, world.operator.log)
    assert f"kubectl taint nodes {cut_off.node} {TAINT}=nodeshutdown:NoExecute" in await cut_off.told()

    await world.operator.kill()
    await world.operator.start()
    await world.bump(1, deadlines=DEADLINES)
    ended = await world.finished(1)
    active = next(one for one in ended["status"]["conditions"] if one["type"] == "Active")
    assert (ended["status"]["phase"], active["reason"]) == ("Failed", "CannotBeFenced")
    assert cut_off.node in active["message"]
    status = (await world.read_fleet())["status"]
    assert (status["committed"]["version"], status["servingReplicas"]) == (0, 1)

    if word == "taint":
        await kubectl("taint", "nodes", cut_off.node, f"{TAINT}=nodeshutdown:NoExecute")
    else:
        await kubectl("delete", "node", cut_off.node)

        async def cure_is_told() -> bool:
            return f"rollfleet.io/fenced={uid}" in await cut_off.told()

        await until(cure_is_told, 30, world.operator.log)
        assert await cut_off.remembered(), "a Node object that is gone stops no machine"
        await kubectl("annotate", "roe", world.fleet, "-n", world.namespace, f"rollfleet.io/fenced={uid}")

    async def let_go() -> bool:
        return not await cut_off.remembered()

    await until(let_go, 30, world.operator.log)
    await world.bump(2, deadlines=DEADLINES)
    await world.active(2)


async def test_after_a_forced_deletion_on_a_node_that_is_well_updates_go_on(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    victim = (await world.pods())[0]["metadata"]
    await kubectl("delete", "pod", victim["name"], "-n", world.namespace, "--force", "--grace-period=0")
    await world.bump(1)
    await world.active(1)
    status = (await world.serving(2))["status"]
    assert victim["uid"] not in [member["uid"] for member in status["members"]]


async def test_pods_that_end_as_they_should_leave_nothing_behind(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    victim = (await world.pods())[1]["metadata"]
    await world.cluster.delete(PODS, world.namespace, victim["name"])

    async def forgotten() -> bool:
        members = (await world.read_fleet())["status"]["members"]
        return len(members) == 2 and victim["uid"] not in [member["uid"] for member in members]

    await until(forgotten, 40, world.operator.log)
    decisions = world.operator.entries("decision")
    assert not [note for entry in decisions for note in entry["notes"] if "vanished" in note]
