"""RolloutFleet.rollouts: where the fleet serves, and which version its updates ask for."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollfleet_protocol.refusals import MINIMUM_HEADER
from rollfleet_trainer import NotPossible, RolloutFleet
from rollfleet_trainer.rollout_errors import ClosedError, RoutedExpertsError
from rollfleet_trainer.versions import Wish
from tests.support.memory_api import ENGINE_PATH, MemoryApi, fleet
from tests.support.scripted_fleet import Event, ScriptedFleet

ENDPOINT = "http://qwen.rl.svc:8000"


@pytest.fixture
def api() -> MemoryApi:
    one = fleet(model={"servedName": "policy"})
    one.change(ENGINE_PATH, {"status": {"endpoint": ENDPOINT}})
    return one


@pytest.fixture
def trainer(api: MemoryApi) -> Iterator[RolloutFleet]:
    one = RolloutFleet("rl/qwen", service_account="grpo")
    assert one._driver is not None
    one._driver.control._api = api  # type: ignore[assignment]
    yield one
    one.blocking.close()


def ask(trainer: RolloutFleet) -> int:
    """As an update does, up to where the operator has its turn."""
    driver = trainer._driver
    assert driver is not None
    run = driver._ask(Wish(), None)
    driver._background.run(driver.control.end())
    return run.asked.version


async def test_samples_come_from_where_the_fleet_says_that_it_serves(trainer: RolloutFleet):
    served = ScriptedFleet([Event("answer")])
    async with trainer.rollouts(transport=served, on_abort="continue", hold_s=60) as r:
        await r.complete("a", 4)
    assert served.log[0][0].startswith(f"{ENDPOINT}/v1/completions")
    assert served.bodies[0]["model"] == "policy"
    assert MINIMUM_HEADER not in served.headers[0], "no version was asked for: nothing is paced"
    with pytest.raises(ClosedError):
        await r.complete("a", 4)


async def test_a_fleet_that_returns_routed_experts_must_return_them(trainer: RolloutFleet, api: MemoryApi):
    api.change(ENGINE_PATH, {"spec": {"features": {"routedExperts": "Enabled"}}})
    async with trainer.rollouts(transport=ScriptedFleet(experts=True)) as r:
        assert (await r.complete("a", 4)).routed_experts is not None
    async with trainer.rollouts(transport=ScriptedFleet()) as r:
        with pytest.raises(RoutedExpertsError, match="came without"):
            await r.complete("a", 4)
    async with trainer.rollouts(transport=ScriptedFleet(), routed_experts=False) as r:
        assert (await r.complete("a", 4)).routed_experts is None


async def test_updates_tell_their_version_from_when_they_ask_for_it(trainer: RolloutFleet):
    await asyncio.to_thread(ask, trainer)
    served = ScriptedFleet([Event("answer")], version=9)
    async with trainer.rollouts(transport=served, max_staleness=1) as before:
        await before.complete("a", 4)
        await asyncio.to_thread(ask, trainer)
        assert await asyncio.to_thread(ask, trainer) == 3
        async with trainer.rollouts(transport=served, max_staleness=0) as later:
            await later.complete("a", 4)
        await before.complete("a", 4)
    assert [headers[MINIMUM_HEADER] for headers in served.headers] == ["0", "3", "2"]
    await asyncio.to_thread(ask, trainer)  # whoever has left hears no more
    assert trainer._versions._listeners == []


def test_the_blocking_face_samples_in_as_many_threads_as_there_are(trainer: RolloutFleet):
    served = ScriptedFleet([Event("answer")])
    with trainer.blocking.rollouts(transport=served) as r, ThreadPoolExecutor(4) as pool:
        prompts = [f"prompt {place}" for place in range(12)]
        samples = list(pool.map(lambda prompt: r.complete(prompt, 3), prompts))
        assert [len(sample.tokens) for sample in samples] == [3] * 12
        assert len(r.chat([{"role": "user", "content": "Hello"}], 2).tokens) == 2
        assert len(r.generate([1, 2], 2).tokens) == 2
        assert r.served_version == 1
    with pytest.raises(NotPossible, match="context manager"):
        r.complete("a", 1)


@pytest.mark.parametrize("pod", [False, True])
async def test_a_service_s_name_is_no_way_from_outside_of_its_cluster(
    trainer: RolloutFleet, api: MemoryApi, pod: bool, monkeypatch: pytest.MonkeyPatch
):
    """A sample would wait for hold_s, and then tell of a name only. In a pod a name may be known a moment later."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    api.change(ENGINE_PATH, {"status": {"endpoint": "http://qwen.rl.svc.invalid:8000"}})
    entering = trainer.rollouts()
    if pod:
        async with entering:
            return
    with pytest.raises(NotPossible, match=r"http://qwen\.rl\.svc\.invalid:8000, which is a name within .* endpoints="):
        await entering.__aenter__()
    async with trainer.rollouts("http://127.0.0.1:8000"):
        pass
    api.change(ENGINE_PATH, {"status": {"endpoint": "http://127.0.0.1:8000"}})
    async with trainer.rollouts():
        pass


async def test_where_nobody_has_said_an_endpoint_it_must_be_given(trainer: RolloutFleet, api: MemoryApi):
    api.change(ENGINE_PATH, {"status": {"endpoint": None}})
    with pytest.raises(NotPossible, match=r"status\.endpoint of the fleet is empty"):
        async with trainer.rollouts():
            pass
    given: dict[str, Any] = {"transport": ScriptedFleet([Event("answer")]), "model": "mine"}
    async with trainer.rollouts(["http://engine-0:8000"], **given) as r:
        assert (await r.complete("a", 4)).engine
