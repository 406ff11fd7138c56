"""Sender of backend gloo: rank 0 of a ProcessGroupGloo over a TCPStore in this process.

Tensors are packed into two buffers of equal size: one is broadcast while the other one is filled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from rollfleet_protocol.pushes import LONGEST_WORDS, PACKED_BUFFER_BYTES, TRAINER_ERROR_KEY
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import FanOut, Target, group_size, settle
from rollfleet_trainer.tensors import Bytes, Sent, listed, nbytes, raw_bytes

BUFFERS = 2
DRAIN_S = 5.0
LOOK_S = 0.0005  # a buffer takes 60 ms at 1 GiB/s


class GlooSender:
    """Sends to the engines of one group. A context manager: leaving it destroys the group.

    `address` is this process's as the engines reach it; the store takes a free port. `timeout_s` bounds the forming of
    the group and every broadcast: it must lie below the update's transfer deadline, so that who waits is told why.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        address: str,
        *,
        group: str = "",
        buffer_bytes: int = PACKED_BUFFER_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        self._fan = FanOut(targets)
        self._size = group_size(targets)
        self._address = address
        self._name = group
        self._buffer_bytes = buffer_bytes
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None
        self._going: deque[tuple[torch.Tensor, Any]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def init(self) -> None:
        """Phase 1: form the group anew. Needed at first, after a failure, and whenever an engine's process changed."""
        self.leave()
        self._store = dist.TCPStore(
            self._address, 0, self._size, True, self._timeout, wait_for_workers=False, use_libuv=True
        )
        port = int(self._store.port)
        joining = self._fan.begin(
            lambda target: target.client.init_weight_transfer_engine(self._init_info(target, port))
        )
        with ThreadPoolExecutor(1) as own:
            forming = own.submit(dist.ProcessGroupGloo, self._store, 0, self._size, self._timeout)
            try:
                self._group = forming.result()
            except RuntimeError as error:
                self._break_off(f"the group did not form: {_first(error)}")
                settle(joining)  # what the engines say of it is the better answer
                raise TransferError(f"the group of {self._size} ranks did not form: {_first(error)}") from error
        settle(joining)

    def _init_info(self, target: Target, port: int) -> dict[str, Any]:
        return {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": target.rank_offset,
            "world_size": self._size,
            "group": self._name,
        }

    def send(self, tensors: Mapping[str, torch.Tensor], weight_version: str | None = None) -> str:
        """Phases 2 to 4. Returns the version digest of what was sent, which every engine's workers agree to."""
        if self._group is None:
            raise TransferError("there is no group: init comes first")
        self._fan.all(lambda target: target.client.start_weight_update())
        info = listed(tensors) | {"packed_buffer_size_bytes": self._buffer_bytes}
        receiving = self._fan.begin(lambda target: target.client.update_weights(info))
        sent = Sent()
        try:
            self._broadcast_all(tensors, sent, receiving)
        except Exception as error:
            # Whatever broke off here, the engines wait for the rest of it: tell them, and let go of them.
            self._break_off(f"{type(error).__name__}: {_first(error)}")
            if isinstance(error, RuntimeError):
                settle(receiving)
                raise TransferError(f"broadcast: {_first(error)}") from error
            raise
        settle(receiving)
        digest = sent.digest()
        self._fan.all(lambda target: target.client.finish_weight_update(weight_version, digest))
        return digest

    def _broadcast_all(
        self, tensors: Mapping[str, torch.Tensor], sent: Sent, receiving: Sequence[Future[None]]
    ) -> None:
        total = sum(nbytes(tensor) for tensor in tensors.values())
        free = [torch.empty(min(self._buffer_bytes, total), dtype=torch.uint8) for _ in range(BUFFERS)]
        for buffer, size in _packed(tensors, sent, free):
            self._going.append((buffer, self._broadcast(buffer[:size])))
            if len(self._going) == BUFFERS:
                free.append(self._wait(receiving))
        while self._going:
            self._wait(receiving)

    def _wait(self, receiving: Sequence[Future[None]]) -> torch.Tensor:
        """The oldest buffer, once it is sent; RuntimeError where an engine has said that it takes no more."""
        buffer, work = self._going[0]
        try:
            while not work.is_completed():
                if any(call.done() and call.exception() is not None for call in receiving):
                    raise RuntimeError("an engine takes no more")
                time.sleep(LOOK_S)
            work.wait()
        finally:
            del work  # it holds the connections, and the traceback of its failure would hold it
        self._going.popleft()
        return buffer

    def _broadcast(self, buffer: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return self._group.broadcast([buffer], options)

    def _break_off(self, why: str) -> None:
        """Tell the engines why, and end their waiting by closing the connections. The store stays for them to read."""
        if self._store is not None:
            self._store.set(TRAINER_ERROR_KEY, why[:LONGEST_WORDS])
        self._abandon()

    def _abandon(self) -> None:
        """Connections close with the last reference to the group, and only when no collective is pending."""
        ends = time.monotonic() + DRAIN_S
        while self._going:
            _, work = self._going.popleft()
            try:
                work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))
            except RuntimeError:
                pass  # what failed is told already
            finally:
                del work
        self._group = None

    def leave(self) -> None:
        """Destroy the group and its store."""
        self._abandon()
        self._store = None

    def close(self) -> None:
        """Of no use any more."""
        self.leave()
        self._fan.close()


def _packed(
    tensors: Mapping[str, torch.Tensor], sent: Sent, free: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Full buffers, and a last one. A buffer is taken from `free` when it is needed: the caller puts it back."""
    buffer, filled = free.pop(), 0
    for name, tensor in tensors.items():
        raw: Bytes = raw_bytes(tensor)
        done = 0
        while done < raw.size:
            if filled == buffer.numel():
                yield buffer, filled
                buffer, filled = free.pop(), 0
            count = min(buffer.numel() - filled, raw.size - done)
            buffer.numpy()[filled : filled + count] = raw[done : done + count]
            filled, done = filled + count, done + count
        sent.add(name, tensor, raw)
    if filled:
        yield buffer, filled


def _first(error: Exception) -> str:
    """torch adds a stack of addresses below its message."""
    return str(error).partition("\n")[0][:LONGEST_WORDS]
