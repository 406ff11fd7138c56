"""Backend shm: the CPU's stand-in for ipc. Tensors lie in a file of the node's shared memory, named by the trainer.

A handle is a file name and an offset, plain JSON. Nothing is mapped: of a file that is cut short while it is read comes
an error here, where a mapping would kill the worker by SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollfleet_engine.weights.backends.base import Incoming, Seat
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_engine.weights.staging import read_into
from rollfleet_protocol.pushes import SHM_FOLDER, ShmInit, ShmUpdate, TensorMeta

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no fifo that hangs


class ShmBackend:
    """Keeps Backend. Trainer and engine must share /dev/shm: one container, or one memory volume in one pod."""

    def __init__(self) -> None:
        self._joined: ShmInit | None = None

    def init(self, info: Mapping[str, Any], seat: Seat, deadline_s: float) -> None:
        """Only the words are checked: there is nothing to connect."""
        self._joined = ShmInit.model_validate(info)

    def announced(self, info: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """As Backend says."""
        return tuple(ShmUpdate.model_validate(info).tensors())

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Iterator[Incoming]:
        """As Backend says."""
        if self._joined is None:
            raise PushError("shm: init_weight_transfer_engine comes first")
        update = ShmUpdate.model_validate(info)
        fd = _open(update)
        try:
            place = update.offset
            for meta in update.tensors():
                raw = np.empty(meta.nbytes, dtype=np.uint8)
                read_into(fd, raw.data, place, f"{SHM_FOLDER}/{update.file}")
                place += meta.nbytes
                yield Incoming(meta, raw)
        except CheckpointError as error:
            raise PushError(error.message) from error
        except OSError as error:
            raise PushError(f"shm: {SHM_FOLDER}/{update.file} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing is held between calls."""
        self._joined = None


def _open(update: ShmUpdate) -> int:
    path = f"{SHM_FOLDER}/{update.file}"
    try:
        fd = os.open(path, _OPEN)
    except OSError as error:
        cure = "do trainer and engine share /dev/shm?"
        raise PushError(f"shm: {path} cannot be opened: {error.strerror}; {cure}") from error
    found, end = os.fstat(fd), update.offset + update.nbytes
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise PushError(f"shm: {path} is not a regular file")
    if end > found.st_size:
        os.close(fd)
        raise PushError(f"shm: {path} has {found.st_size} bytes, the tensors end at byte {end}")
    return fd
