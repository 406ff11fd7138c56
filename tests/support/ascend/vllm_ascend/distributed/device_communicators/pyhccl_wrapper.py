"""HCCLLibrary over gloo: an id names the TCPStore of the process that made it, a communicator is a ProcessGroupGloo.

Each communicator that comes into being or is destroyed is a line of the file that ROLLFLEET_TEST_HCCL_LOG names.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOG = "ROLLFLEET_TEST_HCCL_LOG"
MISSING = "ROLLFLEET_TEST_HCCL_MISSING"  # set: the library cannot be loaded
LONG = timedelta(hours=1)  # HCCL gives up late; who uses it must not wait so long

hcclComm_t = ctypes.c_void_p  # noqa: N816 - names are vLLM-Ascend's
aclrtStream_t = ctypes.c_void_p  # noqa: N816 - as above
buffer_type = ctypes.c_void_p


class hcclUniqueId(ctypes.Structure):  # noqa: N801 - as above
    """4108 bytes, of which address and port are used here."""

    _fields_ = [("internal", ctypes.c_byte * 4108)]


class hcclDataTypeEnum:  # noqa: N801 - as above
    hcclUint8 = 7  # noqa: N815 - as above


_stores: dict[bytes, Any] = {}
_groups: dict[int, Any] = {}
_handles = count(1)


def _tell(line: str) -> None:
    if LOG in os.environ:
        with Path(os.environ[LOG]).open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")


class HCCLLibrary:
    def __init__(self, so_file: str | None = None) -> None:
        if MISSING in os.environ:
            raise OSError("libhccl.so: cannot open shared object file: No such file or directory")

    def hcclGetUniqueId(self) -> hcclUniqueId:  # noqa: N802 - as above
        store = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        found = hcclUniqueId()
        name = f"127.0.0.1:{store.port}".encode()
        ctypes.memmove(ctypes.byref(found), name, len(name))
        _stores[bytes(found)] = store
        return found

    def hcclCommInitRank(self, world_size: int, unique_id: hcclUniqueId, rank: int) -> hcclComm_t:  # noqa: N802 - as above
        host, _, port = bytes(unique_id).rstrip(b"\0").decode("ascii", "replace").rpartition(":")
        if not (host and port.isdigit()):
            raise RuntimeError("HCCL error: parameter error")
        store = _stores.pop(bytes(unique_id), None) if rank == 0 else None
        if store is None:
            store = dist.TCPStore(host, int(port), None, False, LONG)
        group = dist.ProcessGroupGloo(store, rank, world_size, LONG)
        handle = next(_handles)  # ranks of one process join at the same time
        _groups[handle] = (group, store)
        _tell(f"init {os.getpid()} {rank}")
        return hcclComm_t(handle)

    def hcclBroadcast(  # noqa: N802 - as above
        self,
        buf: buffer_type,
        count: int,
        datatype: int,
        root: int,
        comm: hcclComm_t,
        stream: aclrtStream_t,
    ) -> None:
        assert datatype == hcclDataTypeEnum.hcclUint8
        assert buf.value is not None
        memory = (ctypes.c_uint8 * count).from_address(buf.value)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        group = _groups[comm.value or 0][0]
        try:
            group.broadcast([torch.frombuffer(memory, dtype=torch.uint8)], options).wait()
        except RuntimeError as error:
            raise RuntimeError("HCCL error: remote error") from error

    def hcclCommDestroy(self, comm: hcclComm_t) -> None:  # noqa: N802 - as above
        _groups[comm.value or 0] = None
        _tell(f"destroy {os.getpid()}")
