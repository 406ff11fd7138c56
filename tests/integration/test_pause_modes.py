"""Updates that wait for requests, keep them, or let new ones wait: a real operator, asked at the engines themselves."""

import asyncio
import json
from typing import Any

import httpx

from rollfleet_operator.ports import Manifest
from rollfleet_protocol.refusals import SPANS_HEADER, WEIGHT_VERSION_HEADER
from tests.support.fleet import World
from tests.support.waiting import until

MS_PER_TOKEN = "10"
TOKENS = 300  # 3 s
LONG = 1500  # 15 s: to be caught running, however slowly the update comes
RANKS = 2


async def serve(world: World, **spec: Any) -> None:
    """Two engines that take their time over a token."""
    await world.operator.start()
    variables = {"ROLLFLEET_ENGINE": "simulator", "ROLLFLEET_SIMULATOR_TOKEN_MS": MS_PER_TOKEN}
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    await world.create_fleet(2, env=environment, **spec)
    await world.serving(2)


async def ask(client: httpx.AsyncClient, pod: Manifest, tokens: int = TOKENS, **headers: str) -> httpx.Response:
    url = f"http://{pod['status']['podIP']}:8000/v1/completions"
    body = {"model": "policy", "prompt": "What is the answer?", "max_tokens": tokens}
    return await client.post(url, json=body, headers=headers)


async def running(client: httpx.AsyncClient, pod: Manifest, count: float) -> None:
    """Until an engine works on so many requests, by its own count."""

    async def there() -> bool:
        text = (await client.get(f"http://{pod['status']['podIP']}:8000/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines) >= count

    await until(there, 20, lambda: "the requests do not run")


def condition(version: Manifest, kind: str) -> tuple[str, str]:
    found = {each["type"]: each for each in version["status"]["conditions"]}
    return found[kind]["status"], found[kind]["reason"]


async def test_wait_lets_requests_end_and_keep_takes_them_along(world: World) -> None:
    await serve(world, parallelism={"data": RANKS}, accelerator={"perPod": 0})
    pods = await world.pods()
    async with httpx.AsyncClient(timeout=60) as client:
        for version, mode, tokens in ((1, "wait", TOKENS), (2, "keep", LONG), (3, "abort", LONG)):
            asked = [
                asyncio.create_task(ask(client, pod, tokens, **{"X-data-parallel-rank": str(rank)}))
                for pod in pods
                for rank in range(RANKS)
            ]
            for pod in pods:
                await running(client, pod, RANKS)
            await world.bump(version, pause={"mode": mode, "drainTimeoutSeconds": 30})
            document = await world.active(version)
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 200, answer.text
                assert answer.headers[WEIGHT_VERSION_HEADER] == str(version - 1)
                reason = answer.json()["choices"][0]["finish_reason"]
                assert reason == ("abort" if mode == "abort" else "length"), mode
                if mode == "keep":
                    spans = json.loads(answer.headers[SPANS_HEADER])
                    assert [span["version"] for span in spans] == [1, 2]
                    assert 0 < spans[1]["fromToken"][0] < LONG
                else:
                    assert SPANS_HEADER not in answer.headers
            if mode == "wait":
                assert not any(each["type"] == "SpansVersions" for each in document["status"]["conditions"])
            else:
                wanted = ("True", "RequestsKept") if mode == "keep" else ("False", "NoneKept")
                assert condition(document, "SpansVersions") == wanted
        assert [target["worldSize"] for target in document["status"]["targets"]] == [RANKS, RANKS]
        assert [target["rankOffset"] for target in document["status"]["targets"]] == [1, 1 + RANKS]


async def test_hold_answers_every_request_of_an_update(world: World) -> None:
    hold = {"type": "Hold", "hold": {"seconds": 30, "maxRequests": 500}}
    await serve(world, router={"mode": "Disabled", "whenClosed": hold})
    pods = await world.pods()
    async with httpx.AsyncClient(timeout=60) as client:
        asked: list[asyncio.Task[httpx.Response]] = []
        updating = asyncio.create_task(_update(world, 1))
        while not updating.done():
            asked += [asyncio.create_task(ask(client, pod, 2)) for pod in pods]
            await asyncio.wait({updating}, timeout=0.05)
        await updating
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    told = [answer.headers[WEIGHT_VERSION_HEADER] for answer in answers]
    assert set(told) == {"0", "1"}


async def _update(world: World, version: int) -> None:
    await world.bump(version)
    await world.active(version)
    await world.serving(2)
