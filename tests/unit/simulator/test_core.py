"""The simulated core: what vLLM was seen to do with pauses, aborts, caches and its own death."""

import asyncio
from collections.abc import Callable

import pytest

from rollfleet_engine.simulator.core import BLOCK_TOKENS, Core, CoreDeadError, End, Generation, Step
from rollfleet_engine.simulator.model import greedy
from rollfleet_engine.simulator.weights import HeldWeights

OLD, NEW = HeldWeights((), "sha256:old"), HeldWeights((), "sha256:new")
PROMPT = tuple(range(20))
LONG = tuple(number % 90 for number in range(2 * BLOCK_TOKENS + 10))


class Life:
    """Whether the core lives."""

    def __init__(self) -> None:
        self.alive = True


@pytest.fixture
def life() -> Life:
    return Life()


@pytest.fixture
def core(life: Life) -> Core:
    return Core(OLD, 0.001, lambda: life.alive)


async def _until(claim: Callable[[], bool]) -> None:
    """Give way to other tasks until it is so."""
    for _ in range(10_000):
        if claim():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


async def _run(core: Core, request: Generation) -> tuple[tuple[int, ...], str]:
    tokens = []
    async for step in core.generate(request):
        if isinstance(step, End):
            return tuple(tokens), step.reason
        tokens.append(step.token)
    raise AssertionError("no end")


async def test_greedy_answer(core: Core):
    assert await _run(core, Generation(PROMPT, 10)) == (greedy("sha256:old", PROMPT, 10), "length")
    assert core.running == 0
    assert core.counters[0].finished == {"length": 1}


async def test_a_pause_ends_what_runs_with_what_it_has(core: Core):
    running = asyncio.create_task(_run(core, Generation(PROMPT, 10_000)))
    await _until(lambda: core.counters[0].generated_tokens >= 5)
    core.pause()
    tokens, reason = await asyncio.wait_for(running, 5)
    assert reason == "abort"
    assert 5 <= len(tokens) < 10_000
    assert tokens == greedy("sha256:old", PROMPT, len(tokens))


async def test_a_paused_core_holds_new_requests_until_resumed_or_aborted(core: Core):
    core.pause()
    held = asyncio.create_task(_run(core, Generation(PROMPT, 3)))
    await _until(lambda: core.running == 1)
    done, _ = await asyncio.wait({held}, timeout=0.05)
    assert not done
    core.resume()
    assert (await asyncio.wait_for(held, 5))[1] == "length"
    core.pause()
    aborted = asyncio.create_task(_run(core, Generation(PROMPT, 3)))
    await _until(lambda: core.running == 1)
    core.abort_all()
    assert await asyncio.wait_for(aborted, 5) == ((), "abort")


async def test_whole_blocks_are_cached_but_the_last_token(core: Core):
    for cached in (0, 2 * BLOCK_TOKENS):
        request = Generation(LONG, 1)
        await _run(core, request)
        assert request.cached_tokens == cached
    exact = Generation(LONG[: 2 * BLOCK_TOKENS], 1)
    await _run(core, exact)
    assert exact.cached_tokens == BLOCK_TOKENS
    salted = Generation(LONG, 1, cache_salt="other")
    await _run(core, salted)
    assert salted.cached_tokens == 0


async def test_blocks_of_old_weights_spoil_the_answer_until_they_are_dropped(core: Core):
    """What C03 of the field cases is about: without the reset a test must be able to see it."""
    await _run(core, Generation(LONG, 1))
    core.weights = NEW
    stale, _ = await _run(core, Generation(LONG, 8))
    assert stale != greedy("sha256:new", LONG, 8)
    assert core.reset_prefix_cache()
    request = Generation(LONG, 8)
    assert (await _run(core, request))[0] == greedy("sha256:new", LONG, 8)
    assert request.cached_tokens == 0


async def test_the_cache_is_not_dropped_under_a_request_that_holds_blocks(core: Core):
    steps = core.generate(Generation(LONG, 5))
    assert isinstance(await anext(steps), Step)
    assert not core.reset_prefix_cache()
    await steps.aclose()
    assert core.reset_prefix_cache()


async def test_weights_that_change_under_a_request_show_in_its_answer(core: Core):
    steps = core.generate(Generation(PROMPT, 4))
    tokens = []
    async for step in steps:
        if isinstance(step, Step):
            tokens.append(step.token)
            core.weights = NEW
    assert tokens[0] == greedy("sha256:old", PROMPT, 1)[0]
    assert tuple(tokens[1:]) == greedy("sha256:old under sha256:new", (*PROMPT, tokens[0]), 3)


async def test_a_dead_core_answers_nobody(core: Core, life: Life):
    core.pause()
    held = asyncio.create_task(_run(core, Generation(PROMPT, 3)))
    await _until(lambda: core.running == 1)
    life.alive = False
    core.stir()
    with pytest.raises(CoreDeadError):
        await asyncio.wait_for(held, 5)
    for call in (core.pause, core.resume, core.abort_all, core.reset_prefix_cache):
        with pytest.raises(CoreDeadError):
            call()
    with pytest.raises(CoreDeadError):
        await _run(core, Generation(PROMPT, 3))
