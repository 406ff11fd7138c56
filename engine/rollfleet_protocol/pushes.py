"""What vLLM's four native transfer routes, and one of ours, carry for our backends, as trainers send and workers read.

The words are vLLM's own (distributed/weight_transfer, 0.27.1: snake_case, torch's names of dtypes), so that its
trainers can speak to these backends. Everything is JSON; nothing here is ever unpickled.
"""

import re
from base64 import b64decode
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

DTYPES = {  # torch's name -> safetensors' name, bytes
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
MOST_TENSORS = 200_000  # of one call; its body ends before that with names of usual length
MOST_DIMENSIONS = 64
MOST_BYTES = 1 << 48  # of one tensor
PACKED_BUFFER_BYTES = 64 << 20  # on both sides; two of them are in use at once
PACKED_BUFFERS = 2
SMALLEST_BUFFER, LARGEST_BUFFER = 4 << 10, 4 << 30
SHM_FOLDER = "/dev/shm"  # noqa: S108 - where Linux keeps POSIX shared memory
SHM_NAME = re.compile(r"rollfleet-[0-9a-f]{32}")
TRAINER_ERROR_KEY = "rollfleet/trainer-error"  # in the group's store: why the trainer broke off
LONGEST_WORDS = 1000
HCCL_ID_BYTES = 4108  # of hcclUniqueId (vllm_ascend/distributed/device_communicators/pyhccl_wrapper.py)
LONGEST_PICKLE = 12 << 20  # characters, of what vLLM's HTTP client makes of its handles
MOST_NPUS = 4096  # that one tensor or buffer has handles for: all NPUs that a trainer's ranks are on
HOLDER_HEADER = "X-Rollfleet-Holder"  # of each native call: holderIdentity of the sender's Lease, as Push names it
MOST_SETTINGS = 32  # of an update call, beside the tensors

BufferBytes = Annotated[int, Field(ge=SMALLEST_BUFFER, le=LARGEST_BUFFER, multiple_of=8)]
Group = Annotated[str, Field(max_length=256)]


# What a trainer may send is bounded in errors too: pydantic would make an object of each, and they are larger than what
# they are about. So lists stop at their first one, and unknown fields are one error together.
TensorName = Annotated[str, Field(min_length=1, max_length=512)]
DtypeName = Annotated[str, Field(max_length=32)]
Shape = Annotated[list[Annotated[int, Field(ge=1, le=MOST_BYTES)]], Field(max_length=MOST_DIMENSIONS), FailFast()]


# Named, because FailFast cannot be hashed and typing hashes what stands beside a None.
ByteCounts = TypeAliasType(
    "ByteCounts",
    Annotated[
        list[Annotated[int, Field(strict=True, ge=1, le=MOST_BYTES)]], Field(max_length=MOST_TENSORS), FailFast()
    ],
)


def few_npus(handles: object) -> object:
    """Before anything in it is looked at: pydantic counts a dictionary after it has made an error for each value."""
    if isinstance(handles, dict) and len(handles) > MOST_NPUS:
        raise ValueError(f"handles for {len(handles)} NPUs, at most {MOST_NPUS}")
    return handles


HandlesByNpu = Annotated[dict[str, object], BeforeValidator(few_npus)]
ManyHandles = TypeAliasType("ManyHandles", Annotated[list[HandlesByNpu], Field(max_length=MOST_TENSORS), FailFast()])


class Native(BaseModel):
    """Unknown fields are refused: a setting that one side does not know would make both disagree about the bytes."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="after")
    def _other_fields(self) -> Self:
        if self.model_extra:
            raise ValueError(f"unknown fields: {_some(self.model_extra)}")
        return self


def _some(names: Collection[str]) -> str:
    shown = ", ".join(name[:64] for name, _ in zip(names, range(5), strict=False))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hccl_id(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("is not base64 in a string")  # noqa: TRY004 - pydantic's validators raise ValueError
    try:
        found = b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"is not base64: {error}") from error
    if len(found) != HCCL_ID_BYTES:
        raise ValueError(f"has {len(found)} bytes, an id of HCCL's has {HCCL_ID_BYTES}")
    return found


@dataclass(frozen=True)
class TensorMeta:
    """A tensor that is sent."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    nbytes: int


class TensorList(Native):
    """Which tensors come, in their order. Three lists of one length, as vLLM sends them."""

    names: Annotated[list[TensorName], Field(min_length=1, max_length=MOST_TENSORS), FailFast()]
    dtype_names: Annotated[list[DtypeName], Field(max_length=MOST_TENSORS), FailFast()]
    shapes: Annotated[list[Shape], Field(max_length=MOST_TENSORS), FailFast()]
    # vLLM 0.23 says of every update whether it is of whole tensors (weight_transfer/base.py); only those are taken.
    update_kind: Literal["dense"] = "dense"
    num_updates_list: None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        lengths = {"names": len(self.names), "dtype_names": len(self.dtype_names), "shapes": len(self.shapes)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"names, dtype_names and shapes must have one length, these have {lengths}")
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            if dtype not in DTYPES:
                raise ValueError(f"tensor {name}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
            nbytes = prod(shape) * DTYPES[dtype][1]
            if nbytes > MOST_BYTES:
                raise ValueError(f"tensor {name}: {dtype} {shape} is too large: {nbytes} bytes, at most {MOST_BYTES}")
        return self

    def tensors(self) -> Iterator[TensorMeta]:
        """One by one."""
        for name, dtype_name, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype, size = DTYPES[dtype_name]
            yield TensorMeta(name, dtype, tuple(shape), prod(shape) * size)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors())


class GroupInit(Native):
    """init_weight_transfer_engine of a backend whose ranks form a group with the trainer, rank 0."""

    rank_offset: Annotated[int, Field(ge=1)]  # rank of the engine's first worker
    world_size: Annotated[int, Field(ge=2)]  # trainer and all workers of all engines
    group: Group = ""  # the group epoch: a repeated init of the same one keeps the communicator; empty: never the same


class GlooInit(GroupInit):
    """Of backend gloo: where the trainer keeps the group's store."""

    master_address: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: Annotated[int, Field(ge=1, le=65535)]


class GlooUpdate(TensorList):
    """update_weights of backend gloo: the tensors' bytes follow each other in one stream of equal buffers."""

    packed_buffer_size_bytes: BufferBytes = PACKED_BUFFER_BYTES


class HcclInit(GroupInit):
    """Of backend hccl: the group's id, as HCCL made it in the trainer's process, in base64."""

    hccl_id: Annotated[bytes, BeforeValidator(_hccl_id)]

    @model_validator(mode="before")
    @classmethod
    def _no_rendezvous(cls, info: object) -> object:
        """Of vLLM-Ascend's own: workers would unpickle what comes over a port that knows no identity."""
        if isinstance(info, dict) and not info.keys().isdisjoint(("master_address", "master_port")):
            raise ValueError(
                "master_address and master_port are vLLM-Ascend's own rendezvous, which unpickles what comes over a "
                "port without authentication: send by rollfleet_trainer.hccl.HcclSender, which gives the group's id "
                "as hccl_id"
            )
        return info


class HcclUpdate(TensorList):
    """update_weights of backend hccl: whole tensors follow each other in buffers, as vLLM-Ascend packs them.

    A buffer is closed by the tensor that makes it larger than packed_buffer_size_bytes.
    """

    packed: Literal[True] = True
    packed_buffer_size_bytes: BufferBytes = PACKED_BUFFER_BYTES
    packed_num_buffers: Annotated[int, Field(ge=1, le=8)] = PACKED_BUFFERS


class ShmInit(Native):
    """init_weight_transfer_engine of backend shm: nothing to agree upon but what both may call the group."""

    group: Group = ""
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2)] = 2


class ShmUpdate(TensorList):
    """update_weights of backend shm: whole tensors, one after the other, in a file of the node's shared memory.

    When the call is answered the workers have read them, and the trainer may write the next ones there.
    """

    file: Annotated[str, Field(pattern=f"^{SHM_NAME.pattern}$")]  # in SHM_FOLDER
    offset: Annotated[int, Field(ge=0, le=MOST_BYTES)] = 0  # of the first tensor


class InitCall(Native):
    """Body of POST /init_weight_transfer_engine."""

    init_info: dict[str, object]


class StartCall(Native):
    """Body of POST /start_weight_update: empty, absent or {}; `tensors` are ours.

    Those that come first, or, where `whole` is true, all that come: what does not fit the model is refused while the
    engine still holds what it held.
    """

    tensors: TensorList | None = None
    whole: bool = False


class UpdateInfo(TensorList):
    """An update of any backend, which reads what it needs beside the tensors: plain values, by name.

    Only backend ipc has more to say than a few plain values; it looks into these three itself.
    """

    ipc_handles: HandlesByNpu | ManyHandles | None = None
    ipc_handles_pickled: Annotated[str, Field(max_length=LONGEST_PICKLE)] | None = None
    tensor_sizes: ByteCounts | None = None

    @model_validator(mode="after")
    def _other_fields(self) -> Self:
        settings = self.model_extra or {}
        if len(settings) > MOST_SETTINGS:
            raise ValueError(f"{len(settings)} fields beside the tensors, at most {MOST_SETTINGS}: {_some(settings)}")
        for name, value in settings.items():
            short = len(value) <= LONGEST_WORDS if isinstance(value, str) else isinstance(value, int | float)
            if not (short or value is None):
                raise ValueError(f"{name[:64]}: is not a number, a truth value, or a text of up to {LONGEST_WORDS}")
        return self


class UpdateCall(Native):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


class FinishCall(Native):
    """Body of POST /finish_weight_update. `digest` is ours: the version digest of what the trainer has sent."""

    weight_version: Annotated[str | None, Field(max_length=64)] = None
    digest: Annotated[str | None, Field(min_length=1, max_length=128)] = None


class AbortCall(Native):
    """Body of POST /abort_weight_update, which is ours: the trainer breaks off, in its own words."""

    reason: Annotated[str, Field(min_length=1, max_length=LONGEST_WORDS)]


def pieces(sizes: Iterable[int], buffer_bytes: int) -> Iterator[int]:
    """Bytes of each buffer of a packed stream: all full but the last. Both sides count by this."""
    left = sum(sizes)
    while left > 0:
        yield min(buffer_bytes, left)
        left -= buffer_bytes
