"""Sender of backend hccl: rank 0 of an HCCL group, on an NPU of this process.

The id of the group is made here and goes to every engine as bytes, in the init of its guard's control port. The bytes
of the tensors are packed by vLLM-Ascend's producer; its consumer is what the engines run.

HCCL cannot break off a broadcast: every rank waits for the others up to HCCL's own timeout (HCCL_EXEC_TIMEOUT). So
when a tensor cannot be read, zeros go out in place of it and of the rest, and the engines are told why they are worth
nothing. When an engine gives up, the thread that broadcasts is left behind. Untested on hardware.
"""

from __future__ import annotations

import logging
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from rollfleet_protocol.pushes import PACKED_BUFFER_BYTES, PACKED_BUFFERS
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target, given_up, settle
from rollfleet_trainer.sender import Sender, first_line
from rollfleet_trainer.tensors import Sent, listed, nbytes
from rollfleet_transport.aside import Aside
from rollfleet_transport.hccl import ERRORS, TRAINER, Communicator, current_device, new_id, send_packed

logger = logging.getLogger(__name__)
LOOK_S = 0.005  # a buffer takes 3 ms at 20 GiB/s
CLOSE_S = 10.0
_T = TypeVar("_T")


class HcclSender(Sender):
    """As Sender says; leaving it destroys the group.

    `device` is this process's NPU (its current one, if left out); tensors of other devices are copied there one by one.
    `timeout_s` bounds the forming of the group and every broadcast: it must lie below the update's transfer deadline,
    so that who waits is told why. Beside the tensors, two buffers of `buffer_bytes` and the largest tensor are taken on
    the NPUs of both sides.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        group: str = "",
        buffer_bytes: int = PACKED_BUFFER_BYTES,
        timeout_s: float = 60.0,
        device: int | None = None,
    ) -> None:
        super().__init__(targets, group=group, buffer_bytes=buffer_bytes)
        self._timeout_s = timeout_s
        self._device = current_device() if device is None else device
        self._group: Communicator | None = None

    def init(self) -> None:
        """Phase 1: form the group anew. Returns when a first byte has come to every engine."""
        self._leave()
        try:
            hccl_id = new_id(self._device)
        except ERRORS as error:
            raise TransferError(f"HCCL gives no id for a group: {first_line(error)}") from error
        own = {"hccl_id": b64encode(hccl_id).decode()}
        joining = self._fan.begin(
            lambda target: target.client.init_weight_transfer_engine(own | self._init_info(target))
        )
        forming = Aside(
            "rollfleet-hccl-form",
            lambda: Communicator(hccl_id, TRAINER, self._size, self._device),
            late=Communicator.destroy,
        )
        ends = time.monotonic() + self._timeout_s
        try:
            self._group = self._watched(forming, joining, lambda: time.monotonic() > ends)
        except ERRORS as error:
            self._break_off(f"the group did not form: {first_line(error)}")
            settle(joining)  # what the engines say of it is the better answer
            raise TransferError(f"the group of {self._size} ranks did not form: {first_line(error)}") from error
        settle(joining)

    def _joined(self) -> bool:
        return self._group is not None

    @property
    def communicator(self) -> Communicator:
        """The group, for vLLM-Ascend's HCCLWeightTransferEngine.trainer_send_weights with packed=True.

        It stands where what their trainer_init makes would. TransferError before init, and after a failure.
        """
        if self._group is None:
            raise TransferError("there is no group: init comes first")
        return self._group

    def _send(self, tensors: Mapping[str, torch.Tensor], sent: Sent) -> None:
        group = self.communicator
        settings = {
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": PACKED_BUFFERS,
        }
        reading = _Reading(tensors, sent, self._device)
        self._update(listed(tensors) | settings)
        sending = Aside(
            "rollfleet-hccl-send", lambda: send_packed(group, reading.flat(), self._buffer_bytes, PACKED_BUFFERS)
        )
        self._watched(sending, self._receiving, lambda: group.busy(self._timeout_s))
        if reading.failure is not None:
            raise reading.failure
        settle(self._receiving)

    def _watched(self, work: Aside[_T], engines: Sequence[Future[None]], late: Callable[[], bool]) -> _T:
        """What the work returns; RuntimeError where an engine has given up, or it takes too long."""
        while not work.done(LOOK_S):
            failed = given_up(engines)
            if (failed or late()) and work.give_up():
                why = f"an engine takes no more: {failed}" if failed else f"not done within {self._timeout_s:g} s"
                raise RuntimeError(why)
        return work.result()

    def _break_off(self, why: str) -> None:
        super()._break_off(why)
        self._leave()

    def _give_up_group(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Destroy the communicator. Of a broadcast that hangs, its thread does so when it comes back."""
        group, self._group = self._group, None
        if group is None:
            return
        leaving = Aside("rollfleet-hccl-leave", group.destroy)
        if not leaving.done(0.0 if group.busy() else CLOSE_S) and leaving.give_up():
            logger.warning("rollfleet: a broadcast still runs; its communicator is destroyed when it ends")
            return
        try:
            leaving.result()
        except ERRORS as error:
            logger.warning("rollfleet: the communicator of hccl was not destroyed: %s", first_line(error))


class _Reading:
    """The tensors as they go out, digested on the way. Once one cannot be read, zeros of the announced size."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], sent: Sent, device: int) -> None:
        self._tensors, self._sent, self._device = tensors, sent, device
        self._sizes = list(zip(tensors, map(nbytes, tensors.values()), strict=True))
        self.failure: Exception | None = None

    def flat(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Flat tensors of uint8 on the device, as many bytes each as were announced."""
        items = iter(self._tensors.items())
        for name, size in self._sizes:
            raw = self._read(items, name, size)
            yield name, torch.zeros(size, dtype=torch.uint8).npu(self._device) if raw is None else raw

    def _read(self, items: Iterator[tuple[str, torch.Tensor]], name: str, size: int) -> torch.Tensor | None:
        if self.failure is not None:
            return None
        try:
            found, tensor = next(items)
            raw = _flat(tensor, self._device)
            _require_announced((name, size), (found, raw.numel()))
            self._sent.add(name, tensor, raw)
        except Exception as error:  # noqa: BLE001 - whatever it is: told when the engines wait for nothing any more
            self.failure = error
            return None
        return raw


def _flat(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """Its bytes on the device, row by row: a view where it lies there like that already."""
    return tensor.detach().npu(device).contiguous().reshape(-1).view(torch.uint8)


def _require_announced(announced: tuple[str, int], found: tuple[str, int]) -> None:
    if found != announced:
        raise ValueError(f"tensor and bytes are {found} now, and {announced} were announced")
