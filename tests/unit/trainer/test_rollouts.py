"""The rollout client against fleets that answer by a script, on a clock that costs nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_engine.simulator.tokens import decode, encode
from rollfleet_trainer.rollout_errors import (
    NotServedError,
    RefusedError,
    RolloutError,
    UnansweredError,
    VersionPassedError,
)
from rollfleet_trainer.samples import Sample
from tests.support.rollout_clients import PROMPT, URL, ask, client, on_a_clock
from tests.support.scripted_fleet import Event, ScriptedFleet, require_true

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
