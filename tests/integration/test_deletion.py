"""C22: objects go away at any point, and can be made again; nothing of ours holds them."""

import pytest

from rollfleet_operator.clients.errors import NotFound
from rollfleet_operator.ports import ROLLOUT_ENGINES, WEIGHT_VERSIONS, Manifest
from tests.support.fleet import World
from tests.support.waiting import until

POLICY = "qwen-policy"
STEP_S = 4  # of engines that are met in a phase, and are still in it when the deed is done
SLOW = [
    {"name": name, "value": value}
    for name, value in {"ROLLFLEET_ENGINE": "simulator", "ROLLFLEET_SIMULATOR_STEP_SECONDS": str(STEP_S)}.items()
]


async def in_phase(world: World, version: int, phases: tuple[str, ...]) -> None:
    """Wait until the update has come so far."""

    async def there() -> bool:
        status: Manifest = (await world.read_version()).get("status") or {}
        return status.get("version") == version and status.get("phase") in phases

    await until(there, 60, lambda: world.operator.log()[-6000:])


async def gone(world: World) -> None:
    """Wait until the WeightVersion does not exist."""

    async def is_gone() -> bool:
        try:
            await world.read_version()
        except NotFound:
            return True
        return False

    await until(is_gone, 10)


@pytest.mark.parametrize("phase", ["Preparing", "Transferring"])
async def test_c22_a_weight_version_goes_in_mid_update_and_the_fleet_goes_on(world: World, phase: str) -> None:
    await world.operator.start()
    await world.create_fleet(2, env=SLOW)
    await world.serving(2)
    await world.bump(1)
    await in_phase(world, 1, (phase,))
    await world.cluster.delete(WEIGHT_VERSIONS, world.namespace, POLICY)
    await gone(world)
    fleet = await world.serving(2)
    assert fleet["status"]["committed"]["version"] == 0
    await world.bump(1)
    await world.active(1)


async def test_c22_a_fleet_goes_in_mid_update_and_is_made_again_under_its_name(world: World) -> None:
    await world.operator.start()
    first = await world.create_fleet(2, env=SLOW)
    await world.serving(2)
    await world.bump(1)
    await in_phase(world, 1, ("Quiescing", "Transferring", "Verifying"))
    await world.cluster.delete(ROLLOUT_ENGINES, world.namespace, world.fleet)
    second = await world.create_fleet(2)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    await world.active(1, within_s=120)
    await world.serving(2)
    assert all(
        owner["uid"] == second["metadata"]["uid"]
        for pod in await world.pods()
        if "deletionTimestamp" not in pod["metadata"]
        for owner in pod["metadata"]["ownerReferences"]
    )


async def test_c22_both_go_while_the_operator_is_away(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    await world.active(1)
    await world.operator.kill()
    await world.cluster.delete(ROLLOUT_ENGINES, world.namespace, world.fleet)
    await world.cluster.delete(WEIGHT_VERSIONS, world.namespace, POLICY)
    await gone(world)
    await world.gone()
    await world.operator.start()
    await world.create_fleet(1)
    await world.bump(1)
    await world.active(1, within_s=120)
