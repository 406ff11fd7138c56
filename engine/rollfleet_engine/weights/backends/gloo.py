"""Backend gloo: torch's ProcessGroupGloo over a TCPStore that the trainer, rank 0, keeps. For CPUs, and for tests.

The tensors' bytes follow each other in one stream that is cut into equal buffers, and each buffer is one broadcast. Two
buffers are on their way at a time: one is read out while the other one fills, and no tensor is too large.

torch's client of a store waits for its answers without limit (ping, check and add, whatever timeout the store has; seen
with torch 2.13): who accepts a connection and says nothing would hold a worker for ever. Whatever speaks to the store
therefore runs in a thread that is waited for only so long.

Nobody can tell the group who he is: TCPStore and gloo know no identity. Whoever reaches the trainer's port while a
group forms can take a rank in it (docs/security.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rollfleet_engine.weights.backends.base import Incoming, Seat, rank_of
from rollfleet_engine.weights.backends.hanging import HangingError, within
from rollfleet_engine.weights.errors import PushError
from rollfleet_protocol.pushes import LONGEST_WORDS, TRAINER_ERROR_KEY, GlooInit, GlooUpdate, TensorMeta, pieces
from rollfleet_protocol.words import visible
from rollfleet_transport.gloo import group_of, own_address

BUFFERS = 2
DRAIN_S = 5.0
WORDS_S = 1.0  # for the trainer's words after a failure, where it still gives some


class _Group:
    """A communicator, and the store by which it was formed."""

    def __init__(self, wanted: GlooInit, rank: int, deadline_s: float) -> None:
        """Blocks, and where the store says nothing for ever."""
        # torch tries twice to connect to the store, and then the group forms: together they must end by the deadline.
        left = timedelta(seconds=max(0.5, deadline_s / 4))
        self.wanted = wanted
        self.store = dist.TCPStore(wanted.master_address, wanted.master_port, wanted.world_size, False, left)
        here = own_address(wanted.master_address, wanted.master_port)
        self.group: Any = group_of(self.store, rank, wanted.world_size, left, here)

    def broadcast(self, buffer: torch.Tensor, seconds: float) -> Any:
        """Begin to receive from the trainer."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(0.001, seconds))
        return self.group.broadcast([buffer], options)

    def trainers_words(self, within_s: float) -> str:
        """Why the trainer broke off, where it could say so in this time."""
        store = self.store

        def ask() -> str:
            if not store.check([TRAINER_ERROR_KEY]):
                return ""
            return str(visible(store.get(TRAINER_ERROR_KEY).decode("utf-8", "replace")[:LONGEST_WORDS]))

        try:
            return within(within_s, "rollfleet-gloo-words", ask)
        except (RuntimeError, HangingError):
            return ""  # its process is gone, or says nothing: what failed is told without its words

    def abandon(self) -> None:
        """Let go of the communicator: its connections close with it, and who waits for this rank is told."""
        self.group = None


class GlooBackend:
    """Keeps Backend."""

    def __init__(self) -> None:
        self._joined: _Group | None = None

    def init(self, info: Mapping[str, Any], seat: Seat, deadline_s: float) -> None:
        """As Backend says."""
        wanted = GlooInit.model_validate(info)
        if self._joined is not None and wanted.group and self._joined.wanted == wanted:
            return
        self.close()
        rank = rank_of("gloo", wanted, seat)
        try:
            self._joined = within(deadline_s, "rollfleet-gloo-join", lambda: _Group(wanted, rank, deadline_s))
        except (RuntimeError, OSError, HangingError) as error:
            where = f"{wanted.master_address}:{wanted.master_port}"
            raise PushError(
                f"gloo: rank {rank} of {wanted.world_size} cannot join at {where}: {_first(error)}"
            ) from error

    def announced(self, info: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """As Backend says."""
        return tuple(GlooUpdate.model_validate(info).tensors())

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Iterator[Incoming]:
        """As Backend says."""
        joined = self._joined
        if joined is None:
            raise PushError("gloo: not in a group: init_weight_transfer_engine comes first")
        update = GlooUpdate.model_validate(info)
        ends = time.monotonic() + deadline_s
        stream = _Stream(joined, update, ends - min(WORDS_S, deadline_s / 10))
        whole = False
        try:
            for meta in update.tensors():
                raw = np.empty(meta.nbytes, dtype=np.uint8)
                stream.fill(raw)
                yield Incoming(meta, raw)
            whole = True
        except RuntimeError as error:
            words = joined.trainers_words(min(WORDS_S, ends - time.monotonic()))
            cause = f'the trainer broke off: "{words}"' if words else _first(error)
            raise PushError(f"gloo: after {stream.received} of {update.nbytes} bytes: {cause}") from error
        finally:
            if not whole:  # buffers of this update may still be on their way: the next one would take them for its own
                stream.drain()
                self.close()

    def close(self) -> None:
        """As Backend says."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.abandon()


class _Stream:
    """The bytes of one update, in order, through two buffers."""

    def __init__(self, group: _Group, update: GlooUpdate, ends: float) -> None:
        self._group = group
        self._ends = ends
        self._sizes = pieces([update.nbytes], update.packed_buffer_size_bytes)
        largest = min(update.packed_buffer_size_bytes, update.nbytes)
        self._free = [torch.empty(largest, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._coming: deque[tuple[torch.Tensor, int, Any]] = deque()
        self._current: torch.Tensor | None = None
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)  # of the current buffer, not read out yet
        self.received = 0
        self._ask()

    def _ask(self) -> None:
        while self._free and (size := next(self._sizes, 0)):
            buffer = self._free.pop()
            self._coming.append((buffer, size, self._group.broadcast(buffer[:size], self._left())))

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def fill(self, raw: npt.NDArray[np.uint8]) -> None:
        """The next bytes, as many as fit. Raises RuntimeError as torch does."""
        done = 0
        while done < raw.size:
            if not self._bytes.size:
                self._next()
            count = min(self._bytes.size, raw.size - done)
            raw[done : done + count] = self._bytes[:count]
            self._bytes = self._bytes[count:]
            done += count

    def _next(self) -> None:
        if self._current is not None:
            self._free.append(self._current)
            self._current = None
            self._ask()
        buffer, size, work = self._coming.popleft()
        try:
            work.wait()
        finally:
            del work  # it holds the connections, and the traceback of its failure would hold it
        self.received += size
        self._current, self._bytes = buffer, buffer[:size].numpy()

    def drain(self) -> None:
        """Let what is on its way come: connections close only when no collective is pending."""
        ends = min(self._ends, time.monotonic() + DRAIN_S)
        while self._coming:
            _, _, work = self._coming.popleft()
            try:
                work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))
            except RuntimeError:
                pass  # what failed is told already, and what is late is no use
            finally:
                del work


def _first(error: Exception) -> str:
    """torch adds a stack of addresses below its message."""
    return str(error).partition("\n")[0][:LONGEST_WORDS] or type(error).__name__
