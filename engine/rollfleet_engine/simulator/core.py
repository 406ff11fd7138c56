"""The simulated engine core: schedules requests, paces tokens, keeps a prefix cache, and can die.

It behaves as vLLM 0.27.1 was seen to: a paused core holds new requests until it is resumed, an abort ends what it has
with finish_reason "abort" and the output so far, cached blocks are used whatever weights filled them.
"""

import asyncio
import hashlib
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rollfleet_engine.guard.turnstile import current_passage
from rollfleet_engine.simulator.model import Context
from rollfleet_engine.simulator.weights import HeldWeights

BLOCK_TOKENS = 128  # vLLM's block size on CPUs
MOST_CACHED_BLOCKS = 4096
MOST_REQUESTS = 4096  # held or running; vLLM has no bound, a test process needs one


class CoreDeadError(Exception):
    """The core is gone; nothing can be asked of it."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class TooManyRequestsError(Exception):
    """More requests than the simulator holds at once."""


@dataclass(frozen=True)
class Step:
    """One generated token."""

    token: int
    logprob: float
    context: Context  # before the token


@dataclass(frozen=True)
class End:
    """Why a generation ended."""

    reason: str  # length | abort


@dataclass(eq=False)
class Generation:
    """One request in the core."""

    prompt: tuple[int, ...]
    max_tokens: int
    cache_salt: str = ""
    rank: int | None = None  # data-parallel; None: the core chooses
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    cached_tokens: int = 0  # known once the first token came
    aborted: bool = False
    hits: int = 0  # tokens that the newest prefill took from the cache
    preempted: bool = False  # its blocks were taken: it computes all of them again
    holds_blocks: bool = False
    output: list[int] = field(default_factory=list)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)  # something changed that it may wait for


@dataclass
class Counters:
    """For /metrics."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason


class Core:
    """Everything that vLLM's engine core is for the guard and for clients."""

    def __init__(
        self,
        weights: HeldWeights,
        seconds_per_token: float,
        alive: Callable[[], bool],
        ranks: int = 1,
        workers_per_rank: int = 1,
    ) -> None:
        self.weights = weights
        self.workers = ranks * workers_per_rank  # as if each were a process with a device
        self.counters = tuple(Counters() for _ in range(ranks))  # of every data-parallel rank
        self._next_rank = itertools.cycle(range(ranks))
        self.paused = False
        self.asleep: frozenset[str] = frozenset()  # tags
        self._seconds_per_token = seconds_per_token
        self._alive = alive
        self._running: set[Generation] = set()
        # Hash of a prefix in whole blocks -> digest of the weights that computed its keys and values.
        self._blocks: OrderedDict[bytes, str] = OrderedDict()

    @property
    def ranks(self) -> int:
        """Data-parallel ranks. Each has a prefix cache and requests of its own; they are paused and loaded together."""
        return len(self.counters)

    @property
    def running(self) -> int:
        """Requests that it has."""
        return len(self._running)

    def running_on(self, rank: int) -> int:
        """Requests of one rank."""
        return sum(request.rank == rank for request in self._running)

    def require_alive(self) -> None:
        """Raise what vLLM's client raises."""
        if not self._alive():
            raise CoreDeadError

    async def generate(self, request: Generation) -> AsyncGenerator[Step | End, None]:
        """Greedy tokens, then the reason for the end."""
        if len(self._running) >= MOST_REQUESTS:
            raise TooManyRequestsError(f"the simulator holds at most {MOST_REQUESTS} requests")
        if request.rank is None:
            request.rank = next(self._next_rank)
        self._running.add(request)
        if (passage := current_passage.get()) is not None:
            passage.requests.append(request.name)
        try:
            async for step in self._steps(request):
                yield step
            reason = "abort" if request.aborted else "length"
            finished = self._counters_of(request).finished
            finished[reason] = finished.get(reason, 0) + 1
            self._running.discard(request)  # now: whoever has the reason need not come back
            yield End(reason)
        finally:
            self._running.discard(request)

    async def _steps(self, request: Generation) -> AsyncIterator[Step]:
        held, context = None, Context("")
        while len(request.output) < request.max_tokens and await self._scheduled(request):
            if held is None:
                context = self._prefill(request, request.prompt)
                request.cached_tokens = request.hits
            elif request.preempted:
                context = self._prefill(request, (*request.prompt, *request.output))
            elif held is not self.weights:  # changed under a running request: it mixes what both have computed
                context = Context(f"{held.digest} under {self.weights.digest}", (*request.prompt, *request.output))
            held = self.weights
            before, token = context.copy(), context.best()
            context.append(token)
            request.output.append(token)
            self._counters_of(request).generated_tokens += 1
            yield Step(token, before.logprob(token), before)

    def _counters_of(self, request: Generation) -> Counters:
        return self.counters[request.rank or 0]

    async def _scheduled(self, request: Generation) -> bool:
        """Wait for the request's next turn. False: it was aborted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds_per_token):
                while not request.aborted:
                    await self._stirring(request)
        while self.paused and not request.aborted:
            await self._stirring(request)
        self.require_alive()
        return not request.aborted

    async def _stirring(self, request: Generation) -> None:
        self.require_alive()
        request.stirred.clear()
        await request.stirred.wait()

    def _prefill(self, request: Generation, tokens: tuple[int, ...]) -> Context:
        """Take what the cache has, and cache what is computed now."""
        request.holds_blocks, request.preempted = True, False
        self._counters_of(request).prompt_tokens += len(tokens)
        stale = self.weights.digest
        keys = self._block_keys(f"{request.rank} {request.cache_salt}", tokens)
        # The last token is always computed, since its logits are needed.
        usable = (len(tokens) - 1) // BLOCK_TOKENS
        hits = 0
        while hits < usable and (filled_by := self._blocks.get(keys[hits])) is not None:
            self._blocks.move_to_end(keys[hits])
            stale = stale if filled_by == self.weights.digest else f"{filled_by} under {self.weights.digest}"
            hits += 1
        request.hits = hits * BLOCK_TOKENS
        self._counters_of(request).cached_tokens += request.hits
        for key in keys[hits:]:
            self._blocks[key] = stale
        while len(self._blocks) > MOST_CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return Context(stale, tokens)

    @staticmethod
    def _block_keys(salt: str, tokens: tuple[int, ...]) -> list[bytes]:
        running = hashlib.blake2b(salt.encode(), digest_size=16)
        keys = []
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            for token in tokens[start : start + BLOCK_TOKENS]:
                running.update(token.to_bytes(4, "little"))
            keys.append(running.digest())
        return keys

    def alive(self) -> bool:
        """Whether its process lives, as far as we heard."""
        return self._alive()

    def lose_weights(self) -> None:
        """From here until new ones are held, whatever is computed is garbage, as in a half-loaded model."""
        self.require_alive()
        self.weights = HeldWeights(self.weights.tensors, "half-loaded")

    def pause(self, mode: str = "abort") -> None:
        """Schedule nothing more; in mode abort what runs ends, in mode keep it is frozen."""
        self.require_alive()
        self.paused = True
        if mode == "abort":
            self.abort_all()

    def abort_all(self) -> None:
        """End everything that the core has with what it has so far."""
        self.abort(tuple(request.name for request in self._running))

    def abort(self, names: tuple[str, ...]) -> None:
        """End these with what they have so far."""
        self.require_alive()
        for request in self._running:
            request.aborted = request.aborted or request.name in names
        self.stir()

    def tokens(self) -> dict[str, int]:
        """Output so far of every request."""
        return {request.name: len(request.output) for request in self._running}

    def resume(self) -> None:
        """Schedule again."""
        self.require_alive()
        self.paused = False
        self.stir()

    def sleep(self, level: int) -> None:
        """As vLLM: paused, caches dropped, at level 2 the weights too; who sleeps already goes on sleeping."""
        self.pause("abort")
        self.reset_prefix_cache()
        if not self.asleep:
            self.asleep = frozenset({"weights", "kv_cache"})
            if level > 1:
                self.weights = HeldWeights(self.weights.tensors, "dropped in its sleep")

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """As vLLM 0.27.1: the last tag resumes the scheduler."""
        self.require_alive()
        self.asleep -= set(tags)
        if not self.asleep:
            self.resume()

    def stir(self) -> None:
        """Let every request look again at what it waits for."""
        for request in self._running:
            request.stirred.set()

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """As vLLM: fails while requests hold blocks, unless they are preempted."""
        self.require_alive()
        holding = [request for request in self._running if request.holds_blocks]
        if holding and not preempt:
            return False
        for request in holding:
            request.holds_blocks, request.preempted = False, True
        self._blocks.clear()
        return True
