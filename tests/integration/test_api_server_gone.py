"""An API server that does not answer for minutes, and watches that tell nothing: the same process goes on by itself."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollfleet_operator.clients.kubernetes import load_configuration
from rollfleet_operator.ports import CHILDREN, ROLES, SERVICES
from tests.integration.conftest import RESYNC_S
from tests.support.api_proxy import ApiProxy, Way
from tests.support.fleet import World
from tests.support.phases import reached
from tests.support.waiting import until

AWAY_S = 65.0
DEADLINES = {"prepareSeconds": 30, "quiesceSeconds": 30, "transferSeconds": 30, "verifySeconds": 30}  # all shorter
RARE_RESYNC_S = 600
WATCHES = 3 + len(CHILDREN)
DEAF_BOUND_S = 100.0  # a glance, the grace, the ends of all watches, and a list


@pytest_asyncio.fixture
async def proxy(world: World, tmp_path: Path) -> AsyncIterator[ApiProxy]:
    """The operator's way to the API server."""
    made = ApiProxy(await load_configuration(world.operator.kubeconfig))
    async with made.running():
        world.operator.kubeconfig = made.kubeconfig(tmp_path / "proxy.kubeconfig")
        yield made
        await world.operator.kill()


async def open_watches(proxy: ApiProxy, count: int) -> bool:
    return proxy.watches == count


def resync_rarely(world: World) -> None:
    given = world.operator.arguments
    world.operator.arguments = tuple(str(RARE_RESYNC_S) if one == str(RESYNC_S) else one for one in given)


@pytest.mark.parametrize(
    ("way", "phase"),
    [
        pytest.param(Way.REFUSED, "Preparing", marks=pytest.mark.full),
        pytest.param(Way.DEAD, "Quiescing", marks=pytest.mark.full),
        (Way.REFUSED, "Transferring"),
    ],
)
async def test_an_outage_in_mid_update_costs_no_deadline(world: World, proxy: ApiProxy, way: Way, phase: str) -> None:
    world.kind = replace(world.kind, slow=True)
    world.operator.arguments = (*world.operator.arguments, "--lease", "operator")
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    assert world.operator.process is not None
    pid = world.operator.process.pid
    await world.bump(1, deadlines=DEADLINES)
    await reached(world, 1, phase)
    proxy.set(way)

    async def stands_by() -> bool:
        return (await world.operator.metrics())["rollfleet_leader"] == 0

    await until(stands_by, 30, world.operator.log)
    loop = asyncio.get_running_loop()
    away_until = loop.time() + AWAY_S

    async def is_over() -> bool:
        assert await world.operator.status("/healthz") == 200
        assert await world.operator.status("/readyz") == 200
        return loop.time() >= away_until

    await until(is_over, AWAY_S + 5)
    proxy.set(Way.OPEN)
    await world.active(1, within_s=60)
    await world.serving(2)
    assert world.operator.process.returncode is None
    assert (world.operator.process.pid, world.operator.starts) == (pid, 1)


async def test_watches_that_are_cut_are_taken_up_again(world: World, proxy: ApiProxy) -> None:
    resync_rarely(world)
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    await until(lambda: open_watches(proxy, WATCHES), 30)
    proxy.set(Way.REFUSED)
    await until(lambda: open_watches(proxy, 0), 30)
    proxy.set(Way.OPEN)
    await until(lambda: open_watches(proxy, WATCHES), 20, world.operator.log)
    await world.bump(1)
    await world.active(1, within_s=15)
    await world.serving(1)


async def test_watches_that_go_deaf_are_found_out_and_started_anew(world: World, proxy: ApiProxy) -> None:
    resync_rarely(world)
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    proxy.set(Way.DEAF)
    await world.bump(1)
    await world.active(1, within_s=DEAF_BOUND_S)

    async def are_found_out() -> bool:
        return "the watches are started anew: the watch on" in world.operator.log()

    await until(are_found_out, DEAF_BOUND_S, world.operator.log)
    proxy.set(Way.OPEN)
    await world.bump(2)
    await world.active(2, within_s=40)
    assert await world.operator.status("/healthz") == 200
    assert world.operator.starts == 1


async def test_children_that_somebody_changes_are_put_right_at_once(world: World) -> None:
    resync_rarely(world)
    await world.operator.start()
    await world.create_fleet(1, router={"mode": "Enabled", "replicas": 1, "policy": "round_robin"})
    await world.serving(1)
    service = f"{world.fleet}-engines"
    before = await world.cluster.get(SERVICES, world.namespace, service)
    await world.cluster.delete(SERVICES, world.namespace, service)

    async def is_back() -> bool:
        listed = await world.cluster.list(SERVICES, world.namespace, "rollfleet.io/fleet")
        return any(
            item["metadata"]["name"] == service and item["metadata"]["uid"] != before["metadata"]["uid"]
            for item in listed.items
        )

    await until(is_back, 30, world.operator.log)
    (role,) = (await world.cluster.list(ROLES, world.namespace, "rollfleet.io/fleet")).items
    name = role["metadata"]["name"]
    await world.cluster.merge_patch(ROLES, world.namespace, name, {"rules": []})

    async def may_again() -> bool:
        return bool((await world.cluster.get(ROLES, world.namespace, name))["rules"] == role["rules"])

    await until(may_again, 30, world.operator.log)
    unlabelled = {"metadata": {"labels": {"rollfleet.io/fleet": None}}}
    await world.cluster.merge_patch(ROLES, world.namespace, name, unlabelled)

    async def is_labelled() -> bool:
        found = await world.cluster.get(ROLES, world.namespace, name)
        return bool(found["metadata"]["labels"].get("rollfleet.io/fleet") == world.fleet)

    await until(is_labelled, 30, world.operator.log)
