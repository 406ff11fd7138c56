"""C30: the rank that a request asks for reaches the engine through the router, and what is no rank is refused."""

import aiohttp

from examples.demo.environment import Environment
from examples.demo.fleet import Fleet
from examples.demo.manifests import SERVED_NAME

RANKS = 2
HEADER = "X-data-parallel-rank"
FINISHED = "vllm:request_success_total"
TIMEOUT = aiohttp.ClientTimeout(total=30)
BALANCED = 12  # requests without a rank


async def _ask(session: aiohttp.ClientSession, url: str, rank: str | None) -> tuple[int, str]:
    body = {"model": SERVED_NAME, "prompt": "abc", "max_tokens": 1}
    headers = {} if rank is None else {HEADER: rank}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def _answered(session: aiohttp.ClientSession, fleet: Fleet) -> list[float]:
    """Requests that each rank of the only engine has finished, by its own count."""
    address = (await fleet.pods())[0]["status"]["podIP"]
    async with session.get(f"http://{address}:8000/metrics") as answer:
        lines = (await answer.text()).splitlines()
    ours = [line for line in lines if line.startswith(FINISHED)]
    return [sum(float(line.split()[-1]) for line in ours if f'engine="{rank}"' in line) for rank in range(RANKS)]


async def test_c30_ranks_through_the_router(environment: Environment, fleet: Fleet) -> None:
    await fleet.create(environment.simulated(), 1, parallelism={"data": RANKS}, accelerator={"perPod": 0})
    await fleet.serving(1)
    url = await fleet.url()
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        for _ in range(BALANCED):
            assert (await _ask(session, url, None))[0] == 200
        assert min(await _answered(session, fleet)) > 0
        for rank in range(RANKS):
            before = await _answered(session, fleet)
            assert (await _ask(session, url, str(rank)))[0] == 200
            after = await _answered(session, fleet)
            assert [now - then for now, then in zip(after, before, strict=True)] == [
                float(each == rank) for each in range(RANKS)
            ]
        for text in ("2", "-1", "abc"):
            status, body = await _ask(session, url, text)
            assert (status, "0 to 1" in body) == (400, True), (text, body)
