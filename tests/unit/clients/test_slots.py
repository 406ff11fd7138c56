"""Fair slots: bounded in all and by fleet, and whoever waits gets a turn."""

import asyncio

import pytest

from rollfleet_operator.clients.slots import FairSlots

pytestmark = pytest.mark.looptime


class Calls:
    """Calls of several fleets through one set of slots, and when each began."""

    def __init__(self, total: int, per_key: int) -> None:
        self.slots = FairSlots(total, per_key)
        self.began: dict[str, list[float]] = {}
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.most_in_all = 0

    async def call(self, fleet: str, seconds: float) -> None:
        async with self.slots.slot(fleet):
            self.began.setdefault(fleet, []).append(asyncio.get_running_loop().time())
            self.now[fleet] = self.now.get(fleet, 0) + 1
            self.most[fleet] = max(self.most.get(fleet, 0), self.now[fleet])
            self.most_in_all = max(self.most_in_all, sum(self.now.values()))
            try:
                await asyncio.sleep(seconds)
            finally:
                self.now[fleet] -= 1

    def start(self, fleet: str, count: int, seconds: float) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.call(fleet, seconds)) for _ in range(count)]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_thousand_engines_that_hang_do_not_hold_up_a_fleet_of_two() -> None:
    calls = Calls(total=256, per_key=64)
    hanging = calls.start("large", 1000, 10.0)
    await settle()
    assert calls.slots.waiting() == 1000 - 64
    await asyncio.gather(*calls.start("small", 2, 0.01))
    assert asyncio.get_running_loop().time() == pytest.approx(0.01)
    await asyncio.gather(*hanging)
    assert (calls.most["large"], calls.most_in_all) == (64, 66)
    assert asyncio.get_running_loop().time() == pytest.approx(10.0 * 16)


async def test_when_all_slots_are_taken_fleets_get_them_in_turn() -> None:
    calls = Calls(total=4, per_key=4)
    tasks = calls.start("first", 100, 1.0)
    await settle()
    tasks += calls.start("second", 100, 1.0)
    small = calls.start("small", 2, 1.0)
    await asyncio.gather(*small)
    assert asyncio.get_running_loop().time() == pytest.approx(2.0), "a slot in each round, whatever waits before it"
    await asyncio.gather(*tasks)
    assert calls.most_in_all == 4


async def test_some_large_fleets_that_hang_delay_a_small_one_not_at_all() -> None:
    calls = Calls(total=256, per_key=64)
    hanging = [task for number in range(6) for task in calls.start(f"large-{number}", 1000, 10.0)]
    await settle()
    await asyncio.gather(*calls.start("small", 2, 0.01))
    assert asyncio.get_running_loop().time() == pytest.approx(0.01)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_ten_large_fleets_that_hang_delay_a_small_one_by_one_call_at_most() -> None:
    calls = Calls(total=256, per_key=64)
    hanging = [task for number in range(10) for task in calls.start(f"large-{number}", 1000, 10.0)]
    await settle()
    await asyncio.gather(*calls.start("small", 2, 0.01))
    assert asyncio.get_running_loop().time() == pytest.approx(10.01)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert calls.slots.waiting() == 0


async def test_a_call_that_is_given_up_leaves_no_slot_behind() -> None:
    calls = Calls(total=1, per_key=1)
    (running,) = calls.start("a", 1, 10.0)
    waiting = calls.start("a", 3, 10.0) + calls.start("b", 3, 10.0)
    await settle()
    for task in waiting:
        task.cancel()
    await settle()
    assert calls.slots.waiting() == 0
    running.cancel()
    await asyncio.gather(running, *waiting, return_exceptions=True)
    await asyncio.gather(*calls.start("c", 2, 1.0))
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)


async def test_a_call_that_is_given_up_in_the_moment_of_its_turn_passes_it_on() -> None:
    slots = FairSlots(1, 1)
    async with slots.slot("a"):
        waiting = asyncio.create_task(_hold(slots, "b"))
        await settle()
    waiting.cancel()  # its turn has come, and it has not run since
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1):
        await _hold(slots, "c")


async def _hold(slots: FairSlots, key: str) -> None:
    async with slots.slot(key):
        await asyncio.sleep(0)
