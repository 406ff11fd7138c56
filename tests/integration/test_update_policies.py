"""Strategy Rolling and retryRequest on a real API server: every field that the core relies on survives there."""

import asyncio
import shutil

from rollfleet_operator.ports import WEIGHT_VERSIONS, Manifest
from tests.support.fleet import World
from tests.support.waiting import until

ROLLING = {"type": "Rolling", "rolling": {"maxUnavailable": 1}}
SHORT = {"prepareSeconds": 10}


def condition(manifest: Manifest, kind: str) -> tuple[str, str]:
    """(status, reason)."""
    found = next((one for one in manifest["status"]["conditions"] if one["type"] == kind), {})
    return found.get("status", ""), found.get("reason", "")


async def test_a_fleet_rolls_and_serves_all_the_while(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(3)
    await world.serving(3)
    await world.bump(1)
    await world.active(1)
    await world.serving(3)
    update = await world.bump(2, strategy=ROLLING, minServing=2)
    assert update["spec"]["strategy"] == ROLLING
    seen: list[int] = []
    ended = asyncio.create_task(world.active(2, within_s=120))
    while not ended.done():
        seen.append((await world.read_fleet())["status"]["servingReplicas"])
        await asyncio.wait({ended}, timeout=0.05)
    document = await ended
    assert min(seen) >= 2
    assert "pausedSeconds" not in document["status"] or document["status"]["pausedSeconds"] == ""
    assert condition(document, "MixedVersions")[0] in ("True", "False"), "told from the first roll on"
    fleet = await world.serving(3)
    assert fleet["status"]["committed"]["version"] == 2
    assert "previous" not in fleet["status"]["committed"]


async def test_a_failed_version_is_retried_by_request(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    await world.bump(1, path="step-late", deadlines=SHORT)
    failed = await world.finished(1)
    assert failed["status"]["phase"] == "Failed"
    assert condition(failed, "Active") == ("False", "CheckpointNotFound")
    last = (await world.read_fleet())["status"]["lastFinished"]
    assert (last["aftermath"], last["message"].endswith("no weights were touched, version 0 stays")) == (
        "Reopened",
        True,
    )
    shutil.copytree(world.kind.models / "step-1", world.kind.models / "step-late")
    name = f"{world.fleet}-policy"
    await world.cluster.merge_patch(
        WEIGHT_VERSIONS, world.namespace, name, {"spec": {"retryRequest": "the folder is there"}}
    )

    async def is_followed() -> bool:
        return bool((await world.read_version())["status"].get("retryRequest"))

    await until(is_followed, 15, lambda: world.operator.log()[-4000:])
    document = await world.active(1)
    assert document["status"]["retryRequest"] == "the folder is there"
    assert [entry["outcome"] for entry in document["status"]["history"]] == ["Failed", "Active"]
