"""An update that the caller sends: whoever begins it, it is ended once."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollfleet_trainer import NotPossible, RolloutFleet
from rollfleet_trainer import fleet as module
from tests.support.memory_api import ENGINE_PATH, LEASE_PATH, POLICY_PATH, fleet


class Driver:
    """In the place of the one that leads an update: begins when it is let, and notes the ends."""

    def __init__(self, control: Any) -> None:
        self.control = control
        self.asked, self.let = threading.Event(), threading.Event()
        self.ends: list[str] = []

    def begin(self, *_: Any) -> str:
        self.asked.set()
        assert self.let.wait(30)
        return "a push"

    def finish(self, push: str, error: BaseException | None) -> None:
        self.ends.append(f"{push}: {type(error).__name__}")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutFleet]:
    monkeypatch.setattr(module, "_device", lambda: None)
    one = RolloutFleet("rl/qwen")
    real = one._driver
    assert real is not None
    one._driver = Driver(real.control)  # type: ignore[assignment]
    yield one
    one._driver = real
    one.blocking.close()


def driver_of(trainer: RolloutFleet) -> Driver:
    found: Any = trainer._driver
    assert isinstance(found, Driver)
    return found


async def test_a_caller_that_is_cancelled_just_as_it_begins_leaves_nothing_begun(trainer: RolloutFleet):
    driver = driver_of(trainer)

    async def begun() -> None:
        async with trainer.begin():
            raise AssertionError("the block is not reached")

    task = asyncio.create_task(begun())
    await asyncio.to_thread(driver.asked.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    driver.let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver.ends == ["a push: CancelledError"]
    async with trainer.begin() as u:  # the object is free again
        assert u == "a push"
    assert driver.ends[1:] == ["a push: NoneType"]


def test_a_plain_with_is_told_which_other_one_is_meant(trainer: RolloutFleet):
    with pytest.raises(NotPossible, match=r"`with RolloutFleet\(\.\.\.\)\.blocking as fleet`"), trainer:
        pass  # type: ignore[unreachable]


@pytest.mark.parametrize("face", ["async", "blocking"])
async def test_a_step_that_is_none_is_refused_before_anything_is_done(trainer: RolloutFleet, face: str):
    one: Any = trainer if face == "async" else trainer.blocking
    for call in (one.update, one.publish):
        with pytest.raises(NotPossible, match="step is None"):
            await call({}, step=None)
    with pytest.raises(NotPossible, match="step is None"):
        one.begin(step=None)
    assert not driver_of(trainer).asked.is_set()


def test_one_at_a_time_and_each_is_ended_once(trainer: RolloutFleet):
    driver_of(trainer).let.set()
    with pytest.raises(NotPossible, match="one at a time"), trainer.begin(), trainer.begin():
        pass
    with pytest.raises(ValueError, match="mine"), trainer.begin():
        raise ValueError("mine")
    assert driver_of(trainer).ends == ["a push: NotPossible", "a push: ValueError"]


@pytest.mark.parametrize("path", [ENGINE_PATH, LEASE_PATH])
async def test_a_caller_that_is_cancelled_before_it_has_asked_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch, path: str
):
    """The call has begun: it reads the fleet, or waits for its Lease."""
    monkeypatch.setattr(module, "_device", lambda: None)
    api, reads, let = fleet(), threading.Event(), threading.Event()

    def slow(method: str, asked_for: str) -> None:
        if (method, asked_for) == ("GET", path):
            reads.set()
            assert let.wait(30)

    api.failing = slow
    one = RolloutFleet("rl/qwen", service_account="grpo")
    assert one._driver is not None
    one._driver.control._api = api  # type: ignore[assignment]
    task = asyncio.create_task(one.begin().__aenter__())
    await asyncio.to_thread(reads.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert POLICY_PATH not in api.objects
    await one.aclose()
    assert not api.objects[LEASE_PATH]["spec"].get("holderIdentity")
