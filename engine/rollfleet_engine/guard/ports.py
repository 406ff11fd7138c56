"""What the guard needs of an engine: one port, kept by real vLLM and by the simulator alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Facts, FailureReason, Transferred


class EngineError(Exception):
    """The engine failed at something; `message` carries its own text, naming tensor, layer or rank."""

    def __init__(self, reason: FailureReason, message: str, *, touched: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.touched = touched  # whether old weights may be gone
        self.unreset = False  # of a push: the workers may still be in the trainer's group


@dataclass(frozen=True)
class Received:
    """What the workers got of a trainer's push; all of them the same."""

    digest: str
    tensors: int
    bytes: int
    layers: int  # whose loaded elements were compared with the first load, over all workers


class EngineAdapter(Protocol):
    """An engine as its guard sees it.

    Every coroutine ends within `deadline_s` or raises EngineError(DEADLINE_EXCEEDED).
    Only share, abort_all, abort, reset_caches and probe are cancelled half-way, others only past their deadline.
    Whatever else apply raises than an EngineError with touched=False counts as having touched the weights.
    """

    async def look(self, deadline_s: float) -> Mapping[str, str]:
        """See once, at the guard's start, what the engine really has: capability (adapting.CAPABILITIES) -> why not.

        What it lacks is no error: facts() does not name it, and the operator says so before it pauses anything.
        """
        ...

    def facts(self) -> Facts:
        """Version, topology, model, and the capabilities that `look` has seen; no call to the core."""
        ...

    def alive(self) -> bool:
        """Whether the engine core lives; answered from memory, never by asking the core."""
        ...

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Stop scheduling on every rank. abort: what runs answers with what it has. keep: it is frozen as it is.

        Never asked for mode wait: the guard itself waits, before it pauses. When this returns no rank computes anything
        any more, and all that was computed has come to this process.
        """
        ...

    async def abort_all(self, deadline_s: float) -> None:
        """Abort requests that reached the core after the pause."""
        ...

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        """Abort these: they answer with what they have, finish_reason "abort". Of those that ended before, nothing."""
        ...

    def tokens(self) -> Mapping[str, int]:
        """Output tokens so far of every request that is unfinished; no call to the core.

        An adapter enters its name of a request into `turnstile.current_passage` when it gives it to the core.
        """
        ...

    async def resume(self, deadline_s: float) -> None:
        """Start scheduling again."""
        ...

    async def share(self, staged: StagedCheckpoint, deadline_s: float) -> None:
        """Part of Prepare: workers that cannot reach the guard's open files stage copies of their own.

        Raises EngineError as staging does, naming the node. May be cancelled half-way.
        """
        ...

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """Load the staged tensors through the engine's four phases, digest and count them on the way.

        Raises EngineError with COVERAGE_FAILED, DIGEST_MISMATCH, CHECKPOINT_CHANGED or TRANSFER_FAILED.
        """
        ...

    async def push_init(self, backend: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """First phase of a trainer's push: every worker joins its group. `info` is the trainer's own, and not trusted.

        Raises EngineError(TRANSFER_FAILED), with the names that there are where no backend is called so.
        """
        ...

    async def push_start(self, deadline_s: float) -> None:
        """Second phase: the workers are ready to take tensors."""
        ...

    async def push_update(self, info: Mapping[str, Any], deadline_s: float) -> None:
        """Third phase, as often as the trainer calls: every worker receives and loads what `info` announces.

        Raises EngineError as apply does, with what the trainer said where it was the one that broke off.
        """
        ...

    async def push_finish(self, digest: str | None, version: int, deadline_s: float) -> Received:
        """Fourth phase: all workers have all tensors, every layer is whole, and the digests are one and `digest`."""
        ...

    async def sleep(self, level: int, deadline_s: float) -> None:
        """Give memory back on every rank. The scheduler is paused, and nothing is in it.

        Raises EngineError(SLEEP_FAILED), with touched=False where nothing was done.
        """
        ...

    async def wake(self, tags: tuple[Tag, ...], deadline_s: float) -> None:
        """Take memory again for these tags, which sleep. The scheduler is paused afterwards, as it was before."""
        ...

    async def recover(self, deadline_s: float) -> None:
        """After a failed apply or push: put every worker back to where a new apply can start."""
        ...

    async def reset_caches(self, deadline_s: float, *, kept: bool = False) -> None:
        """Drop prefix, multi-modal and encoder caches on every rank. `kept`: frozen requests give up theirs too.

        They compute them again when they go on.

        A cache that could not be dropped is an EngineError(CACHE_RESET_FAILED).
        """
        ...

    async def probe(self, tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        """Of every data-parallel rank: log-probability (natural log) of each token after the first, given those before.

        Never served from a cache that others fill. Cancelled half-way, it leaves nothing behind in the engine.
        """
        ...
