"""Engines that come and go, followed by the operator: what they answer is asked at the engines themselves."""

import contextlib

import httpx

from examples.demo.kubectl import KubectlError, kubectl
from rollfleet_operator.ports import PODS, Manifest
from rollfleet_protocol.refusals import WEIGHT_VERSION_HEADER
from tests.support.fleet import World
from tests.support.waiting import until

RESTART_S = 60.0


async def versions_told(world: World) -> list[str]:
    """The version that each engine names on an answer, or its HTTP status where it gives none."""
    told = []
    async with httpx.AsyncClient(timeout=5) as client:
        for pod in await world.pods():
            url = f"http://{pod['status']['podIP']}:8000/v1/completions"
            answer = await client.post(url, json={"model": "policy", "prompt": "a", "max_tokens": 2})
            told.append(answer.headers.get(WEIGHT_VERSION_HEADER, "") if answer.is_success else str(answer.status_code))
    return told


async def test_all_engines_name_the_committed_version_before_the_update_is_called_active(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(3)
    await world.serving(3)
    assert await versions_told(world) == ["0"] * 3
    for version in (1, 2):
        await world.bump(version)
        await world.active(version)
        assert await versions_told(world) == [str(version)] * 3


async def test_an_engine_restarted_in_place_serves_the_committed_version_again(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    await world.active(1)
    victim = (await world.pods())[0]["metadata"]
    kill = ("--", "sh", "-c", "kill -TERM 1")
    with contextlib.suppress(KubectlError):  # the container may end before the session that ends it
        await kubectl("exec", victim["name"], "-n", world.namespace, "-c", "engine", *kill)
    last: Manifest = {}

    async def restarted() -> bool:
        nonlocal last
        last = await world.cluster.get(PODS, world.namespace, victim["name"])
        return any(status["restartCount"] for status in last["status"].get("containerStatuses") or ())

    await until(restarted, RESTART_S, lambda: str(last.get("status")))
    assert last["metadata"]["uid"] == victim["uid"]

    async def both_serve() -> bool:
        try:
            return await versions_told(world) == ["1", "1"]
        except httpx.HTTPError:  # not listening yet
            return False

    await until(both_serve, RESTART_S, world.operator.log)
    await world.serving(2)


async def test_a_deleted_engine_comes_back_with_the_committed_version(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await world.bump(1)
    await world.active(1)
    victim = (await world.pods())[0]["metadata"]["name"]
    await world.cluster.delete(PODS, world.namespace, victim)

    async def replaced() -> bool:
        names = [pod["metadata"]["name"] for pod in await world.pods()]
        return victim not in names and len(names) == 2

    await until(replaced, RESTART_S, world.operator.log)
    await world.serving(2)
    assert await versions_told(world) == ["1", "1"]
