"""A steady load through the router, with every answer kept, so that promises can be checked afterwards."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

VERSION_HEADER = "X-Weight-Version"
MAX_SAMPLES = 200_000  # a bound on memory; a load that is longer than this is a mistake


@dataclass(frozen=True)
class Sample:
    """One request as the client saw it. Times are time.time() seconds."""

    prompt: str
    asked: int  # tokens
    started: float
    ended: float
    status: int  # 0 where no HTTP answer came
    version: int | None = None  # X-Weight-Version
    tokens: tuple[int, ...] = ()
    finish_reason: str = ""
    cached_tokens: int = 0
    retry_after: str | None = None
    error: str = ""  # body of an answer that is not 200, or the transport's words


@dataclass(frozen=True)
class Plan:
    """What to send. Every `long_every`-th request asks for `long_tokens`, to be caught by an update in flight.

    One more client asks for single tokens all the time: what it sees is the fleet's readiness, not its speed.
    """

    url: str
    model: str
    prompts: tuple[str, ...]
    clients: int = 4
    max_tokens: int = 16
    long_every: int = 4
    long_tokens: int = 64
    timeout_s: float = 120.0
    sentinel_pause_s: float = 0.01
    pace_s: float = 0.0  # between a client's requests; 0 keeps the engines busy
    pause_s: float = 0.02  # between a refusal and the next try of the same client


@dataclass
class Load:
    """A running load; `stop` ends it after what is in flight has been answered."""

    plan: Plan
    samples: list[Sample] = field(default_factory=list)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> "Load":
        """Start all clients at once."""
        self._tasks = [asyncio.create_task(self._client(k)) for k in range(self.plan.clients)]
        self._tasks.append(asyncio.create_task(self._sentinel()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and let no failure of a client go unseen."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _client(self, k: int) -> None:
        timeout = aiohttp.ClientTimeout(total=self.plan.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            n = k
            while not self._stopping.is_set() and len(self.samples) < MAX_SAMPLES:
                prompt = self.plan.prompts[n % len(self.plan.prompts)]
                is_long = n % self.plan.long_every == 0
                sample = await ask(
                    session, self.plan, prompt, self.plan.long_tokens if is_long else self.plan.max_tokens
                )
                self.samples.append(sample)
                await asyncio.sleep(self.plan.pace_s)
                if sample.status != 200:
                    await asyncio.sleep(self.plan.pause_s)
                n += self.plan.clients + 1

    async def _sentinel(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self.plan.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self._stopping.is_set() and len(self.samples) < MAX_SAMPLES:
                self.samples.append(await ask(session, self.plan, self.plan.prompts[0], 1))
                await asyncio.sleep(self.plan.sentinel_pause_s)

    async def until(self, version: int, timeout_s: float, since: int = 0) -> Sample:
        """The first 200 of `version` after `since` samples; TimeoutError names what came instead."""
        deadline = time.monotonic() + timeout_s
        seen = since
        while time.monotonic() < deadline:
            for sample in self.samples[seen:]:
                if sample.status == 200 and sample.version == version:
                    return sample
            seen = len(self.samples)
            await asyncio.sleep(0.02)
        last = self.samples[-1] if self.samples else None
        raise TimeoutError(f"no answer of version {version} within {timeout_s} s; the last one: {last}")


async def ask(session: aiohttp.ClientSession, plan: Plan, prompt: str, max_tokens: int) -> Sample:
    """One greedy completion; never raises for what the other side does."""
    body = {
        "model": plan.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    started = time.time()
    try:
        async with session.post(f"{plan.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                text = await answer.text()
                retry_after = answer.headers.get("Retry-After")
                return Sample(
                    prompt, max_tokens, started, time.time(), answer.status, retry_after=retry_after, error=text[:500]
                )
            document = await answer.json()
            version = answer.headers.get(VERSION_HEADER)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Sample(prompt, max_tokens, started, time.time(), 0, error=f"{type(error).__name__}: {error}"[:500])
    choice = document["choices"][0]
    details = (document.get("usage") or {}).get("prompt_tokens_details") or {}
    return Sample(
        prompt=prompt,
        asked=max_tokens,
        started=started,
        ended=time.time(),
        status=200,
        version=int(version) if version is not None else None,
        tokens=tuple(choice.get("token_ids") or ()),
        finish_reason=choice.get("finish_reason") or "",
        cached_tokens=details.get("cached_tokens") or 0,
    )


def completed(samples: Sequence[Sample], version: int) -> int:
    """How many whole answers of `version` there are."""
    return sum(s.status == 200 and s.version == version and s.finish_reason != "abort" for s in samples)
