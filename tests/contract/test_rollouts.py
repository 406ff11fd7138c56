"""The trainer's rollout client against an engine behind its real guard, while the weights change."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from rollfleet_engine.simulator.model import Context
from rollfleet_protocol.state import EngineState
from rollfleet_trainer.rollout_errors import VersionPassedError
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample
from tests.contract.client import LONG_ANSWER, Client, Operator, wait_in_flight
from tests.contract.models import Models, SimulatedModels
from tests.contract.process import HOST_NAME, EngineProcess, until

GREEDY = {"temperature": 0, "ignore_eos": True}
AS_MANY = 16  # tokens after a change that are compared with a fresh request
Start = Callable[[Rollouts], Awaitable[Sample]]


def tokens_of(client: Client, text: str) -> list[int]:
    """As the engine reads it."""
    found: list[int] = client.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


async def on_thread(do: Callable[[], EngineState]) -> EngineState:
    """The operator's words, while requests run."""
    return await asyncio.to_thread(do)


async def interrupted(
    rollouts: Rollouts, operator: Operator, start: Start, update: Callable[[], EngineState]
) -> Sample:
    """A sample that was running when an update began; again where the machine was so slow that it had ended."""
    for _ in range(5):
        running = asyncio.ensure_future(start(rollouts))
        with suppress(AssertionError):
            await asyncio.to_thread(wait_in_flight, operator, 1)
        await on_thread(update)
        sample = await running
        if sample.tokens and (sample.aborted or sample.mixed):
            return sample
        await on_thread(lambda: operator.update(1, "step-1"))
    raise AssertionError("in 5 attempts never a request was running when the gate closed")


def require_true(sample: Sample, models: Models) -> None:
    """Of a simulated model each token is known."""
    assert len(sample.tokens) == len(sample.versions) == len(sample.logprobs or ())
    if isinstance(models, SimulatedModels):
        digests = {version: models.digest(version) for version in set(sample.versions)}
        for place, version in enumerate(sample.versions):
            context = Context(digests[version], [*sample.prompt_tokens, *sample.tokens[:place]])
            assert sample.tokens[place] == context.best()
            assert (sample.logprobs or ())[place] == context.logprob(sample.tokens[place])


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
async def test_c18_continued_over_an_update_each_token_is_of_the_version_that_is_told(
    serving: Operator, client: Client, engine: EngineProcess, models: Models, route: str
):
    prompt = tokens_of(client, models.short_prompt)
    messages = [{"role": "user", "content": models.short_prompt}]

    def start(rollouts: Rollouts) -> Awaitable[Sample]:
        if route == "completions":
            return rollouts.complete(models.short_prompt, LONG_ANSWER, **GREEDY)
        if route == "chat":
            return rollouts.chat(messages, LONG_ANSWER, **GREEDY)
        return rollouts.generate(prompt, LONG_ANSWER, **GREEDY)

    async with Rollouts(engine.serving_url, model="policy", on_abort="continue") as rollouts:
        sample = await interrupted(rollouts, serving, start, lambda: serving.update(2, "step-2"))
        assert (sample.finish_reason, len(sample.tokens), sample.continued) == ("length", LONG_ANSWER, 1)
        old, new = sample.spans
        assert (old.version, old.start, new.version) == (1, 0, 2)
        assert sample.engine == HOST_NAME
        before = [*sample.prompt_tokens, *sample.tokens[: new.start]]
        fresh = await rollouts.generate(before, AS_MANY, **GREEDY)
        assert fresh.versions == (2,) * AS_MANY
        after = sample.tokens[new.start :][:AS_MANY]
        assert fresh.tokens[: len(after)] == after
        require_true(sample, models)
        if route != "generate":
            assert sample.text == client.http.post("/detokenize", json={"tokens": sample.tokens}).json()["prompt"]


async def test_c18_without_a_word_an_interrupted_sample_is_of_one_version_and_marked(
    serving: Operator, engine: EngineProcess, models: Models
):
    async with Rollouts(engine.serving_url, model="policy") as rollouts:
        sample = await interrupted(
            rollouts,
            serving,
            lambda each: each.complete(models.short_prompt, LONG_ANSWER, **GREEDY),
            lambda: serving.update(2, "step-2"),
        )
        assert sample.aborted
        assert set(sample.versions) == {1}
        assert 0 < len(sample.tokens) < LONG_ANSWER
        require_true(sample, models)


async def test_c18_kept_over_an_update_the_guards_spans_are_the_samples(
    serving: Operator, engine: EngineProcess, models: Models
):
    async with Rollouts(engine.serving_url, model="policy") as rollouts:
        sample = await interrupted(
            rollouts,
            serving,
            lambda each: each.complete(models.short_prompt, LONG_ANSWER, **GREEDY),
            lambda: serving.update(2, "step-2", mode="keep"),
        )
        assert (sample.aborted, sample.continued, len(sample.tokens)) == (False, 0, LONG_ANSWER)
        assert [span.version for span in sample.spans] == [1, 2]
        require_true(sample, models)


async def test_many_at_once_over_two_updates(serving: Operator, engine: EngineProcess, models: Models):
    async with Rollouts(engine.serving_url, model="policy", on_abort="continue", concurrency=8) as rollouts:
        running = [
            asyncio.ensure_future(rollouts.complete(f"{models.short_prompt} {number}", 200, **GREEDY))
            for number in range(60)
        ]
        await asyncio.wait(running, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        for version in (2, 3):
            await on_thread(lambda version=version: serving.update(version, f"step-{version}"))  # type: ignore[misc]
        samples = await asyncio.gather(*running)
    for sample in samples:
        assert (sample.finish_reason, len(sample.tokens)) == ("length", 200)
        assert list(sample.versions) == sorted(sample.versions)
        require_true(sample, models)


async def test_what_the_trainer_is_ahead_of_is_not_answered(serving: Operator, engine: EngineProcess, models: Models):
    async with Rollouts(engine.serving_url, model="policy", max_staleness=0) as rollouts:
        rollouts.note_version(1)
        assert (await rollouts.complete(models.short_prompt, 2, **GREEDY)).versions == (1, 1)
        rollouts.note_version(2)
        running = [asyncio.ensure_future(rollouts.complete(models.short_prompt, 2, **GREEDY)) for _ in range(5)]
        await asyncio.to_thread(serving.prepare, serving.next_epoch(), 2, "step-2")
        assert not any(task.done() for task in running)
        await on_thread(lambda: serving.update(2, "step-2"))
        assert {(await task).versions for task in running} == {(2, 2)}


async def test_versions_that_are_demanded(serving: Operator, engine: EngineProcess, models: Models):
    async with Rollouts(engine.serving_url, model="policy") as rollouts:
        running = asyncio.ensure_future(rollouts.complete(models.short_prompt, 2, version=2, **GREEDY))
        await on_thread(lambda: serving.update(2, "step-2"))
        assert (await running).versions == (2, 2)
        with pytest.raises(VersionPassedError, match="this fleet serves version 2"):
            await rollouts.complete(models.short_prompt, 2, version=1, **GREEDY)
        assert (await rollouts.complete(models.short_prompt, 2, min_version=1, **GREEDY)).versions == (2, 2)


async def test_what_is_cancelled_runs_no_longer_in_the_engine(serving: Operator, engine: EngineProcess, models: Models):
    async with Rollouts(engine.serving_url, model="policy") as rollouts:
        running = asyncio.ensure_future(rollouts.complete(models.short_prompt, LONG_ANSWER, **GREEDY))
        await asyncio.to_thread(wait_in_flight, serving, 1)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await asyncio.to_thread(until, lambda: serving.state().in_flight == 0, 10, "nothing runs")
        other = asyncio.ensure_future(rollouts.complete(models.short_prompt, LONG_ANSWER, **GREEDY))
        await asyncio.to_thread(wait_in_flight, serving, 1)
    await asyncio.to_thread(until, lambda: serving.state().in_flight == 0, 10, "nothing runs")
    assert other.done()
    assert other.exception() is not None
