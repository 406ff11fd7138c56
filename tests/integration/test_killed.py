"""An operator that dies at any point and comes back goes on."""

import pytest

from tests.support.fleet import World
from tests.support.phases import PHASES, reached
from tests.support.waiting import until


async def test_killed_before_the_fleet_serves(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)

    async def some_pod() -> bool:
        return bool(await world.pods())

    await until(some_pod, 20, world.operator.log)
    await world.operator.kill()
    await world.operator.start()
    await world.serving(2)
    assert len(await world.pods()) == 2


async def test_killed_in_the_middle_of_updates(world: World) -> None:
    """At, or just after, each phase of an update."""
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    uids = [pod["metadata"]["uid"] for pod in await world.pods()]
    for version, phase in enumerate(PHASES, start=1):
        await world.bump(version, f"step-{1 + version % 3}")
        await reached(world, version, phase)
        await world.operator.kill()
        await world.operator.start()
        await world.active(version)
        fleet = await world.serving(2)
        assert fleet["status"]["committed"]["version"] == version
    assert [pod["metadata"]["uid"] for pod in await world.pods()] == uids


async def test_a_bump_while_the_operator_is_away(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    await world.operator.kill()
    await world.bump(1)
    await world.bump(2)
    await world.operator.start()
    await world.active(2)


@pytest.mark.parametrize("goodbye", ["kill", "stop"])
async def test_it_ends_within_seconds(world: World, goodbye: str) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    if goodbye == "kill":
        await world.operator.kill()
    else:
        assert await world.operator.stop() == 0
        assert world.operator.entries("stopped")
    assert (await world.read_fleet())["status"]["servingReplicas"] == 1
