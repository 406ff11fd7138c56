"""Objects that cannot be satisfied say so, in a condition that names the field."""

import pytest

from rollfleet_operator.clients.errors import InvalidSpec
from rollfleet_operator.ports import WEIGHT_VERSIONS, Manifest
from tests.support.fleet import World
from tests.support.waiting import until


def condition(manifest: Manifest, kind: str) -> Manifest:
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return next((dict(one) for one in conditions if one["type"] == kind), {})


async def accepted(world: World, name: str, wanted: str) -> Manifest:
    """Wait for the Accepted condition of a WeightVersion."""
    last: Manifest = {}

    async def is_told() -> bool:
        nonlocal last
        last = condition(await world.cluster.get(WEIGHT_VERSIONS, world.namespace, name), "Accepted")
        return bool(last.get("status") == wanted)

    await until(is_told, 15, lambda: f"{last}\n{world.operator.log()[-4000:]}")
    return last


async def test_a_weight_version_of_no_fleet_is_not_accepted_until_the_fleet_is_there(world: World) -> None:
    await world.operator.start()
    await world.bump(1)
    told = await accepted(world, "qwen-policy", "False")
    assert "engineRef" in told["message"]
    assert "qwen" in told["message"]
    await world.create_fleet(1)
    await world.active(1, within_s=120)
    await accepted(world, "qwen-policy", "True")


async def test_a_second_weight_version_of_a_fleet_is_not_accepted(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    first = await world.bump(1)
    await world.active(1)
    second = {
        "apiVersion": first["apiVersion"],
        "kind": first["kind"],
        "metadata": {"name": "another", "namespace": world.namespace},
        "spec": first["spec"] | {"version": 9},
    }
    await world.cluster.create(WEIGHT_VERSIONS, world.namespace, second)
    told = await accepted(world, "another", "False")
    assert "qwen-policy" in told["message"]
    assert (await world.read_fleet())["status"]["committed"]["version"] == 1


async def test_a_lowered_version_is_refused_by_the_api_server(world: World) -> None:
    await world.bump(5)
    with pytest.raises(InvalidSpec, match=r"spec\.version"):
        await world.bump(4)


async def test_a_checkpoint_that_is_not_there_never_pauses_the_fleet(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    await world.bump(1, "no-such-step", deadlines={"prepareSeconds": 10})
    ended = await world.finished(1)
    assert ended["status"]["phase"] == "Failed"
    assert "no-such-step" in str(ended["status"]["conditions"])
    assert (await world.read_fleet())["status"]["servingReplicas"] == 1
    await world.bump(2)
    await world.active(2)
