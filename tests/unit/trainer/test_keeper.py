"""The sender's Lease: renewed, lost in time, taken over in time, and told why."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollfleet_protocol.senders import MESSAGE_ANNOTATION, OFFERS_ANNOTATION
from rollfleet_trainer.errors import AnotherSender, DeniedError, NotPossible, SenderLost, UnreachableError
from rollfleet_trainer.keeper import Keeper
from tests.support.memory_api import FLEET, LEASE_PATH, NAMESPACE, MemoryApi, fleet

pytestmark = pytest.mark.looptime
DURATION_S = 15


class Trainers:
    """Keepers on one API server, by the loop's clock."""

    def __init__(self) -> None:
        self.api = fleet()
        self.keepers: list[Keeper] = []
        self.apis: list[MemoryApi] = []

    def new(self, name: str) -> Keeper:
        loop = asyncio.get_running_loop()
        one = Keeper(self.api, NAMESPACE, FLEET, f"grpo/{name}", DURATION_S, loop.time)
        self.keepers.append(one)
        return one

    @property
    def spec(self) -> dict[str, object]:
        return self.api.objects[LEASE_PATH]["spec"]

    @property
    def annotations(self) -> dict[str, str]:
        return self.api.objects[LEASE_PATH]["metadata"].get("annotations", {})

    def cut(self, cut: bool = True) -> None:
        """The way to the API server."""
        self.api.failing = lambda *_: UnreachableError("cut") if cut else None


@pytest_asyncio.fixture
async def trainers() -> AsyncIterator[Trainers]:
    made = Trainers()
    yield made
    made.cut(False)
    for keeper in made.keepers:
        await keeper.release()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_it_is_renewed_each_third_of_its_duration(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    assert (trainers.spec["holderIdentity"], trainers.spec["leaseDurationSeconds"]) == ("grpo/a", DURATION_S)
    trainers.api.requests.clear()
    await asyncio.sleep(100)
    assert one.holds()
    renewals = [path for method, path in trainers.api.requests if (method, path) == ("PATCH", LEASE_PATH)]
    assert 20 <= len(renewals) <= 26  # every 4 to 5 s


async def test_an_offer_is_kept_over_renewals_and_taken_back_with_why(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    await one.offer("uid-1/7")
    await asyncio.sleep(30)
    assert trainers.annotations == {OFFERS_ANNOTATION: "uid-1/7"}
    await one.offer("", "ValueError: the gather failed on rank 3\x1b[2J")
    assert trainers.annotations == {MESSAGE_ANNOTATION: "ValueError: the gather failed on rank 3\\x1b[2J"}
    await one.offer("uid-1/8")
    assert trainers.annotations == {OFFERS_ANNOTATION: "uid-1/8"}


async def test_a_holder_stops_before_anybody_may_take_over(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    await asyncio.sleep(7)
    trainers.cut()
    renewed = trainers.spec["renewTime"]
    await asyncio.sleep(DURATION_S * 2 / 3)
    assert not one.holds()
    assert trainers.spec["renewTime"] == renewed
    assert "was not renewed for 10 s" in one.why_lost()
    trainers.cut(False)
    with pytest.raises(SenderLost, match="start the update anew"):
        await one.offer("uid-1/7")
    two = trainers.new("b")
    began = now()
    await two.take(0)
    assert now() - began >= DURATION_S  # from when the second one first looked
    assert trainers.spec["holderIdentity"] == "grpo/b"
    assert trainers.spec["leaseTransitions"] == 1


async def test_a_short_outage_costs_nothing(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    for _ in range(5):
        trainers.cut()
        await asyncio.sleep(4)
        trainers.cut(False)
        await asyncio.sleep(6)
        assert one.holds()


async def test_a_second_live_trainer_is_refused_by_name(trainers: Trainers):
    one, two = trainers.new("a"), trainers.new("b")
    await one.take(0)
    began = now()
    with pytest.raises(AnotherSender, match="grpo/a") as refused:
        await two.take(0)
    assert refused.value.holder == "grpo/a"
    assert now() - began < DURATION_S
    assert one.holds()


async def test_words_of_a_holder_are_shown_as_words(trainers: Trainers):
    """Whoever may write the Lease writes there what it likes."""
    await trainers.new("\x1b]0;owned\x07" + "x" * 100_000).take(0)
    with pytest.raises(AnotherSender) as refused:
        await trainers.new("b").take(0)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500
    assert len(refused.value.holder) <= 200


async def test_a_second_trainer_waits_as_long_as_it_was_told(trainers: Trainers):
    one, two = trainers.new("a"), trainers.new("b")
    await one.take(0)
    waiting = asyncio.create_task(two.take(60))
    await asyncio.sleep(40)
    await one.release("done")
    freed = now()
    await waiting
    assert now() - freed < 2
    assert two.holds()
    with pytest.raises(AnotherSender, match="60 s have passed"):
        await trainers.new("c").take(60)


async def test_a_holder_that_was_deposed_sends_no_more(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    trainers.api.change(LEASE_PATH, {"spec": {"holderIdentity": "grpo/b"}})
    await asyncio.sleep(6)
    assert not one.holds()
    assert "'grpo/b' holds Lease qwen-sender now" in one.why_lost()
    await one.release()
    assert trainers.spec["holderIdentity"] == "grpo/b"


async def test_other_writers_do_not_cost_the_lease(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    for number in range(10):
        trainers.api.change(LEASE_PATH, {"metadata": {"labels": {"written": str(number)}}})
        await asyncio.sleep(5)
        assert one.holds()


async def test_a_released_lease_is_taken_at_once(trainers: Trainers):
    one, two = trainers.new("a"), trainers.new("b")
    await one.take(0)
    await one.offer("uid-1/7")
    await one.release()
    assert trainers.annotations == {}
    began = now()
    await two.take(0)
    assert now() == began


async def test_a_fleet_without_trainers_is_told_from_one_that_is_new(trainers: Trainers):
    lease = trainers.api.objects.pop(LEASE_PATH)
    with pytest.raises(NotPossible, match=r"add serviceAccountName 'grpo' to spec\.trainers"):
        await trainers.new("a").take(0)
    two = trainers.new("b")
    waiting = asyncio.create_task(two.take(0))
    await asyncio.sleep(3)
    trainers.api.put(LEASE_PATH, lease)
    await waiting
    assert two.holds()


async def test_a_right_that_is_taken_away_ends_it_at_the_next_renewal(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    trainers.api.failing = lambda *_: DeniedError("leases is forbidden")
    await asyncio.sleep(6)
    assert not one.holds()
    assert "leases is forbidden" in one.why_lost()


async def test_it_is_given_back_though_a_renewal_has_got_no_answer(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    trainers.api.change(
        LEASE_PATH, {"spec": {"renewTime": "2026-11-30T00:00:01.000000Z"}}
    )  # it was written all the same
    await one.release()
    assert trainers.spec["holderIdentity"] == ""
    two = trainers.new("b")
    await two.take(0)
    trainers.api.change(LEASE_PATH, {"spec": {"holderIdentity": "grpo/c"}})
    await two.release()
    assert trainers.spec["holderIdentity"] == "grpo/c", "it is another's by now"


async def test_why_the_last_version_was_given_up_stays_until_somebody_takes_the_lease(trainers: Trainers):
    one = trainers.new("a")
    await one.take(0)
    await one.offer("uid-1/7")
    await one.offer("", "KeyboardInterrupt")
    await one.release()
    assert trainers.annotations == {MESSAGE_ANNOTATION: "KeyboardInterrupt"}
    await trainers.new("b").take(0)
    assert trainers.annotations == {}


async def cut_off(trainers: Trainers, one: Keeper) -> None:
    """The Lease is taken, and whoever took it was ended before it heard of it."""
    written = trainers.api.patch

    async def lost(path: str, patch: dict[str, object], deadline_s: float = 10.0) -> dict[str, object]:
        await written(path, patch, deadline_s)
        await asyncio.sleep(3600)
        raise AssertionError("it was cancelled")

    trainers.api.patch = lost  # type: ignore[method-assign]
    taking = asyncio.create_task(one.take(0))
    await asyncio.sleep(1)
    taking.cancel()
    await asyncio.wait({taking})
    trainers.api.patch = written  # type: ignore[method-assign]
    assert (trainers.spec["holderIdentity"], one.holds()) == ("grpo/a", False)


async def test_a_lease_whose_taking_was_cut_off_is_given_back(trainers: Trainers):
    one = trainers.new("a")
    await cut_off(trainers, one)
    await one.release()
    assert trainers.spec["holderIdentity"] == ""


async def test_a_lease_that_is_another_s_since_then_is_not_given_back(trainers: Trainers):
    one = trainers.new("a")
    await cut_off(trainers, one)
    trainers.api.change(LEASE_PATH, {"spec": {"holderIdentity": "grpo/b"}})
    await one.release()
    assert trainers.spec["holderIdentity"] == "grpo/b"


async def test_a_lease_that_nobody_wants_any_more_is_not_waited_for(trainers: Trainers):
    one, two = trainers.new("a"), trainers.new("b")
    await one.take(0)
    why: list[Exception] = []

    def check() -> None:
        if why:
            raise why[0]

    waiting = asyncio.create_task(two.take(600, check))
    await asyncio.sleep(5)
    why.append(SenderLost("it was cancelled"))
    began = now()
    with pytest.raises(SenderLost, match="it was cancelled"):
        await waiting
    assert now() - began < 2
    assert trainers.spec["holderIdentity"] == "grpo/a"
