"""Routed experts of an answer, as vLLM encodes them: base64 of a .npy file (vllm/utils/serial_utils.py, 0.32)."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Literal

import numpy as np

from rollfleet_trainer.rollout_errors import RoutedExpertsError
from rollfleet_trainer.samples import Experts

# A .npy file (numpy.lib.format, versions 1 to 3) of integers. numpy's own reader evaluates the header as Python, and
# makes room for what it says before it looks whether that is there.
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<>|][iu][1248])', 'fortran_order': (False|True), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), *\} *\n?"
)


def decode_routed_experts(encoded: str, tokens: int) -> Experts:
    """(tokens - 1, layers, experts per token): the last token sampled has been through no layer yet.

    `tokens`: of prompt and output. Nothing is unpickled or evaluated. Raises RoutedExpertsError for anything but such
    an array of integers, none below 0.
    """
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutedExpertsError(f"routed_experts: cannot be decoded: {error}") from error
    dtype, order, shape, start = _header(raw)
    if shape[0] != tokens - 1:
        raise RoutedExpertsError(f"routed_experts: has {shape[0]} rows, {tokens} tokens have {tokens - 1}")
    count = shape[0] * shape[1] * shape[2]
    if len(raw) - start != count * dtype.itemsize:
        told = f"{len(raw) - start} bytes follow its header, {dtype} {list(shape)} has {count * dtype.itemsize}"
        raise RoutedExpertsError(f"routed_experts: {told}")
    array: Experts = np.frombuffer(raw, dtype, count, start).reshape(shape, order=order).astype(dtype.newbyteorder("="))
    if array.size and int(array.min()) < 0:
        raise RoutedExpertsError(f"routed_experts: names expert {int(array.min())}")
    return array


def _header(raw: bytes) -> tuple[np.dtype[Any], Literal["C", "F"], tuple[int, int, int], int]:
    """dtype, order of the elements, shape, and where the data begins."""
    long = raw[6:7] in (b"\x02", b"\x03")
    start = (12 if long else 10) + int.from_bytes(raw[8 : 12 if long else 10], "little")
    found = _HEADER.fullmatch(raw[12 if long else 10 : start]) if start <= len(raw) else None
    if raw[:6] != _MAGIC or found is None:
        what = raw[:96].decode("ascii", "replace")
        raise RoutedExpertsError(f"routed_experts: is no .npy file of integers in 3 dimensions: {what!r}")
    rows, layers, experts = (int(each) for each in found.groups()[2:])
    return np.dtype(found[1].decode()), "F" if found[2] == b"True" else "C", (rows, layers, experts), start
