"""The rollout client: deadlines, cancellation, closing; traces and experts; what is refused beforehand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollfleet_engine.simulator.tokens import encode
from rollfleet_protocol.refusals import WEIGHT_VERSION_HEADER
from rollfleet_trainer.answers import LARGEST_ANSWER, largest_answer
from rollfleet_trainer.rollout_errors import BadAnswerError, ClosedError, OverdueError, RoutedExpertsError, TraceError
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
    assert "an answer of 3 tokens came without routed_experts: does the fleet have features.routedExperts" in str(error)


@pytest.mark.parametrize("on_abort", ["return", "restart", "continue"])
def test_experts_are_none_of_what_was_aborted_and_of_nothing_else(on_abort: str) -> None:
    async def run() -> Sample:
        fleet = ScriptedFleet([Event("abort", 3), Event("answer", bump=1)], experts=True)
        async with client(fleet, routed_experts=True, on_abort=on_abort) as rollouts:
            return await rollouts.complete(PROMPT, 8)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    if on_abort == "restart":
        assert sample.routed_experts is not None
        assert sample.routed_experts.shape == (len(sample.prompt_tokens) + 8 - 1, 2, 1)
        assert set(sample.routed_experts.flat) == {2}
    else:
        assert sample.routed_experts is None, "a part of it was aborted without"
        assert len(sample.tokens) == (3 if on_abort == "return" else 8)


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


# --- answers of who does not keep to what was asked


class Changed(ScriptedFleet):
    """Answers with something else than what was asked for."""

    def __init__(self, *drop: str, packed: str = "", stream: httpx.AsyncByteStream | None = None, **changes: Any):
        super().__init__()
        self._drop, self._changes, self._packed, self._stream = drop, changes, packed, stream

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for name in self._drop:
            request.headers.pop(name, None)
        answer = await super().handle_async_request(request)
        if self._stream is not None or self._packed:
            headers = {WEIGHT_VERSION_HEADER: "1"} | ({"Content-Encoding": self._packed} if self._packed else {})
            return httpx.Response(200, headers=headers, stream=self._stream or Zeros())
        body = json.loads(answer.content)
        body["choices"][0] |= self._changes
        return httpx.Response(answer.status_code, headers={WEIGHT_VERSION_HEADER: str(self.version)}, json=body)


class Zeros(httpx.AsyncByteStream):
    """Without end."""

    given = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.given += 1 << 20
            yield b"0" * (1 << 20)


class Dripping(httpx.AsyncByteStream):
    """A byte each second."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(1)
            yield b"0"


@pytest.mark.parametrize(
    ("fleet", "how", "words"),
    [
        (Changed("X-Weight-Version-Min"), {"min_version": 2}, "version 1 answered where X-Weight-Version-Min is 2"),
        (Changed("X-Weight-Version-Required"), {"version": 2}, "where X-Weight-Version-Required is 2: does something"),
        (Changed(prompt_token_ids=[1]), {}, "a prompt of 1 tokens is answered, not the one of 3"),
        (Changed(token_ids=[5] * 11, logprobs={"token_logprobs": [-1.0] * 11}), {}, "11 tokens came where 10 were"),
        (Changed(packed="gzip"), {}, "packed .'gzip'., which was not asked for"),
        (Changed(stream=Zeros()), {}, "the answer has more than [0-9]+ bytes"),
    ],
)
def test_what_was_not_asked_for_is_no_sample(fleet: Changed, how: dict[str, int], words: str) -> None:
    async def run() -> Sample:
        async with client(fleet) as rollouts:
            return await rollouts.complete([1, 2, 3], 10, **how)

    error, _ = on_a_clock(run)
    assert isinstance(error, BadAnswerError)
    assert re.search(words, str(error)), error
    assert len(fleet.log) == 1, "it was processed: nothing is sent again"


def test_max_staleness_is_a_demand_like_any_other() -> None:
    async def run() -> Sample:
        async with client(Changed("X-Weight-Version-Min"), max_staleness=1) as rollouts:
            rollouts.note_version(9)
            return await rollouts.complete(PROMPT, 2)

    error, _ = on_a_clock(run)
    assert isinstance(error, BadAnswerError)
    assert "where X-Weight-Version-Min is 8" in str(error)


def test_no_more_is_read_than_an_answer_to_this_prompt_can_have() -> None:
    zeros = Zeros()

    async def run() -> Sample:
        async with client(Changed(stream=zeros)) as rollouts:
            return await rollouts.complete(PROMPT, 4)

    assert isinstance(on_a_clock(run)[0], BadAnswerError)
    assert zeros.given < 8 << 20
    assert largest_answer(1 << 40) == LARGEST_ANSWER


def test_whether_a_server_is_up_is_not_waited_for_byte_by_byte() -> None:
    class Health(ScriptedFleet):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(503, stream=Dripping())

    async def run() -> str:
        async with client(Health()) as rollouts:
            return await rollouts.unreachable()

    why, seconds = on_a_clock(run)
    assert "TimeoutError" in why
    assert seconds == pytest.approx(10)
