"""The rollout client before a scripted fleet, on a clock that costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import httpx
import looptime

from rollfleet_engine.simulator.tokens import encode
from rollfleet_trainer.rollout_errors import RolloutError
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample

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
