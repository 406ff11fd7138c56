"""Tensors as they are sent: names, forms, raw bytes, and the digest of what was sent. Needs torch, nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollfleet_kernels.digest import DeviceBytes, TensorDigest, lanes, lanes_on_device, version_digest
from rollfleet_protocol.pushes import DTYPES

Bytes = npt.NDArray[np.uint8]


def wire_dtype(tensor: torch.Tensor) -> str:
    """torch's name without its prefix. ValueError where the digest has no word for it."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype {name} cannot be sent: {', '.join(DTYPES)} can")
    return name


def listed(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """names, dtype_names, shapes as update_weights takes them; nothing is gathered or copied."""
    return {
        "names": list(tensors),
        "dtype_names": [wire_dtype(tensor) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes on the host, row by row: a view where it lies there like that already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    found: Bytes = flat.numpy()
    return found


def nbytes(tensor: torch.Tensor) -> int:
    """Of its elements."""
    return int(tensor.numel() * tensor.element_size())


def loads(tensors: Mapping[str, torch.Tensor], buffer_bytes: int) -> Iterator[list[str]]:
    """Names of as many tensors as fit into a buffer at a time; one that is too large comes alone."""
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        if names and filled + nbytes(tensor) > buffer_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += nbytes(tensor)
    if names:
        yield names


@dataclass
class Sent:
    """The digest of what goes out, tensor by tensor; of a version in several parts, over all of them."""

    _tensors: list[TensorDigest] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, raw: Bytes | DeviceBytes) -> None:
        """This was sent, as these bytes on the host or on a device."""
        found = lanes(raw) if isinstance(raw, np.ndarray) else lanes_on_device(raw)
        self._tensors.append(TensorDigest(name, DTYPES[wire_dtype(tensor)][0], tuple(tensor.shape), found))

    def digest(self) -> str:
        """Version digest; EmptyInputError where nothing was sent."""
        return version_digest(self._tensors)
