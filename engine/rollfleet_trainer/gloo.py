"""Sender of backend gloo: rank 0 of a ProcessGroupGloo over a TCPStore in this process.

Tensors are packed into two buffers of equal size: one is broadcast while the other one is filled.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollfleet_protocol.pushes import LONGEST_WORDS, PACKED_BUFFER_BYTES, TRAINER_ERROR_KEY
from rollfleet_protocol.words import fitted
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target, given_up, settle
from rollfleet_trainer.sender import Sender, first_line
from rollfleet_trainer.tensors import Bytes, Sent, listed, nbytes, raw_bytes
from rollfleet_transport.gloo import group_of

BUFFERS = 2
DRAIN_S = 5.0
LOOK_S = 0.0005  # a buffer takes 60 ms at 1 GiB/s


class GlooSender(Sender):
    """As Sender says; leaving it destroys the group.

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
        super().__init__(targets, group=group, buffer_bytes=buffer_bytes)
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None
        self._going: deque[tuple[torch.Tensor, Any]] = deque()

    def init(self) -> None:
        """Phase 1: form the group anew."""
        self._leave()
        self._store = dist.TCPStore(
            self._address, 0, self._size, True, self._timeout, wait_for_workers=False, use_libuv=True
        )
        where = {"master_address": self._address, "master_port": int(self._store.port)}
        joining = self._fan.begin(
            lambda target: target.client.init_weight_transfer_engine(where | self._init_info(target))
        )
        try:
            self._group = self._formed(joining)
        except RuntimeError as error:
            self._break_off(f"the group did not form: {first_line(error)}")
            settle(joining)  # what the engines say of it is the better answer
            raise TransferError(f"the group of {self._size} ranks did not form: {first_line(error)}") from error
        settle(joining)

    def _formed(self, joining: Sequence[Future[None]]) -> Any:
        """The group; RuntimeError where torch gives up, or an engine does: its thread is left to torch's timeout."""
        forming: Future[Any] = Future()
        store, size, timeout = self._store, self._size, self._timeout

        def form() -> None:
            try:
                forming.set_result(group_of(store, 0, size, timeout, self._address))
            except RuntimeError as error:
                forming.set_exception(error)

        threading.Thread(target=form, name="rollfleet-gloo-form", daemon=True).start()
        wait([forming, *joining], return_when=FIRST_EXCEPTION)
        if not forming.done():
            raise RuntimeError(f"an engine did not join: {given_up(joining)}")
        return forming.result()

    def _joined(self) -> bool:
        return self._group is not None

    def _send(self, tensors: Mapping[str, torch.Tensor], sent: Sent) -> None:
        self._update(listed(tensors) | {"packed_buffer_size_bytes": self._buffer_bytes})
        total = sum(nbytes(tensor) for tensor in tensors.values())
        free = [torch.empty(min(self._buffer_bytes, total), dtype=torch.uint8) for _ in range(BUFFERS)]
        for buffer, size in _packed(tensors, sent, free):
            self._going.append((buffer, self._broadcast(buffer[:size])))
            if len(self._going) == BUFFERS:
                free.append(self._wait())
        while self._going:
            self._wait()
        settle(self._receiving)

    def _wait(self) -> torch.Tensor:
        """The oldest buffer, once it is sent."""
        buffer, work = self._going[0]
        try:
            while not work.is_completed():
                self._require_takers()
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
        self._let_go(why)
        super()._break_off(why)

    def _let_go(self, why: str) -> None:
        """Tell the engines why, and end their waiting by closing the connections. The store stays for them to read."""
        if self._store is not None:
            # By a connection of its own: the other one is held, up to its timeout, by a group that does not form.
            self._store.clone().set(TRAINER_ERROR_KEY, fitted(why, LONGEST_WORDS))
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

    def _give_up_group(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Destroy the group and its store."""
        self._abandon()
        self._store = None


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
