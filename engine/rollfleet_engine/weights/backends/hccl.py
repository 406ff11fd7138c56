"""Backend hccl: broadcasts between different NPUs, by vLLM-Ascend's packed functions over a communicator of ours.

vLLM-Ascend's consumer calls a function with the tensors of each buffer; here they are asked for one by one. So it runs
in a thread of its own, and goes on when those of the buffer before are loaded. That thread is waited for up to the
deadline only: HCCL cannot break off a broadcast whose other ranks do not come.

Importing this needs vLLM-Ascend: elsewhere the registry leaves it out, and says so. Untested on hardware.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rollfleet_engine.weights.backends.base import Incoming, Seat, rank_of
from rollfleet_engine.weights.backends.hanging import HangingError, begin, within
from rollfleet_engine.weights.errors import PushError
from rollfleet_protocol.pushes import LONGEST_WORDS, HcclInit, HcclUpdate, TensorMeta
from rollfleet_transport.hccl import ERRORS, Communicator, current_device, finish_device_work, receive_packed

logger = logging.getLogger(__name__)
CLOSE_S = 10.0  # that leaving a group is waited for, where no deadline comes before; then it goes on by itself
SPARE_S = 1.0  # kept for the answer, so that it tells why
_Parcel = list[tuple[str, torch.Tensor]]


class HcclBackend:
    """Keeps Backend."""

    def __init__(self) -> None:
        self._wanted: HcclInit | None = None
        self._group: Communicator | None = None

    def init(self, info: Mapping[str, Any], seat: Seat, deadline_s: float) -> None:
        """As Backend says. Blocks until every rank has joined and a first byte came from the trainer."""
        wanted = HcclInit.model_validate(info)
        if self._group is not None and wanted.group and self._wanted == wanted:
            return
        ends = time.monotonic() + deadline_s
        self._leave(deadline_s / 2)
        rank, device = rank_of("hccl", wanted, seat), current_device()

        def join() -> Communicator:
            return Communicator(wanted.hccl_id, rank, wanted.world_size, device)

        try:
            left_s = ends - time.monotonic()
            self._group = within(left_s, "rollfleet-hccl-join", join, late=Communicator.destroy)
        except (*ERRORS, HangingError) as error:
            raise PushError(f"hccl: rank {rank} of {wanted.world_size} cannot join: {_first(error)}") from error
        self._wanted = wanted

    def announced(self, info: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """As Backend says."""
        return tuple(HcclUpdate.model_validate(info).tensors())

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Iterator[Incoming]:
        """As Backend says. Tensors stay on the device."""
        if self._group is None:
            raise PushError("hccl: not in a group: init_weight_transfer_engine comes first")
        update = HcclUpdate.model_validate(info)
        received, whole, ends = 0, False, time.monotonic() + deadline_s
        handing: _Handing | None = None
        try:
            handing = _Handing(self._group, update, ends - min(SPARE_S, deadline_s / 10))
            for incoming in handing.tensors():
                received += incoming.meta.nbytes
                yield incoming
            whole = True
        except (*ERRORS, HangingError) as error:
            raise PushError(f"hccl: after {received} of {update.nbytes} bytes: {_first(error)}") from error
        finally:
            if not whole:  # the trainer would send the rest of this update into the next one
                if handing is not None:
                    handing.stop()
                self._leave(ends - time.monotonic())

    def close(self) -> None:
        """As Backend says. Of a broadcast that hangs, its thread destroys the communicator when it comes back."""
        self._leave(CLOSE_S)

    def _leave(self, within_s: float) -> None:
        """Waited for so long at most."""
        group, self._group, self._wanted = self._group, None, None
        if group is None:
            return
        try:
            leaving = begin("rollfleet-hccl-leave", group.destroy)
            if leaving.done(0.0 if group.busy() else min(CLOSE_S, within_s)) or not leaving.give_up():
                leaving.result()
            else:
                logger.warning("rollfleet: hccl is still in use or being left; its communicator goes when that ends")
        except (*ERRORS, HangingError) as error:
            logger.warning("rollfleet: the communicator of hccl was not destroyed: %s", _first(error))


class _Handing:
    """Tensors of one update, buffer by buffer from the thread that receives to the one that loads."""

    def __init__(self, group: Communicator, update: HcclUpdate, ends: float) -> None:
        self._update = update
        self._ends = ends
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()  # None: no more come
        self._taken = threading.Semaphore(0)
        self._stopped = False
        self._work = begin("rollfleet-hccl-receive", lambda: self._receive(group))

    def _receive(self, group: Communicator) -> None:
        update = self._update
        sizes = ((meta.name, meta.nbytes) for meta in update.tensors())
        try:
            receive_packed(group, sizes, self._give, update.packed_buffer_size_bytes, update.packed_num_buffers)
        finally:
            self._parcels.put(None)

    def _give(self, parcel: _Parcel) -> None:
        self._parcels.put(parcel)
        if not self._taken.acquire(timeout=max(0.0, self._ends - time.monotonic())) or self._stopped:
            raise HangingError("nobody waits for the rest")

    def tensors(self) -> Iterator[Incoming]:
        """In order. Raises what receiving raises, and HangingError at the deadline."""
        metas = self._update.tensors()
        while (parcel := self._next()) is not None:
            for (_, raw), meta in zip(parcel, metas, strict=False):
                yield Incoming(meta, raw)
            parcel.clear()
            finish_device_work()  # what was copied out of this buffer is there: its memory may be given to the next one
            self._taken.release()
        self._work.done(max(0.0, self._ends - time.monotonic()))
        self._work.result()

    def _next(self) -> _Parcel | None:
        left_s = max(0.0, self._ends - time.monotonic())
        try:
            return self._parcels.get(timeout=left_s)
        except queue.Empty:
            raise HangingError(f"the trainer sent nothing for {left_s:.1f} s, up to the deadline") from None

    def stop(self) -> None:
        """Nobody takes the rest: whoever hands over does not go on."""
        self._stopped = True
        self._work.give_up()
        self._taken.release()


def _first(error: Exception) -> str:
    """torch adds a stack of addresses below its message."""
    return str(error).partition("\n")[0][:LONGEST_WORDS] or type(error).__name__
