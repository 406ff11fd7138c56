"""Handles of NPU memory as plain JSON: what a trainer says of its tensors, and what an engine believes of it.

torch_npu describes a tensor for another process by fifteen values (torch_npu/multiprocessing/reductions.py,
_npu_reduce_tensor, the same in 2.9 to 2.12): numbers, names and opaque bytes. vLLM-Ascend carries them in Python's
pickle where its transport is HTTP; here they are a JSON object, with bytes in base64.

torch_npu checks little of them (csrc/ipc/StorageSharing.cpp): it adds an offset to a pointer, counts down at an index
into a shared file, and reads 64 bytes of an event's handle whatever its length. So every value is bounded here before
it gets there. What nobody can check from outside is whether an allocation is as large as its handle says.
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from re import compile as pattern
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from rollfleet_protocol.pushes import (
    DTYPES,
    LONGEST_PICKLE,
    MOST_BYTES,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    ByteCounts,
    DtypeName,
    Group,
    Native,
    TensorList,
    few_npus,
)

# In the order of torch_npu's tuple; the three that are left out are always the same here: a plain tensor of a typed
# storage, without gradient.
ARGUMENTS = (
    *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
    *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
    *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
)
LEFT_OUT = frozenset({"tensor_cls", "storage_cls", "requires_grad"})
HANDLE_BYTES = 65  # kAclIpcHandleSize, torch_npu/csrc/core/npu/NPUCachingAllocator.h
WHOLE_BLOCK = b"\x01c"  # before it: version, and SHAREABLE_NPU_MALLOC (NPUCachingAllocator.cpp)
EXPANDABLE = b"\x01e"  # SHAREABLE_NPU_EXPANDABLE_SEGMENT: process ids and descriptors follow
EVENT_BYTES = 64  # ACL_IPC_EVENT_HANDLE_SIZE, CANN's acl/acl_rt.h
COUNTERS = 10_000  # NPU_IPC_REF_COUNTER_FILE_SIZE, torch_npu/csrc/ipc/NPUIPCTypes.h: 8 bytes each
COUNTER_FILE = pattern(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")  # ATen's NewProcessWideShmHandle

_Count = Annotated[int, Field(strict=True, ge=0, le=MOST_BYTES)]
_Sizes = Annotated[
    list[Annotated[int, Field(strict=True, ge=1, le=MOST_BYTES)]], Field(max_length=MOST_DIMENSIONS), FailFast()
]
_Base64 = Annotated[str, Field(max_length=128)]
NpuName = Annotated[str, Field(min_length=1, max_length=128)]  # vLLM-Ascend's npu_generate_uuid: address-chip


class IpcHandle(Native):
    """One tensor in the memory of another process's NPU. Nothing of it has been opened."""

    tensor_size: _Sizes
    tensor_stride: _Sizes  # elements
    tensor_offset: _Count  # elements, from the storage's start
    dtype: DtypeName
    storage_device: Annotated[int, Field(strict=True, ge=0, le=1023)]  # the trainer's own index; the engine has another
    storage_handle: _Base64
    storage_size_bytes: Annotated[int, Field(strict=True, ge=1, le=MOST_BYTES)]
    storage_offset_bytes: _Count  # of the storage in the allocation that the handle names
    ref_counter_handle: _Base64  # name of a file in shared memory: who lets go counts down there
    ref_counter_offset: Annotated[int, Field(strict=True, ge=0, lt=COUNTERS)]
    event_handle: _Base64  # the engine waits for it before it reads
    event_sync_required: Annotated[bool, Field(strict=True)]

    @model_validator(mode="after")
    def _believable(self) -> Self:
        _require_block(_decoded("storage_handle", self.storage_handle))
        if len(_decoded("event_handle", self.event_handle)) != EVENT_BYTES:
            raise ValueError(f"event_handle: must be {EVENT_BYTES} bytes")
        if not COUNTER_FILE.fullmatch(_decoded("ref_counter_handle", self.ref_counter_handle)):
            raise ValueError("ref_counter_handle: is not the name of a counter file of torch's")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        self._require_rows()
        if self.end > self.storage_size_bytes:
            raise ValueError(f"the tensor ends at byte {self.end}, its storage at {self.storage_size_bytes}")
        return self

    def _require_rows(self) -> None:
        """Row by row without gaps, as vLLM-Ascend sends it: then its bytes are one range."""
        expected = 1
        if len(self.tensor_size) != len(self.tensor_stride):
            raise ValueError("tensor_size and tensor_stride must have one length")
        for size, stride in zip(reversed(self.tensor_size), reversed(self.tensor_stride), strict=True):
            if size > 1 and stride != expected:  # torch says anything of a dimension of one
                raise ValueError(f"tensor_stride {self.tensor_stride} is not that of rows of {self.tensor_size}")
            expected *= size

    @property
    def start(self) -> int:
        """Its first byte in the storage."""
        return self.tensor_offset * DTYPES[self.dtype][1]

    @property
    def end(self) -> int:
        """The first byte in the storage that is not its."""
        return self.start + prod(self.tensor_size) * DTYPES[self.dtype][1]

    def raw(self, field: str) -> bytes:
        """One of the fields that are bytes, decoded."""
        return _decoded(field, getattr(self, field))


def _require_block(handle: bytes) -> None:
    if len(handle) == HANDLE_BYTES:
        return
    if handle.startswith(EXPANDABLE):
        cure = "take expandable_segments out of the trainer's PYTORCH_NPU_ALLOC_CONF"
        raise ValueError(f"storage_handle: is of an expandable segment: {cure}")
    if not (handle.startswith(WHOLE_BLOCK) and len(handle) == HANDLE_BYTES + len(WHOLE_BLOCK)):
        raise ValueError(f"storage_handle: {len(handle)} bytes that are no handle of torch_npu's")


def _decoded(field: str, text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError) as error:
        raise ValueError(f"{field}: is not base64") from error


def encoded(arguments: Sequence[object]) -> dict[str, Any]:
    """What torch_npu's reduce_tensor gave beside its function, as an IpcHandle takes it. Needs no torch.

    ValueError where it is something else, or cannot be sent.
    """
    if len(arguments) != len(ARGUMENTS):
        message = f"{len(arguments)} values describe the tensor, torch_npu's reduce_tensor gives {len(ARGUMENTS)}"
        raise ValueError(f"{message}: it lies on no NPU, or torch_npu has changed")
    found = {name: _plain(name, value) for name, value in zip(ARGUMENTS, arguments, strict=True)}
    return {name: value for name, value in found.items() if name not in LEFT_OUT}


def _plain(name: str, value: object) -> Any:
    if name in LEFT_OUT:
        return None
    if name == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, tuple | list):
        return [int(each) for each in value]
    if isinstance(value, bool | int):
        return value
    raise ValueError(f"{name} is {type(value).__name__}: it has no memory on an NPU")


def plain_handles(handles: object) -> dict[str, Any] | list[dict[str, Any]]:
    """vLLM's ipc_handles (of a buffer: NPU -> description; or a list of these) as JSON. What is JSON stays as it is.

    ValueError as `encoded`.
    """
    if isinstance(handles, list):
        return [_by_npu(each) for each in handles]
    return _by_npu(handles)


def _by_npu(handles: object) -> dict[str, Any]:
    if not isinstance(handles, Mapping):
        message = f"ipc_handles: {type(handles).__name__} where a dictionary by NPU must be"
        raise ValueError(message)  # noqa: TRY004 - data of others
    return {str(npu): _described(npu, each) for npu, each in handles.items()}


def _described(npu: object, handle: object) -> Any:
    if isinstance(handle, tuple | list):
        return encoded(handle)
    if not isinstance(handle, Mapping):
        raise ValueError(f"the handle for NPU {npu} is {type(handle).__name__}")  # noqa: TRY004 - data of others
    return handle


class IpcInit(Native):
    """init_weight_transfer_engine of backend ipc: how handles will be told, and what both may call the group."""

    packed: bool = False  # vLLM-Ascend's word: one handle of a buffer, or one of each tensor
    group: Group = ""
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)] = 2


_ByNpu = Annotated[dict[NpuName, IpcHandle], Field(min_length=1), BeforeValidator(few_npus)]


_OfEach = TypeAliasType("_OfEach", Annotated[list[_ByNpu], Field(min_length=1, max_length=MOST_TENSORS), FailFast()])


def _kind_of_handles(value: object) -> str:
    return "packed" if isinstance(value, Mapping) else "each"


@dataclass(frozen=True)
class Region:
    """A range of bytes in one allocation, and the sizes of the tensors that follow each other in it."""

    handle: IpcHandle
    start: int  # bytes, in the storage
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(self.sizes)


class IpcUpdate(TensorList):
    """update_weights of backend ipc, in vLLM's words. The handles, by NPU: of a buffer, or of each tensor.

    When the call is answered the workers have copied the tensors, and the trainer may overwrite them.
    """

    ipc_handles: (
        Annotated[
            Annotated[_ByNpu, Tag("packed")] | Annotated[_OfEach, Tag("each")],
            Discriminator(_kind_of_handles),
        ]
        | None
    ) = None
    ipc_handles_pickled: Annotated[str, Field(min_length=1, max_length=LONGEST_PICKLE)] | None = None
    tensor_sizes: ByteCounts | None = None  # of each tensor in the buffer
    packed: bool | None = None  # vLLM 0.23 says it here, and not at the start

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if (self.ipc_handles is None) == (self.ipc_handles_pickled is None):
            raise ValueError("ipc_handles must be there, or ipc_handles_pickled: one of both")
        sizes = [meta.nbytes for meta in self.tensors()]
        if self.tensor_sizes is not None and self.tensor_sizes != sizes:
            raise ValueError("tensor_sizes are not those of dtype_names and shapes")
        if self.ipc_handles is not None and self.packed not in (None, self.of_one_buffer):
            raise ValueError(f"packed: is {str(self.packed).lower()}, and ipc_handles are otherwise")
        if isinstance(self.ipc_handles, dict):
            if self.tensor_sizes is None:
                raise ValueError("tensor_sizes: are missing for one handle of a buffer")
            for npu, handle in self.ipc_handles.items():
                _require_buffer(npu, handle, sum(sizes))
        elif self.ipc_handles is not None:
            if len(self.ipc_handles) != len(self.names):
                raise ValueError(f"{len(self.ipc_handles)} ipc_handles for {len(self.names)} tensors")
            self._require_same_forms(self.ipc_handles)
        return self

    def _require_same_forms(self, handles: Sequence[Mapping[str, IpcHandle]]) -> None:
        for name, dtype, shape, by_npu in zip(self.names, self.dtype_names, self.shapes, handles, strict=True):
            for npu, handle in by_npu.items():
                if (handle.dtype, handle.tensor_size) != (dtype, shape):
                    told = f"{handle.dtype} {handle.tensor_size}"
                    raise ValueError(f"tensor {name}: is {dtype} {shape}, its handle for {npu[:64]} is of {told}")

    @property
    def of_one_buffer(self) -> bool:
        """One handle for all tensors."""
        return isinstance(self.ipc_handles, dict)

    def regions(self, npu: str) -> Iterator[Region]:
        """What to copy on this NPU, in the order of the tensors. ValueError where there is no handle for it."""
        sizes = tuple(meta.nbytes for meta in self.tensors())
        if isinstance(self.ipc_handles, dict):
            handle = _of(self.ipc_handles, npu)
            yield Region(handle, handle.start, sizes)
            return
        for by_npu, size in zip(self.ipc_handles or (), sizes, strict=True):
            handle = _of(by_npu, npu)
            yield Region(handle, handle.start, (size,))


def _require_buffer(npu: str, handle: IpcHandle, needed: int) -> None:
    if handle.dtype != "uint8" or len(handle.tensor_size) != 1:
        raise ValueError(f"the buffer's handle for {npu[:64]} is of {handle.dtype} {handle.tensor_size}, not of bytes")
    if needed > handle.tensor_size[0]:
        raise ValueError(f"the tensors have {needed} bytes, the buffer on {npu[:64]} has {handle.tensor_size[0]}")


def _of(by_npu: Mapping[str, IpcHandle], npu: str) -> IpcHandle:
    if npu not in by_npu:
        there = ", ".join(name for name, _ in zip(sorted(by_npu), range(8), strict=False))
        more = f" and {len(by_npu) - 8} more" if len(by_npu) > 8 else ""
        cure = "a rank of the trainer must be on each NPU of the engine"
        raise ValueError(f"this worker is on NPU {npu}, the trainer's handles are for {there}{more}: {cure}")
    return by_npu[npu]
