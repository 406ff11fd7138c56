"""The rollout client: deadlines, cancellation, closing; traces and experts; what is refused beforehand."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rollfleet_engine.simulator.tokens import encode
from rollfleet_trainer.rollout_errors import ClosedError, OverdueError, RoutedExpertsError, TraceError
from rollfleet_trainer.samples import Sample
from tests.support.rollout_clients import MESSAGES, PROMPT, URL, ask, client, on_a_clock
from tests.support.scripted_fleet import Event, ScriptedFleet


class Slow(ScriptedFleet):
    """Answers take ten seconds. Counts what is being worked on."""

    working = 0
    most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.working += 1
        self.most = max(self.most, self.working)
        try:
            await asyncio.sleep(10)
            return await super().handle_async_request(request)
        finally:
            self.working -= 1


def test_deadlines_hold_whatever_happens_and_give_what_there_is() -> None:
    fleet = Slow([Event("abort", 4), Event("answer")])

    async def run() -> Sample:
        async with client(fleet, deadline_s=15, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 10)

    error, seconds = on_a_clock(run)
    assert isinstance(error, OverdueError)
    assert error.partial is not None
    assert (len(error.partial.tokens), error.partial.aborted) == (4, True)
    assert seconds == pytest.approx(15)
    assert fleet.working == 0


def test_so_many_at_once_and_no_more() -> None:
    fleet = Slow()

    async def run() -> int:
        async with client(fleet, concurrency=3) as rollouts:
            await asyncio.gather(*(rollouts.complete(PROMPT, 2) for _ in range(9)))
        return fleet.most

    assert on_a_clock(run) == (3, pytest.approx(30))


def test_cancelled_it_leaves_nothing_behind() -> None:
    fleet = Slow()

    async def run() -> int:
        async with client(fleet, concurrency=1) as rollouts:
            first = asyncio.create_task(rollouts.complete(PROMPT, 2))
            second = asyncio.create_task(rollouts.complete(PROMPT, 2))
            await asyncio.sleep(5)
            assert fleet.working == 1
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            sample = await second  # its turn came
            assert len(sample.tokens) == 2
        return fleet.working

    assert on_a_clock(run) == (0, pytest.approx(15))


def test_closing_ends_what_runs() -> None:
    fleet = Slow()

    async def run() -> int:
        async with client(fleet) as rollouts:
            running = [asyncio.create_task(rollouts.complete(PROMPT, 2)) for _ in range(3)]
            await asyncio.sleep(5)
        for task in running:
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await rollouts.complete(PROMPT, 2)
        return fleet.working

    assert on_a_clock(run) == (0, pytest.approx(5))


# --- traces, experts, what is refused beforehand


def test_c38_a_trace_is_replayed_whole_or_it_is_an_error() -> None:
    async def run(fleet: ScriptedFleet, trace: tuple[int, ...]) -> Sample:
        async with client(fleet, on_abort="continue") as rollouts:
            return await rollouts.replay(encode(PROMPT), trace)

    greedy, _ = on_a_clock(lambda: ask(client(ScriptedFleet()), "generate", 20))
    assert isinstance(greedy, Sample)
    fleet = ScriptedFleet([Event("abort", 7), Event("answer")])
    sample, _ = on_a_clock(lambda: run(fleet, greedy.tokens))
    assert isinstance(sample, Sample)
    assert sample.tokens == greedy.tokens
    asked = [body["sampling_params"] for body in fleet.bodies]
    assert [each["max_tokens"] for each in asked] == [20, 13]
    assert [tuple(each["trace_decode_token_ids"]) for each in asked] == [greedy.tokens, greedy.tokens[7:]]
    other = (*greedy.tokens[:5], greedy.tokens[5] ^ 1, *greedy.tokens[6:])
    error, _ = on_a_clock(lambda: run(ScriptedFleet(), other))
    assert isinstance(error, TraceError)
    assert "20 tokens came for a trace of 20, the first other one at 5" in str(error)


def test_experts_that_must_come_and_do_not_are_an_error() -> None:
    async def run() -> Sample:
        async with client(ScriptedFleet(), routed_experts=True) as rollouts:
            return await rollouts.complete(PROMPT, 3)

    error, _ = on_a_clock(run)
    assert isinstance(error, RoutedExpertsError)
    assert "features.routedExperts" in str(error)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "one prompt gives one sample"),
        ({"best_of": 2}, "one prompt gives one sample"),
        ({"echo": True}, "one prompt gives one sample"),
        ({"stream": True}, "said by this client itself"),
        ({"logprobs": 5}, "said by this client itself"),
        ({"frequency_penalty": 0.5}, "cannot go on in the middle"),
        ({"response_format": {"type": "json_object"}}, "cannot go on in the middle"),
        ({"version": 1, "min_version": 1}, "one of them"),
        ({"version": -1}, "not negative"),
    ],
)
def test_what_this_client_does_not_do_is_refused_at_once(fields: dict[str, Any], words: str) -> None:
    fleet = ScriptedFleet()

    async def run() -> Sample:
        async with client(fleet, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 3, **fields)

    with pytest.raises(ValueError, match=words):
        on_a_clock(run)
    assert fleet.log == []


def test_tools_and_pictures_are_not_continued() -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]

    async def run(messages: list[dict[str, Any]], on_abort: str, **fields: Any) -> Sample:
        async with client(ScriptedFleet(), on_abort=on_abort) as rollouts:
            return await rollouts.chat(messages, 3, **fields)

    with pytest.raises(ValueError, match="content in parts"):
        on_a_clock(lambda: run(picture, "continue"))
    with pytest.raises(ValueError, match="tools: cannot go on"):
        on_a_clock(lambda: run(MESSAGES, "continue", tools=[{"type": "function"}]))
    assert isinstance(on_a_clock(lambda: run(MESSAGES, "restart", tools=[{"type": "function"}]))[0], Sample)


def test_what_is_sent() -> None:
    fleet = ScriptedFleet()

    async def run() -> None:
        async with client(fleet, f"{URL}/", api_key="secret", logprobs=False) as rollouts:
            rollouts.note_version(1)
            await rollouts.complete([1, 2, 3], 4, temperature=0.5, rank=2, min_version=1)
            await rollouts.generate([1, 2, 3], 4, temperature=0.5, cache_salt="x")

    on_a_clock(run)
    assert fleet.log[0] == (f"{URL}/v1/completions", "answer")
    assert fleet.headers[0]["X-data-parallel-rank"] == "2"
    assert fleet.headers[0]["Authorization"] == "Bearer secret"
    assert fleet.headers[0]["X-Weight-Version-Min"] == "1"
    assert "X-Weight-Version-Min" not in fleet.headers[1]
    assert fleet.bodies[0] == {
        "model": "policy",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.5,
        "return_token_ids": True,
    }
    assert fleet.bodies[1] == {
        "model": "policy",
        "token_ids": [1, 2, 3],
        "cache_salt": "x",
        "sampling_params": {"temperature": 0.5, "max_tokens": 4},
    }


@pytest.mark.parametrize(
    "options",
    [
        *({"endpoints": urls} for urls in ([], "engine:8000", ["http://a", "b"])),
        *({"hold_s": -1}, {"deadline_s": 0}, {"concurrency": 0}, {"on_abort": "keep"}, {"max_staleness": -1}),
    ],
)
async def test_settings_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|not a valid"):
        client(ScriptedFleet(), **options)
