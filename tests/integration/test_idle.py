"""C31: nothing is written where nothing changed."""

import asyncio

from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, SERVICES
from tests.integration.conftest import RESYNC_S
from tests.support.fleet import World
from tests.support.waiting import until

ENGINES = 10
IDLE_S = 20.0  # six resyncs and two rounds of long polls; 60 s tell no more


async def watched_for(world: World, seconds: float, revisions: dict[str, str], writes: float) -> None:
    """Look again and again that nothing was written."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while loop.time() < deadline:
        assert await world.revisions() == revisions, world.operator.log()[-4000:]
        assert await world.writes() == writes, world.operator.log()[-4000:]


async def settled(world: World) -> tuple[dict[str, str], float]:
    """Wait until all looks between two resyncs are the same."""
    last: tuple[dict[str, str], float] = ({}, 0.0)
    loop = asyncio.get_running_loop()
    since = loop.time()

    async def same() -> bool:
        nonlocal last, since
        now = (await world.revisions(), await world.writes())
        if now != last:
            last, since = now, loop.time()
        return loop.time() - since >= 1.5 * RESYNC_S

    await until(same, 60, lambda: f"it does not come to rest:\n{world.operator.log()[-6000:]}")
    return last


async def test_c31_an_idle_fleet_is_not_written_to(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(ENGINES)
    await world.serving(ENGINES, within_s=200)
    await world.bump(1)
    await world.active(1)
    revisions, writes = await settled(world)
    await watched_for(world, IDLE_S, revisions, writes)
    await _annotate_everything(world)
    annotated = await world.revisions()
    assert {name for name in annotated if annotated[name] != revisions[name]} >= {f"RolloutEngine/{world.fleet}"}
    await watched_for(world, 8, annotated, writes)
    # By now a watch that is dead, or that nobody reads, would have been found out.
    assert await world.operator.status("/healthz") == 200


async def test_c31_a_restarted_operator_writes_nothing_to_an_idle_fleet(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    await world.active(1)
    revisions, _ = await settled(world)
    await world.operator.kill()
    await world.operator.start()

    async def all_followed() -> bool:
        return (await world.operator.metrics())["rollfleet_guards_followed"] == 2

    await until(all_followed, 30)
    after, writes = await settled(world)
    assert after == revisions, world.operator.log()[-4000:]
    await watched_for(world, 5, revisions, writes)


async def _annotate_everything(world: World) -> None:
    """What a foreign controller might do."""
    note = {"metadata": {"annotations": {"example.com/seen": "true"}}}
    pods = [pod["metadata"]["name"] for pod in await world.pods()]
    for resource, name in ((ROLLOUT_ENGINES, world.fleet), (SERVICES, f"{world.fleet}-engines"), (PODS, pods[0])):
        await world.cluster.merge_patch(resource, world.namespace, name, note)
