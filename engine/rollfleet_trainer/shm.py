"""Sender of backend shm: tensors go through one file of the node's shared memory, a bufferful per call."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from rollfleet_protocol.pushes import PACKED_BUFFER_BYTES, SHM_FOLDER
from rollfleet_trainer.fan_out import FanOut, Target, group_size
from rollfleet_trainer.tensors import Sent, listed, nbytes, raw_bytes


class ShmSender:
    """Sends to engines that share /dev/shm with this process. A context manager: leaving it removes the file.

    At most `buffer_bytes` of shared memory are used, or as much as the largest tensor takes.
    """

    def __init__(self, targets: Sequence[Target], *, group: str = "", buffer_bytes: int = PACKED_BUFFER_BYTES) -> None:
        self._fan = FanOut(targets)
        self._size = group_size(targets)
        self._group = group
        self._buffer_bytes = buffer_bytes
        self._file = f"rollfleet-{uuid.uuid4().hex}"
        self._path = f"{SHM_FOLDER}/{self._file}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def init(self) -> None:
        """Phase 1."""
        self._fan.all(
            lambda target: target.client.init_weight_transfer_engine(
                {"group": self._group, "rank_offset": target.rank_offset, "world_size": self._size}
            )
        )

    def send(self, tensors: Mapping[str, torch.Tensor], weight_version: str | None = None) -> str:
        """Phases 2 to 4. Returns the version digest of what was sent, which every engine's workers agree to."""
        self._fan.all(lambda target: target.client.start_weight_update())
        sent = Sent()
        for names in self._loads(tensors):
            load = {name: tensors[name] for name in names}
            self._write(load, sent)
            info = listed(load) | {"file": self._file, "offset": 0}
            self._fan.all(lambda target, info=info: target.client.update_weights(info))  # type: ignore[misc]
        digest = sent.digest()
        self._fan.all(lambda target: target.client.finish_weight_update(weight_version, digest))
        return digest

    def _loads(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
        """Names of as many tensors as fit at a time; one that is too large comes alone."""
        names: list[str] = []
        filled = 0
        for name, tensor in tensors.items():
            if names and filled + nbytes(tensor) > self._buffer_bytes:
                yield names
                names, filled = [], 0
            names.append(name)
            filled += nbytes(tensor)
        if names:
            yield names

    def _write(self, load: Mapping[str, torch.Tensor], sent: Sent) -> None:
        place = 0
        for name, tensor in load.items():
            raw = raw_bytes(tensor)
            done = 0
            while done < raw.size:
                done += os.pwrite(self._fd, raw.data[done:], place + done)
            place += raw.size
            sent.add(name, tensor, raw)

    def close(self) -> None:
        """Give the shared memory back."""
        self._fan.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            os.unlink(self._path)  # noqa: PTH108 - where os.open made it
