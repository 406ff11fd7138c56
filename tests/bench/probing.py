"""A client per engine that asks for one token over and over, and keeps the whole answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from examples.demo.manifests import SERVED_NAME
from tests.bench.gaps import Answer

ANSWER_S = 60.0
RETRY_S = 0.005  # after a refusal
PROMPT = (1, 2, 3, 5, 7, 11)
QUESTION = {"model": SERVED_NAME, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0, "logprobs": 0}


@dataclass
class Prober:
    """A client per engine that asks for one token over and over."""

    urls: Sequence[str]
    answers: list[Answer] = field(default_factory=list)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)
    _stopping: bool = False

    async def ask(self, url: str) -> None:
        """Until it is stopped."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._stopping:
                asked = time.monotonic()
                try:
                    async with session.post(f"{url}/v1/completions", json=QUESTION) as answer:
                        document = await answer.json() if answer.status == 200 else {}
                except (aiohttp.ClientError, TimeoutError) as error:
                    waited = time.monotonic() - asked
                    raise RuntimeError(f"{url}: {type(error).__name__} after {waited:.1f} s: {error}") from error
                logprob = first_logprob(document)
                if logprob is None:
                    await asyncio.sleep(RETRY_S)
                else:
                    await self._take(Answer(url, asked, time.monotonic(), logprob))

    async def _take(self, answer: Answer) -> None:
        async with self._came:
            self.answers.append(answer)
            self._came.notify_all()

    def stop(self) -> None:
        """After the answers that are on their way."""
        self._stopping = True

    async def until(self, moment: float) -> None:
        """Wait until every engine has answered what was asked after this moment."""
        left = set(self.urls)
        async with asyncio.timeout(ANSWER_S), self._came:
            while left:
                await self._came.wait()
                left -= {each.engine for each in self.answers[-1:] if each.asked > moment}


def first_logprob(document: dict[str, Any]) -> float | None:
    """Of the one token; None where there is none: the request was refused, or cut short."""
    choices = document.get("choices") or [{}]
    found = (choices[0].get("logprobs") or {}).get("token_logprobs") or [None]
    return found[0] if choices[0].get("finish_reason") == "length" else None


@asynccontextmanager
async def probing(urls: Sequence[str]) -> AsyncIterator[Prober]:
    """While the block runs. What a client raises ends it."""
    prober = Prober(urls)
    async with asyncio.TaskGroup() as tasks:
        for url in urls:
            tasks.create_task(prober.ask(url))
        try:
            yield prober
        finally:
            prober.stop()
