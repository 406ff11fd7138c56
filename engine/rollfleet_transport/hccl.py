"""One rank of an HCCL group, over vLLM-Ascend's wrapper of the library, and its packed broadcasts over that rank.

vLLM-Ascend's own PyHcclCommunicator is not used: it takes its id from a StatelessProcessGroup, which unpickles what
comes over a TCPStore that knows no identity; a library that cannot be loaded makes it a communicator that does nothing
and says nothing; and it has no way to be destroyed (device_communicators/pyhccl.py, main of 2026-08-22). Here the id
comes as bytes, over the guard's control port.

Importing this needs vLLM-Ascend, which brings torch_npu and with it torch.npu. Untested on hardware.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from vllm_ascend.distributed.device_communicators.pyhccl_wrapper import (
    HCCLLibrary,
    aclrtStream_t,
    buffer_type,
    hcclDataTypeEnum,
    hcclUniqueId,
)
from vllm_ascend.distributed.weight_transfer.packed_tensor import packed_broadcast_consumer, packed_broadcast_producer

from rollfleet_protocol.pushes import HCCL_ID_BYTES

TRAINER = 0  # its rank
# Of the library and its loader: CDLL raises OSError, find_hccl_library ValueError, a call that failed RuntimeError.
ERRORS = (RuntimeError, OSError, ValueError)


def current_device() -> int:
    """Index of this thread's NPU."""
    return int(torch.npu.current_device())


def finish_device_work() -> None:
    """Wait for what this thread has asked of its device: what it reads may be overwritten then."""
    torch.npu.current_stream().synchronize()


def new_id(device: int) -> bytes:
    """Names a group that does not exist yet. This process must be its rank 0."""
    _require_id_size()
    with torch.npu.device(device):
        return bytes(HCCLLibrary().hcclGetUniqueId())


def _require_id_size() -> None:
    size = ctypes.sizeof(hcclUniqueId)
    if size != HCCL_ID_BYTES:
        raise ValueError(f"this vLLM-Ascend's HCCL ids have {size} bytes, rollfleet knows {HCCL_ID_BYTES}")


class Communicator:
    """A rank that has joined. Blocks until all have; for threads that may be left behind.

    Keeps what vLLM-Ascend's packed functions ask of a group: broadcast(tensor, src). It broadcasts on a stream of its
    own, so that a broadcast that never ends holds up nothing else of the device.
    """

    def __init__(self, hccl_id: bytes, rank: int, world_size: int, device: int) -> None:
        _require_id_size()
        self.device = device
        self._busy_since: float | None = None  # of time.monotonic(): when the broadcast that runs began
        self._library = HCCLLibrary()
        self._lock = threading.Lock()  # held while a broadcast runs: what is in use is not destroyed
        self._joined = False
        with torch.npu.device(device):
            self._comm = self._library.hcclCommInitRank(world_size, hcclUniqueId.from_buffer_copy(hccl_id), rank)
            self._joined = True
            self._stream = torch.npu.Stream()
            try:
                # A group that carries nothing shall fail now, before any weight is touched.
                self.broadcast(torch.zeros(1, dtype=torch.uint8).npu(device), TRAINER)
            except BaseException:
                self.destroy()
                raise

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """A flat tensor of uint8 on this rank's device, from `src` to all. Returns when it is there. RuntimeError."""
        with self._lock, torch.npu.device(self.device):
            if not self._joined:
                raise RuntimeError("this rank has left its group")
            self._stream.wait_stream(torch.npu.current_stream())
            self._busy_since = time.monotonic()
            try:
                self._library.hcclBroadcast(
                    buffer_type(tensor.data_ptr()),
                    tensor.numel(),
                    hcclDataTypeEnum.hcclUint8,
                    src,
                    self._comm,
                    aclrtStream_t(self._stream.npu_stream),
                )
                self._stream.synchronize()
            finally:
                self._busy_since = None

    def busy(self, seconds: float = 0.0) -> bool:
        """Whether a broadcast runs, for longer than this."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= seconds

    def destroy(self) -> None:
        """Give the communicator back, once no broadcast runs. Harmless when repeated."""
        with self._lock:
            if not self._joined:
                return
            self._joined = False
            with torch.npu.device(self.device):
                self._library.hcclCommDestroy(self._comm)


def send_packed(
    group: Communicator, tensors: Iterator[tuple[str, torch.Tensor]], buffer_bytes: int, buffers: int
) -> None:
    """vLLM-Ascend's producer over this group: flat tensors of uint8 on the group's device."""
    with torch.npu.device(group.device):
        packed_broadcast_producer(
            iterator=tensors,
            group=group,
            src=TRAINER,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=buffer_bytes,
            num_buffers=buffers,
        )


def receive_packed(
    group: Communicator,
    sizes: Iterable[tuple[str, int]],
    take: Callable[[list[tuple[str, torch.Tensor]]], None],
    buffer_bytes: int,
    buffers: int,
) -> None:
    """vLLM-Ascend's consumer over this group: of each buffer, `take` gets its tensors as flat ones of uint8.

    Names and bytes as the trainer packs them. As bytes, because a view of another dtype fails where a tensor begins
    between two elements of it, and because bytes are what is digested.
    """
    with torch.npu.device(group.device):
        packed_broadcast_consumer(
            iterator=((name, ([nbytes], torch.uint8)) for name, nbytes in sizes),
            group=group,
            src=TRAINER,
            post_unpack_func=take,
            buffer_size_bytes=buffer_bytes,
            num_buffers=buffers,
        )
