"""What backend ipc relies on in torch_npu: how a tensor is described for another process, and what its C++ side takes.

Source of all: the files named in each row, of github:Ascend/pytorch, master of 2026-08-21, commit 9e73e708ab; the
branches v2.9.0, v2.10.0, v2.11.0 and v2.12.0 have them alike. devtools/check_ascend.py compares a checkout with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from devtools.ascend_rules import Rule
from rollfleet_protocol.ipc import ARGUMENTS, COUNTERS, HANDLE_BYTES

REDUCTIONS = "torch_npu/multiprocessing/reductions.py"
SHARING = "torch_npu/csrc/ipc/StorageSharing.cpp"
ALLOCATOR = "torch_npu/csrc/core/npu/NPUCachingAllocator"

RULES = (
    Rule(REDUCTIONS, "rebuild_npu_tensor", "opens a handle", arguments=ARGUMENTS),
    Rule(
        REDUCTIONS,
        "_npu_reduce_tensor",
        "describes a tensor, in this order",
        arguments=("tensor",),
        holds=(
            "return (rebuild_npu_tensor, (type(tensor), tensor.size(), tensor.stride(), tensor_offset, type(storage), "
            "tensor.dtype, device, handle, storage_size_bytes, storage_offset_bytes, tensor.requires_grad, "
            "ref_counter_handle, ref_counter_offset, event_handle, event_sync_required))",
        ),
    ),
    Rule(
        REDUCTIONS,
        "_add_reductions_methods",
        "torch's reduce_tensor is torch_npu's once that is imported",
        arguments=(),
        holds=("torch.multiprocessing.reductions.reduce_tensor = _npu_reduce_tensor",),
    ),
)


@dataclass(frozen=True)
class Text:
    """Something that a file of C++ says; blanks do not count."""

    file: str
    says: str
    why: str


TEXTS = (
    Text(f"{ALLOCATOR}.h", f"constexpr size_t kAclIpcHandleSize = {HANDLE_BYTES};", "bytes of an allocation's key"),
    Text(f"{ALLOCATOR}.cpp", "static char SHAREABLE_HANDLE_VERSION = 1;", "first byte of a handle"),
    Text(f"{ALLOCATOR}.cpp", "SHAREABLE_NPU_MALLOC = 'c'", "second byte: a whole block"),
    Text(f"{ALLOCATOR}.cpp", "SHAREABLE_NPU_EXPANDABLE_SEGMENT = 'e'", "second byte of what is refused"),
    Text(
        "torch_npu/csrc/ipc/NPUIPCTypes.h",
        f"inline constexpr int64_t NPU_IPC_REF_COUNTER_FILE_SIZE = {COUNTERS};",
        "counters of a file",
    ),
    Text(
        "torch_npu/csrc/ipc/NPUIPCTypes.cpp",
        "std::string ref_counter_handle = at::NewProcessWideShmHandle();",
        "how a counter file is called",
    ),
    Text(
        SHARING,
        "reinterpret_cast<const char*>(&ipc_event_handle), ACL_IPC_EVENT_HANDLE_SIZE",
        "an event's handle has CANN's 64 bytes (acl/acl_rt.h)",
    ),
    Text(SHARING, "*(static_cast<int64_t*>(sptr.get()) + ref_counter_offset) -= 1;", "who reads counts down by one"),
)
