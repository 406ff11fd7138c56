"""The rollout client against fleets that answer by a script, on a clock that costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import httpx
import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_engine.simulator.tokens import decode, encode
from rollfleet_trainer.rollout_errors import (
    ClosedError,
    NotServedError,
    OverdueError,
    RefusedError,
    RolloutError,
    RoutedExpertsError,
    TraceError,
    UnansweredError,
    VersionPassedError,
)
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample
from tests.support.scripted_fleet import Event, ScriptedFleet, require_true

T = TypeVar("T")
URL = "http://engine-0:8000"
PROMPT = "What is the answer?"
MESSAGES = [{"role": "user", "content": "Hello"}]


def client(fleet: httpx.AsyncBaseTransport, endpoints: str | list[str] = URL, **options: Any) -> Rollouts:
    return Rollouts(endpoints, model="policy", transport=fleet, **options)


def on_a_clock(do: Callable[[], Awaitable[T]]) -> tuple[T | RolloutError, float]:
    """What came of it, and how long it took there."""

    async def timed() -> tuple[T | RolloutError, float]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            return await do(), loop.time() - start
        except RolloutError as error:
            return error, loop.time() - start

    with closing(looptime.new_event_loop()) as loop:
        return loop.run_until_complete(timed())


def ask(rollouts: Rollouts, route: str, max_tokens: int, **options: Any) -> Awaitable[Sample]:
    if route == "completions":
        return rollouts.complete(PROMPT, max_tokens, **options)
    if route == "chat":
        return rollouts.chat(MESSAGES, max_tokens, **options)
    return rollouts.generate(encode(PROMPT), max_tokens, **options)


ROUTES = ["completions", "chat", "generate"]
EVENTS = st.lists(
    st.builds(
        Event,
        what=st.sampled_from(["abort", "abort", "kept", "closed", "nobody", "unreachable", "answer", "break", "400"]),
        tokens=st.integers(0, 12),
        bump=st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300)
@given(
    events=EVENTS,
    route=st.sampled_from(ROUTES),
    on_abort=st.sampled_from(["return", "restart", "continue"]),
    resend=st.booleans(),
)
def test_whatever_happens_each_token_is_of_the_version_that_is_told(
    events: list[Event], route: str, on_abort: str, resend: bool
) -> None:
    fleet = ScriptedFleet([*events, Event("answer")])

    async def run() -> Sample:
        async with client(fleet, on_abort=on_abort, resend_unanswered=resend, hold_s=600) as rollouts:
            return await ask(rollouts, route, 10)

    outcome, _ = on_a_clock(run)
    did = [what for _, what in fleet.log]
    # Nothing is sent again after it may have been processed, unless it was asked for or the answer was an abort.
    if not resend:
        assert "break" not in did[:-1]
    if isinstance(outcome, RolloutError):
        assert (type(outcome), did[-1]) in ((UnansweredError, "break"), (RefusedError, "400"))
        return
    require_true(outcome)
    kept = "kept" in did
    if outcome.aborted:
        assert (on_abort, did[-1]) == ("return", "abort")
    else:
        assert len(outcome.tokens) == 10
    if on_abort != "continue":
        assert outcome.continued == 0
        assert kept or not outcome.mixed
    if on_abort == "return":
        assert did.count("abort") <= 1
    if route != "generate":
        assert outcome.text == decode(outcome.tokens)
    if route == "chat":
        assert outcome.message is not None
        assert outcome.message["content"] == outcome.text


def test_c18_an_interrupted_sample_is_no_finished_one_and_of_one_version() -> None:
    fleet = ScriptedFleet([Event("abort", tokens=4)], version=3, name="qwen-2-0")

    async def run() -> Sample:
        async with client(fleet) as rollouts:
            return await rollouts.complete(PROMPT, 10)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    assert sample.aborted
    assert (len(sample.tokens), sample.versions, sample.mixed, sample.engine) == (4, (3,) * 4, False, "qwen-2-0")
    assert len(fleet.log) == 1


def test_c18_continued_it_keeps_what_it_had_and_tells_where_another_version_spoke() -> None:
    fleet = ScriptedFleet([Event("abort", 4), Event("closed"), Event("abort", 3, bump=1), Event("answer", bump=2)])

    async def run() -> Sample:
        async with client(fleet, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 10, seed=7, min_tokens=6, temperature=1.0)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    require_true(sample)
    assert [(span.version, span.start) for span in sample.spans] == [(1, 0), (2, 4), (4, 7)]
    assert (sample.continued, sample.finish_reason, sample.staleness(6)) == (2, "length", 5)
    asked = [(body["max_tokens"], body["seed"], body["min_tokens"], body["temperature"]) for body in fleet.bodies]
    assert asked == [(10, 7, 6, 1.0), (6, 11, 2, 1.0), (6, 11, 2, 1.0), (3, 14, 0, 1.0)]
    assert fleet.bodies[-1]["prompt"] == [*encode(PROMPT), *sample.tokens[:7]]


def test_an_abort_behind_the_last_token_is_an_end() -> None:
    fleet = ScriptedFleet([Event("abort", tokens=10)])

    async def run() -> Sample:
        async with client(fleet, on_abort="continue") as rollouts:
            return await rollouts.generate(encode(PROMPT), 10)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    assert (sample.finish_reason, len(sample.tokens)) == ("length", 10)


@pytest.mark.parametrize("what", ["closed", "nobody", "unreachable"])
@pytest.mark.parametrize("retry_after", ["1", None, "0", "99999", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_an_engine_that_never_opens_is_asked_seldom_and_not_for_ever(what: str, retry_after: str | None) -> None:
    fleet = ScriptedFleet([Event(what)], retry_after=retry_after)

    async def run() -> Sample:
        async with client(fleet, hold_s=30) as rollouts:
            return await rollouts.complete(PROMPT, 10)

    error, seconds = on_a_clock(run)
    assert isinstance(error, NotServedError)
    assert seconds == pytest.approx(30, abs=0.1)
    assert 2 <= len(fleet.log) <= 32 if what == "closed" and retry_after == "1" else len(fleet.log) <= 300
    assert URL in str(error)
    if retry_after is None:
        assert len(fleet.log) <= 20
    if what == "closed":
        assert "refused: Closed" in str(error)


def test_hold_is_counted_anew_after_each_answer() -> None:
    fleet = ScriptedFleet([*[Event("closed")] * 5, Event("abort", 2), *[Event("closed")] * 5, Event("answer")])

    async def run() -> Sample:
        async with client(fleet, hold_s=9, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 10)

    sample, seconds = on_a_clock(run)
    assert isinstance(sample, Sample)
    assert seconds > 9


@pytest.mark.parametrize("name", ["", "qwen-2-0"])
def test_aborted_before_the_first_token_is_no_progress(name: str) -> None:
    fleet = ScriptedFleet([Event("abort", 0)], name=name)

    async def run() -> Sample:
        async with client(fleet, hold_s=20, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 10)

    error, seconds = on_a_clock(run)
    assert isinstance(error, NotServedError)
    assert f"{name or URL}: aborted before its first token" in str(error)
    assert seconds == pytest.approx(20, abs=0.1)
    assert len(fleet.log) < 20


@pytest.mark.parametrize("what", ["400", "500", "503"])
def test_what_an_engine_refuses_is_told_in_its_words(what: str) -> None:
    fleet = ScriptedFleet([Event(what)])

    async def run() -> Sample:
        async with client(fleet) as rollouts:
            return await rollouts.complete(PROMPT, 10)

    error, seconds = on_a_clock(run)
    assert isinstance(error, RefusedError)
    assert (error.status, seconds, len(fleet.log)) == (int(what), 0, 1)
    assert "in the engine's own words" in str(error)


@pytest.mark.parametrize("what", ["502", "break"])
def test_what_may_have_been_processed_is_not_sent_again(what: str) -> None:
    async def run(fleet: ScriptedFleet, *, resend: bool) -> Sample:
        async with client(fleet, resend_unanswered=resend) as rollouts:
            return await rollouts.complete(PROMPT, 10)

    fleet = ScriptedFleet([Event(what), Event("answer")])
    error, _ = on_a_clock(lambda: run(fleet, resend=False))
    assert isinstance(error, UnansweredError)
    assert "may have been processed" in str(error)
    assert len(fleet.log) == 1
    fleet = ScriptedFleet([Event(what), Event("answer")])
    sample, _ = on_a_clock(lambda: run(fleet, resend=True))
    assert isinstance(sample, Sample)
    assert len(fleet.log) == 2


def test_an_engine_that_is_not_there_leaves_the_others_their_work() -> None:
    class Half(ScriptedFleet):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "engine-1":
                self.log.append((str(request.url), "unreachable"))
                raise httpx.ConnectError("refused", request=request)
            return await super().handle_async_request(request)

    fleet = Half()

    async def run() -> list[Sample]:
        async with client(fleet, [URL, "http://engine-1:8000"]) as rollouts:
            return list(await asyncio.gather(*(rollouts.complete(PROMPT, 3) for _ in range(20))))

    samples, seconds = on_a_clock(run)
    assert not isinstance(samples, RolloutError)
    assert {sample.engine for sample in samples} == {URL}
    assert seconds == 0
    assert sum(what == "unreachable" for _, what in fleet.log) <= 20


# --- versions


def test_versions_that_are_not_there_yet_are_waited_for() -> None:
    fleet = ScriptedFleet([Event("answer"), Event("answer"), Event("answer", bump=1), Event("answer", bump=1)])

    async def run() -> Sample:
        async with client(fleet) as rollouts:
            return await rollouts.complete(PROMPT, 3, version=3)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    assert sample.versions == (3, 3, 3)
    assert [what for _, what in fleet.log] == ["wrong", "wrong", "wrong", "answer"]


def test_versions_that_are_passed_are_not_waited_for() -> None:
    fleet = ScriptedFleet(version=5)

    async def run(**demand: int) -> Sample:
        async with client(fleet) as rollouts:
            return await rollouts.complete(PROMPT, 3, **demand)

    error, seconds = on_a_clock(lambda: run(version=4))
    assert isinstance(error, VersionPassedError)
    assert seconds == 0
    assert isinstance(on_a_clock(lambda: run(min_version=5))[0], Sample)
    error, seconds = on_a_clock(lambda: run(min_version=6))
    assert isinstance(error, NotServedError)
    assert seconds == pytest.approx(60, abs=0.1)


def test_a_sample_of_a_required_version_does_not_go_on_under_another() -> None:
    fleet = ScriptedFleet([Event("abort", 4), Event("answer", bump=1)])

    async def run() -> Sample:
        async with client(fleet, on_abort="continue") as rollouts:
            return await rollouts.complete(PROMPT, 10, version=1)

    sample, _ = on_a_clock(run)
    assert isinstance(sample, Sample)
    assert (sample.aborted, sample.versions) == (True, (1,) * 4)


# --- deadlines, cancellation, closing


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
