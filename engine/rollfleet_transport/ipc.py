"""Memory of one NPU in two processes, by torch_npu's handles, under the names that vLLM-Ascend gives to NPUs.

vLLM-Ascend's own engine for this, npu_ipc, loads into the model as it is, without vLLM's layer-wise reload, and in
packed mode not at all (vllm_ascend/distributed/weight_transfer/npu_ipc_engine.py at 182b75ea). So its receiving is not
called: torch_npu's one function that opens a handle is, with numbers and bytes that were checked
(rollfleet_protocol.ipc).

Importing this needs vLLM-Ascend and torch_npu. Untested on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions
from torch_npu.multiprocessing.reductions import rebuild_npu_tensor
from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import NPUIPCWeightTransferUpdateInfo, npu_generate_uuid

from rollfleet_protocol.ipc import IpcUpdate, Region, encoded


def npu_name() -> str:
    """Of this thread's physical NPU: the same in every process on it that sees the same address of its host."""
    return str(npu_generate_uuid())


def buffer_of(nbytes: int) -> torch.Tensor:
    """Bytes on this thread's NPU."""
    return torch.empty(0, dtype=torch.uint8).npu().new_empty(nbytes)


def described(buffer: torch.Tensor) -> dict[str, Any]:
    """A handle of it as JSON, for one reader. ValueError where it lies on no NPU.

    torch_npu frees the memory when the tensor is gone and that reader has let go.
    """
    rebuild, arguments = reductions.reduce_tensor(buffer)
    if rebuild is not rebuild_npu_tensor:
        raise ValueError(f"there are handles of NPU memory only, and this buffer lies on {buffer.device}")
    return encoded(arguments)


def place() -> tuple[int, Any]:
    """This thread's NPU and stream, for `copied` in another thread."""
    return int(torch.npu.current_device()), torch.npu.current_stream()


def finish_device_work() -> None:
    """Wait for what this thread has asked of its device."""
    torch.npu.current_stream().synchronize()


def copied(region: Region, device: int, stream: Any) -> torch.Tensor:
    """The region's bytes in memory of this process; nothing of the trainer's is mapped when this returns or raises.

    On the caller's stream, so that memory which is given back there is used again only in order. May hang: for a thread
    that may be left behind. Raises RuntimeError as torch_npu does, with a stack below the first line.
    """
    with torch.npu.device(device), torch.npu.stream(stream):
        mapped = _mapped(region, device)
        try:
            own = mapped.clone()
            stream.synchronize()  # torch_npu unmaps before it waits for the stream (csrc/ipc/StorageSharing.cpp)
        finally:
            del mapped  # a traceback holds this frame, and would hold the mapping
        return own


def _mapped(region: Region, device: int) -> torch.Tensor:
    """As bytes, whatever the trainer's tensor is: of its words only numbers and opaque bytes go on."""
    handle = region.handle
    found: torch.Tensor = rebuild_npu_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=(region.nbytes,),
        tensor_stride=(1,),
        tensor_offset=region.start,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=device,  # ours: the trainer may count the same NPU otherwise
        storage_handle=handle.raw("storage_handle"),
        storage_size_bytes=handle.storage_size_bytes,
        storage_offset_bytes=handle.storage_offset_bytes,
        requires_grad=False,
        ref_counter_handle=handle.raw("ref_counter_handle"),
        ref_counter_offset=handle.ref_counter_offset,
        event_handle=handle.raw("event_handle"),
        event_sync_required=handle.event_sync_required,
    )
    return found


def unpickled(update: IpcUpdate) -> object:
    """The handles of its pickle, as vLLM's class reads it: whoever made it runs what he likes here.

    vLLM refuses without VLLM_ALLOW_INSECURE_SERIALIZATION=1 (ValueError). Raises whatever unpickling raises.
    """
    theirs = NPUIPCWeightTransferUpdateInfo(
        names=update.names,
        dtype_names=update.dtype_names,
        shapes=update.shapes,
        ipc_handles_pickled=update.ipc_handles_pickled,
        tensor_sizes=update.tensor_sizes,
    )
    found: object = theirs.ipc_handles
    return found
