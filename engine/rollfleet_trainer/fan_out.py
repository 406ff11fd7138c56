"""One call at several engines at once: all have ended when it returns or raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from rollfleet_trainer.errors import TransferError

MOST_TOLD = 10  # engines whose words an error has


class SyncClient(Protocol):
    """vLLM's four methods, what comes at their begin and the digest at their end, and how to break off."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None: ...

    def abort_weight_update(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Target:
    """An engine of status.targets: who to call, and which ranks it has."""

    client: SyncClient
    rank_offset: int
    world_size: int  # of its own workers

    @property
    def end(self) -> int:
        """The first rank that is not its."""
        return self.rank_offset + self.world_size


def group_size(targets: Sequence[Target]) -> int:
    """Ranks of trainer and engines together. ValueError where ranks overlap or are missing."""
    expected = 1
    for target in sorted(targets, key=lambda each: each.rank_offset):
        if target.rank_offset != expected or target.world_size < 1:
            raise ValueError(f"ranks {target.rank_offset} to {target.end - 1} do not follow rank {expected - 1}")
        expected = target.end
    if expected == 1:
        raise ValueError("there is no engine to send to")
    return expected


class FanOut:
    """Threads, two per engine: a call may have to be broken off by another one."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = tuple(targets)
        self._pool = ThreadPoolExecutor(max(1, 2 * len(self.targets)), thread_name_prefix="rollfleet-push")

    def begin(self, call: Callable[[Target], None]) -> list[Future[None]]:
        """At all engines, in the background."""
        return [self._pool.submit(call, target) for target in self.targets]

    def all(self, call: Callable[[Target], None]) -> None:
        """At all engines, to the end. Raises TransferError with the words of those that failed, ten at most."""
        settle(self.begin(call))

    def close(self) -> None:
        """End the threads; calls are bounded by their clients' own timeouts."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def given_up(calls: Sequence[Future[None]]) -> str:
    """What the engines said whose calls have failed by now, a line each; empty where none has."""
    errors = (call.exception() for call in calls if call.done())
    return "; ".join(str(error).partition("\n")[0] for error in errors if error is not None)


def settle(calls: Sequence[Future[None]]) -> None:
    """Wait for all; raise what failed, together: a fleet may have a thousand that say the same."""
    failed = [str(error) for call in calls if isinstance(error := call.exception(), TransferError)]
    if failed:
        more = f"; and {len(failed) - MOST_TOLD} more engines" if len(failed) > MOST_TOLD else ""
        raise TransferError("; ".join(failed[:MOST_TOLD]) + more)
    for call in calls:
        call.result()
