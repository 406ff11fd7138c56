"""max_staleness: what is submitted while the fleet's weights lag behind the trainer's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rollfleet_trainer.pacing import Pace
from rollfleet_trainer.rollout_errors import NotServedError, VersionPassedError
from rollfleet_trainer.rollouts import Rollouts
from tests.support.scripted_fleet import ScriptedFleet

pytestmark = pytest.mark.looptime


class Timed(ScriptedFleet):
    """Serves the version that `version` is set to; answers take a second."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1)
        return await super().handle_async_request(request)

    def count(self, what: str) -> int:
        return sum(each == what for _, each in self.log)


def client(fleet: ScriptedFleet, **options: Any) -> Rollouts:
    return Rollouts("http://engine:8000", model="policy", transport=fleet, **options)


async def test_one_finds_out_and_the_others_wait_for_it() -> None:
    fleet = Timed(version=3)
    async with client(fleet, max_staleness=1, hold_s=100) as rollouts:
        rollouts.note_version(4)
        assert (await rollouts.complete("a", 2)).versions == (3, 3)  # one behind: allowed
        rollouts.note_version(5)
        waiting = [asyncio.create_task(rollouts.complete("a", 2)) for _ in range(20)]
        await asyncio.sleep(40)
        assert fleet.count("answer") == 1
        assert fleet.count("wrong") < 15  # of one, with growing pauses, in 40 s
        fleet.version = 4
        samples = await asyncio.gather(*waiting)
    assert {sample.versions for sample in samples} == {(4, 4)}
    assert fleet.count("answer") == 21
    assert fleet.count("wrong") < 16
    assert rollouts.served_version == 4


async def test_nothing_is_answered_by_weights_that_are_too_old_even_where_nobody_knew() -> None:
    """The first requests of a client go out before any answer has told it of a version: engines refuse them."""
    fleet = Timed(version=1)
    async with client(fleet, max_staleness=0, hold_s=5) as rollouts:
        rollouts.note_version(2)
        samples = await asyncio.gather(*(rollouts.complete("a", 2) for _ in range(4)), return_exceptions=True)
    assert [type(each) for each in samples] == [NotServedError] * 4
    assert fleet.count("answer") == 0
    assert any(
        "version 1" in str(each) or "max_staleness 0" in str(each) or "WrongVersion" in str(each) for each in samples
    )


async def test_without_a_trainers_version_nothing_is_paced() -> None:
    fleet = Timed(version=1)
    async with client(fleet, max_staleness=0) as rollouts:
        assert (await rollouts.complete("a", 2)).versions == (1, 1)


async def test_patience_ends_for_those_who_wait_too() -> None:
    fleet = Timed(version=1)
    loop = asyncio.get_running_loop()
    async with client(fleet, max_staleness=0, hold_s=10) as rollouts:
        await rollouts.complete("a", 2)
        rollouts.note_version(2)
        start = loop.time()
        outcomes = await asyncio.gather(*(rollouts.complete("a", 2) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, NotServedError) for each in outcomes)
        assert loop.time() - start < 12.1  # the one that tries may be in the middle of a try
    assert sum("1 is the newest that was heard of" in str(each) for each in outcomes) == 2


async def test_a_demand_for_what_is_too_old_is_an_error_at_once() -> None:
    fleet = Timed(version=9)
    async with client(fleet, max_staleness=2) as rollouts:
        rollouts.note_version(9)
        with pytest.raises(VersionPassedError, match="allows 7 or later"):
            await rollouts.complete("a", 2, version=6)
        assert fleet.log == []
        await rollouts.complete("a", 2, min_version=8)
        await rollouts.complete("a", 2, min_version=3)
    assert [headers["X-Weight-Version-Min"] for headers in fleet.headers] == ["8", "7"]


async def test_whoever_finds_out_and_gives_up_is_followed_by_another() -> None:
    fleet = Timed(version=1)
    async with client(fleet, max_staleness=0, hold_s=100) as rollouts:
        await rollouts.complete("a", 2)
        rollouts.note_version(2)
        scout, other = (asyncio.create_task(rollouts.complete("a", 2)) for _ in range(2))
        await asyncio.sleep(3)
        scout.cancel()
        await asyncio.sleep(3)
        fleet.version = 2
        assert (await other).versions == (2, 2)


def test_the_trainer_never_goes_back() -> None:
    pace = Pace(1)
    pace.note(5)
    pace.note(3)
    assert (pace.current, pace.floor, pace.lags) == (5, 4, False)
    pace.heard(3)
    assert pace.lags
    pace.heard(None)
    pace.heard(4)
    pace.heard(2)
    assert (pace.served, pace.lags) == (4, False)
    with pytest.raises(ValueError, match="negative"):
        pace.note(-1)
