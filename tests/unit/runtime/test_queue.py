"""The keyed queue, on a fake clock."""

import asyncio
from collections.abc import Callable
from contextlib import closing

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_operator.runtime.queue import (
    BACKOFF_MAX_S,
    HOLD_S,
    MAX_CONFLICTS,
    MAX_PASSES,
    PASSES_PER_S,
    KeyedQueue,
)

pytestmark = pytest.mark.looptime


async def taken(queue: KeyedQueue, within_s: float) -> str | None:
    try:
        async with asyncio.timeout(within_s):
            return await queue.get()
    except TimeoutError:
        return None


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_key_is_at_most_once_in_the_queue() -> None:
    queue = KeyedQueue()
    for _ in range(3):
        queue.put("a")
    assert queue.depth() == 1
    assert await taken(queue, 1) == "a"
    queue.done("a")
    assert await taken(queue, 60) is None


async def test_news_during_a_pass_come_again_after_it_and_not_beside_it() -> None:
    queue = KeyedQueue()
    queue.put("a")
    assert await taken(queue, 1) == "a"
    queue.put("a")
    queue.put("a")
    assert await taken(queue, 60) is None
    queue.done("a")
    assert await taken(queue, 0.001) == "a"
    queue.done("a")
    assert await taken(queue, 60) is None


async def test_different_keys_are_worked_on_in_parallel() -> None:
    queue = KeyedQueue()
    queue.put("a")
    queue.put("b")
    assert {await taken(queue, 1), await taken(queue, 1)} == {"a", "b"}


async def test_a_waiting_worker_is_woken() -> None:
    queue = KeyedQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put("a")
    assert await waiting == "a"


async def test_the_last_wake_counts_and_none_takes_it_back() -> None:
    queue = KeyedQueue()
    queue.wake("a", 5)
    queue.wake("a", 100)
    assert await taken(queue, 99) is None
    assert await taken(queue, 2) == "a"
    queue.done("a")
    queue.wake("a", 5)
    queue.wake("a", None)
    assert await taken(queue, 1000) is None


async def test_a_failing_key_backs_off_exponentially_up_to_a_bound() -> None:
    queue, delays = KeyedQueue(), []
    queue.put("a")
    for _ in range(14):
        assert await taken(queue, BACKOFF_MAX_S + 1) == "a"
        delays.append(queue.failed("a"))
    assert delays[0] <= 0.1
    assert delays[5] > 10 * delays[0]
    assert max(delays) <= BACKOFF_MAX_S
    assert min(delays[-3:]) >= BACKOFF_MAX_S / 2


async def test_news_about_a_failing_key_wait_no_longer_than_the_hold() -> None:
    queue = KeyedQueue()
    queue.put("a")
    for _ in range(12):
        assert await taken(queue, BACKOFF_MAX_S + 1) == "a"
        queue.failed("a")
    queue.put("a")
    queue.put("a")
    assert await taken(queue, HOLD_S * 0.9) is None
    assert await taken(queue, HOLD_S * 0.2) == "a"


async def test_passes_that_succeed_cannot_spin_on_news() -> None:
    """Two operators that write over each other's word would else do so as fast as the API server lets them."""
    queue = KeyedQueue()
    ends, passes = now() + 60, 0
    while now() < ends:
        queue.put("a")
        if await taken(queue, ends - now()) is not None:
            passes += 1
            queue.done("a")
    assert MAX_PASSES + 59 * PASSES_PER_S <= passes <= MAX_PASSES + 61 * PASSES_PER_S
    if await taken(queue, 1) is not None:  # the last news
        queue.done("a")
    assert await taken(queue, 60) is None
    for _ in range(int(MAX_PASSES) - 1):  # idle since, it may run as fast as before
        queue.put("a")
        assert await taken(queue, 0.001) == "a"
        queue.done("a")


@pytest.mark.parametrize("delay_s", [None, 0.0, 300.0])
async def test_news_that_wait_for_the_hold_to_end_outlive_the_word_of_the_pass_before(delay_s: float | None) -> None:
    queue = KeyedQueue()
    for _ in range(int(MAX_PASSES) + 1):
        queue.put("a")
        assert await taken(queue, 1) == "a"
        queue.put("a")  # what the pass itself wrote comes back as news
        queue.done("a")
        queue.wake("a", delay_s)
    assert await taken(queue, 2 / PASSES_PER_S) == "a"


Steps = list[tuple[str, bool, float | None]]
steps = st.tuples(
    st.sampled_from(["done", "failed", "conflicted"]),
    st.booleans(),  # whether news come in the middle of the pass
    st.sampled_from([None, 0.0, 0.05, 300.0]),  # when the pass wants to be called again
)


@given(st.lists(steps, min_size=1, max_size=20), st.lists(st.sampled_from([0.0, 0.01, 0.5, 5.0]), min_size=20))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_no_news_are_lost(passes: Steps, waits: list[float]) -> None:
    """Whatever passes do and say, news bring a pass that begins after them, within the longest hold."""

    async def live() -> None:
        queue = KeyedQueue(max_passes=2)
        for (end, is_news, delay_s), wait_s in zip(passes, waits, strict=False):
            queue.put("a")
            assert await taken(queue, 1.5 * HOLD_S) == "a"
            if is_news:
                queue.put("a")
            getattr(queue, end)("a")
            if end == "done":
                queue.wake("a", delay_s)
            if is_news:
                assert await taken(queue, 1.5 * HOLD_S) == "a"
                queue.done("a")
                queue.wake("a", None)
            await asyncio.sleep(wait_s)
        queue.close()

    with closing(looptime.new_event_loop()) as loop:
        loop.run_until_complete(live())


async def test_success_ends_the_back_off() -> None:
    queue = KeyedQueue()
    queue.put("a")
    for _ in range(8):
        assert await taken(queue, BACKOFF_MAX_S + 1) == "a"
        queue.failed("a")
    assert await taken(queue, BACKOFF_MAX_S + 1) == "a"
    queue.done("a")
    queue.put("a")
    assert await taken(queue, 0.001) == "a"
    assert queue.failed("a") <= 0.1


async def test_the_other_side_may_ask_for_a_longer_wait() -> None:
    queue = KeyedQueue()
    queue.put("a")
    assert await taken(queue, 1) == "a"
    assert queue.failed("a", after_s=7.0) == 7.0


async def test_conflicts_come_again_at_once_and_then_with_a_back_off() -> None:
    queue = KeyedQueue()
    queue.put("a")
    started = now()
    for _ in range(MAX_CONFLICTS):
        assert await taken(queue, 0.001) == "a"
        queue.conflicted("a")
    assert await taken(queue, 0.001) == "a"
    assert now() == started
    queue.conflicted("a")
    assert await taken(queue, 0.01) is None
    assert await taken(queue, 1) == "a"


async def test_a_full_queue_refuses_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    queue = KeyedQueue(max_keys=2)
    for key in ("a", "b", "c"):
        queue.put(key)
    assert queue.depth() == 2
    assert "c waits for the next resync" in caplog.text


async def test_a_namespace_that_fills_the_queue_makes_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    queue = KeyedQueue(max_keys=100)
    for number in range(1000):
        queue.put(f"junk/{number}")
    for name in ("other/a", "other/b"):
        queue.put(name)
    assert queue.depth() == 100
    assert "junk/99 waits for the next resync" in caplog.text
    assert [await taken(queue, 1) for _ in range(4)] == ["junk/0", "other/a", "junk/1", "other/b"]
    queue.done("other/a")
    queue.put("junk/99")  # it was dropped, not taken for waiting
    assert queue.depth() == 97


async def test_a_namespace_whose_passes_are_slow_leaves_workers_to_others() -> None:
    queue = KeyedQueue(max_at_once=2)
    for number in range(5):
        queue.put(f"slow/{number}")
    assert [await taken(queue, 1) for _ in range(3)] == ["slow/0", "slow/1", None]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(1)
    queue.put("other/a")
    assert await waiting == "other/a"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(1)
    assert not waiting.done()
    queue.failed("slow/1")
    assert await asyncio.wait_for(waiting, 1) == "slow/2"


@pytest.mark.parametrize("end", [KeyedQueue.done, KeyedQueue.failed, KeyedQueue.conflicted])
async def test_a_forgotten_key_leaves_nothing(end: Callable[[KeyedQueue, str], object]) -> None:
    queue = KeyedQueue()
    queue.put("a")
    assert await taken(queue, 1) == "a"
    queue.wake("a", 10)
    queue.forget("a")
    queue.done("a")
    assert await taken(queue, 100) is None
    queue.put("a")
    assert await taken(queue, 0.001) == "a"
    end(queue, "a")


async def test_the_longest_pass_is_known() -> None:
    queue = KeyedQueue()
    assert queue.longest_pass_s() == 0
    queue.put("a")
    await queue.get()
    await asyncio.sleep(30)
    assert queue.longest_pass_s() == 30
