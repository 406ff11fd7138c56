"""Other writers on our objects."""

import asyncio
import contextlib
import itertools

from rollfleet_operator.ports import ROLLOUT_ENGINES, WEIGHT_VERSIONS, Resource
from tests.support.fleet import World
from tests.support.waiting import until


async def busy_writer(world: World, resource: Resource, name: str) -> None:
    """Change the object without a pause, so that what the operator has read is old when it writes."""
    for number in itertools.count():
        note = {"metadata": {"annotations": {"example.com/count": str(number)}}}
        await world.cluster.merge_patch(resource, world.namespace, name, note)


async def conflicts(world: World) -> float:
    metrics = await world.operator.metrics()
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith("rollfleet_kubernetes_request_seconds_count") and 'outcome="Conflict"' in name
    )


async def test_conflicting_writers_delay_nothing_for_long_and_make_no_events(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    writers = [
        asyncio.create_task(busy_writer(world, ROLLOUT_ENGINES, world.fleet)),
        asyncio.create_task(busy_writer(world, WEIGHT_VERSIONS, f"{world.fleet}-policy")),
    ]
    try:
        await world.active(1)
        version = 1
        while not await conflicts(world):
            version += 1
            assert version < 30, "thirty updates under a busy writer and no conflict"
            await world.bump(version, f"step-{1 + version % 3}")
            await world.active(version)
    finally:
        for writer in writers:
            writer.cancel()
        for writer in writers:
            with contextlib.suppress(asyncio.CancelledError):
                await writer
    await world.serving(2)
    assert await world.events_of("ApplyFailed")() == []
    assert not world.operator.entries("pass crashed")


async def test_a_version_that_is_raised_in_mid_update_wins(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    await world.bump(2)
    await world.bump(3)
    await world.active(3)


async def test_two_operators_do_not_harm_a_fleet(world: World) -> None:
    """One replica is the rule; the status write is the fence where it is broken."""
    other = type(world.operator)(
        world.namespace,
        world.operator.kubeconfig,
        world.operator.folder / "other",
        world.operator.router_image,
        world.operator.service_account,
        world.operator.arguments,
    )
    other.folder.mkdir()
    await world.operator.start()
    await other.start()
    try:
        await world.create_fleet(2)
        await world.serving(2)
        for version in (1, 2, 3):
            await world.bump(version)
            await world.active(version)
        await world.serving(2)

        async def two_pods() -> bool:
            return len(await world.pods()) == 2

        await until(two_pods, 60)
    finally:
        await other.kill()
