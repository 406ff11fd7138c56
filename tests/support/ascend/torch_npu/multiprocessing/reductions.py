"""torch_npu's handles of memory, of CPU tensors in named shared memory.

As on an NPU a handle is opaque bytes, whoever opens it maps the memory of the other process, and a counter in a file
goes down when that mapping ends. An event's handle that begins with HANGS belongs to an event that never comes.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions as torchs

SHM = Path("/dev/shm")  # where torch keeps shared memory
HEAD = 64  # bytes that torch puts before what it shares by name
COUNTERS = 10_000
VERSION_AND_TYPE = b"\x01c"
EVENT = bytes(range(64))
HANGS = b"never"
_made: dict[str, np.ndarray] = {}  # counter files of this process, by name


def rebuild_npu_tensor(
    tensor_cls: type,
    tensor_size: tuple[int, ...],
    tensor_stride: tuple[int, ...],
    tensor_offset: int,
    storage_cls: type,
    dtype: torch.dtype,
    storage_device: int,
    storage_handle: bytes,
    storage_size_bytes: int,
    storage_offset_bytes: int,
    requires_grad: bool,
    ref_counter_handle: bytes,
    ref_counter_offset: int,
    event_handle: bytes,
    event_sync_required: bool,
) -> torch.Tensor:
    if event_handle.startswith(HANGS):
        threading.Event().wait()
    if event_sync_required and event_handle != EVENT:
        raise RuntimeError("EH9999: Inner Error! rtIpcOpenEventHandle execute failed\n[PID: 1] stack")
    name = storage_handle.removeprefix(VERSION_AND_TYPE).rstrip(b"\0").decode()
    path = SHM / name.lstrip("/")
    if not path.is_file():
        raise RuntimeError("EL0001: aclrtIpcMemImportByKey failed, the key is not known\n[PID: 1] stack")
    whole = torch.UntypedStorage.from_file(str(path), True, HEAD + storage_offset_bytes + storage_size_bytes)
    begin = HEAD + storage_offset_bytes + tensor_offset * dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8).set_(whole)
    size = int(np.prod(tensor_size)) * dtype.itemsize
    found = flat[begin : begin + size].view(dtype).view(tensor_size)
    weakref.finalize(flat, _let_go, ref_counter_handle.decode(), ref_counter_offset)
    found.kept = flat  # type: ignore[attr-defined]
    return found


def _let_go(counter_file: str, offset: int) -> None:
    counters = np.memmap(SHM / counter_file.lstrip("/"), dtype=np.int64, mode="r+", shape=(COUNTERS,))
    counters[offset] -= 1


def _npu_reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    storage = tensor.untyped_storage()
    _, name, size = storage._share_filename_cpu_()
    counter_file, counters = _counter_file()
    offset = int(counters[-1])  # the next one that is free
    counters[-1] += 1
    counters[offset] = 1
    return (
        rebuild_npu_tensor,
        (
            type(tensor),
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            torch.storage.TypedStorage,
            tensor.dtype,
            0,
            VERSION_AND_TYPE + name.ljust(65, b"\0"),
            size,
            0,
            tensor.requires_grad,
            counter_file.encode(),
            offset,
            EVENT,
            True,
        ),
    )


def _counter_file() -> tuple[str, np.ndarray]:
    if not _made:
        name = f"/torch_{os.getpid()}_{int.from_bytes(os.urandom(4), 'little')}_0"
        path = SHM / name.lstrip("/")
        _made[name] = np.memmap(path, dtype=np.int64, mode="w+", shape=(COUNTERS,))
        weakref.finalize(_made[name], path.unlink, missing_ok=True)
    return next(iter(_made.items()))


def remove_counters() -> None:
    """Of a forked process, which ends without what others do at their end."""
    for name in _made:
        (SHM / name.lstrip("/")).unlink(missing_ok=True)


def readers() -> int:
    """Of what this process shared: descriptions that somebody has not let go of."""
    return sum(int(counters[:-1].sum()) for counters in _made.values())


def _add_reductions_methods() -> None:
    """As torch_npu does when it is imported."""
    torchs.reduce_tensor = _npu_reduce_tensor
