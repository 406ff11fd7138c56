"""Data-parallel ranks of the simulated core: a cache and counters of their own."""

import pytest

from rollfleet_engine.simulator.core import BLOCK_TOKENS, Core, Generation
from rollfleet_engine.simulator.metrics import render
from rollfleet_engine.simulator.weights import HeldWeights

PROMPT = tuple(range(2, 2 + BLOCK_TOKENS + 1))
pytestmark = pytest.mark.looptime


@pytest.fixture
def core() -> Core:
    return Core(HeldWeights((), "sha256:old"), 0.001, lambda: True, ranks=2)


async def ask(core: Core, rank: int | None) -> Generation:
    request = Generation(PROMPT, 2, rank=rank)
    async for _ in core.generate(request):
        pass
    return request


async def test_each_rank_has_a_cache_of_its_own(core: Core) -> None:
    assert (await ask(core, 0)).cached_tokens == 0
    assert (await ask(core, 1)).cached_tokens == 0
    assert (await ask(core, 1)).cached_tokens == BLOCK_TOKENS
    assert core.reset_prefix_cache()
    assert [(await ask(core, rank)).cached_tokens for rank in (0, 1)] == [0, 0]


async def test_who_asks_for_no_rank_is_spread(core: Core) -> None:
    assert {(await ask(core, None)).rank for _ in range(2)} == {0, 1}
    for rank in (0, 1):
        assert f'vllm:generation_tokens_total{{engine="{rank}",model_name="m"}} 2' in render(core, "m")
