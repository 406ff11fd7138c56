"""Tensors of torch or numpy as raw bytes on the host, a piece at a time. Does not import torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollfleet_protocol.pushes import DTYPES, MOST_DIMENSIONS

PIECE_BYTES = 16 << 20  # of host memory that a tensor on a device takes at once; a multiple of the digest's word
MOST_NAME = 512  # characters of a tensor's name, as in a push
# What wrappers of torch put into names; the engines know the model's own.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

Bytes = npt.NDArray[np.uint8]


class TensorError(ValueError):
    """This is no tensor that can be stored; the message names it and the cure."""


@dataclass(frozen=True)
class HostTensor:
    """A tensor whose bytes can be asked for once or more often."""

    dtype: str  # as safetensors spells it
    item_bytes: int
    shape: tuple[int, ...]
    nbytes: int
    place: Hashable  # equal for two tensors that live at the same time: they are the same memory
    tensor: Any

    def pieces(self) -> Iterator[Bytes]:
        """Row by row, each PIECE_BYTES long but the last. A piece is valid until the next one is asked for."""
        flat = _flat_torch(self.tensor) if is_torch(self.tensor) else _flat_numpy(self.tensor)
        for start in range(0, self.nbytes, PIECE_BYTES):
            piece: Any = flat[start : start + PIECE_BYTES]
            yield piece.to("cpu").numpy() if is_torch(piece) else piece


def host_tensor(name: str, tensor: Any) -> HostTensor:
    """What is known of it without copying anything. Raises TensorError."""
    if not (is_torch(tensor) or isinstance(tensor, np.ndarray)):
        raise TensorError(f"tensor {name}: is of type {type(tensor).__name__}, neither torch's nor numpy's")
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise TensorError(f"tensor {name}: dtype {word} cannot be stored: {', '.join(DTYPES)} can")
    dtype, item_bytes = DTYPES[word]
    shape = tuple(int(size) for size in tensor.shape)
    nbytes = item_bytes
    for size in shape:
        nbytes *= size
    if nbytes == 0:
        raise TensorError(f"tensor {name}: is empty {list(shape)}, so nothing could tell whether it was loaded")
    if len(shape) > MOST_DIMENSIONS:
        raise TensorError(f"tensor {name}: has {len(shape)} dimensions, at most {MOST_DIMENSIONS} are taken")
    place = _torch_place(name, tensor) if is_torch(tensor) else _numpy_place(tensor)
    return HostTensor(dtype, item_bytes, shape, nbytes, (*place, dtype, shape), tensor)


def is_torch(tensor: Any) -> bool:
    """Whether it is a tensor of torch."""
    return hasattr(tensor, "detach") and hasattr(tensor, "untyped_storage")


def _torch_place(name: str, tensor: Any) -> tuple[Hashable, ...]:
    if hasattr(tensor, "full_tensor"):  # torch.distributed.tensor.DTensor
        raise TensorError(f"tensor {name}: is spread over ranks (DTensor): give tensor.full_tensor(), on all ranks")
    if str(tensor.layout) != "torch.strided":
        raise TensorError(f"tensor {name}: has layout {tensor.layout}, only dense tensors are stored")
    if tensor.device.type == "meta":
        raise TensorError(f"tensor {name}: is on device meta and has no bytes")
    stride = tuple(int(step) for step in tensor.stride())
    conjugated = bool(tensor.is_conj()), bool(tensor.is_neg())
    return str(tensor.device), int(tensor.data_ptr()), stride, conjugated


def _numpy_place(array: npt.NDArray[Any]) -> tuple[Hashable, ...]:
    return "numpy", array.__array_interface__["data"][0], array.strides


def _flat_torch(tensor: Any) -> Any:
    import torch  # noqa: PLC0415 - whoever has a tensor has torch; nobody else should need it

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _flat_numpy(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
