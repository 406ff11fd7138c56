"""Sender of backend shm: tensors go through one file of the node's shared memory, a bufferful per call."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence

import torch

from rollfleet_protocol.pushes import PACKED_BUFFER_BYTES, SHM_FOLDER
from rollfleet_trainer.fan_out import Target, settle
from rollfleet_trainer.sender import Sender
from rollfleet_trainer.tensors import Sent, listed, loads, raw_bytes


class ShmSender(Sender):
    """As Sender says, to engines that share /dev/shm with this process; leaving it removes the file.

    At most `buffer_bytes` of shared memory are used, or as much as the largest tensor takes.
    """

    def __init__(self, targets: Sequence[Target], *, group: str = "", buffer_bytes: int = PACKED_BUFFER_BYTES) -> None:
        super().__init__(targets, group=group, buffer_bytes=buffer_bytes)
        self._file = f"rollfleet-{uuid.uuid4().hex}"
        self._path = f"{SHM_FOLDER}/{self._file}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def init(self) -> None:
        """Phase 1: there is nothing to form, and ranks are compared."""
        self._fan.all(lambda target: target.client.init_weight_transfer_engine(self._init_info(target)))

    def _joined(self) -> bool:
        return True  # the engines say where it was not called

    def _send(self, tensors: Mapping[str, torch.Tensor], sent: Sent) -> None:
        for names in loads(tensors, self._buffer_bytes):
            load = {name: tensors[name] for name in names}
            self._write(load, sent)
            self._update(listed(load) | {"file": self._file, "offset": 0})
            settle(self._receiving)

    def _write(self, load: Mapping[str, torch.Tensor], sent: Sent) -> None:
        place = 0
        for name, tensor in load.items():
            raw = raw_bytes(tensor)
            done = 0
            while done < raw.size:
                done += os.pwrite(self._fd, raw.data[done:], place + done)
            place += raw.size
            sent.add(name, tensor, raw)

    def _leave(self) -> None:
        """Give the shared memory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            os.unlink(self._path)  # noqa: PTH108 - where os.open made it
