"""Headers of safetensors files, read by hand and with bounds: what they say decides which bytes are read later.

Format (safetensors documentation): 8 bytes little-endian length of the header, the header as a JSON object, then the
data. Each entry gives dtype, shape and data_offsets relative to the data; together the entries cover the data without
gap or overlap.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rollfleet_engine.weights.errors import incomplete, invalid

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_NUMBER = 2**63 - 1
MAX_DIMENSIONS = 64  # more than any model's tensor has; the product of millions would never be done
METADATA = "__metadata__"
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's bytes lie in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


def read_header(fd: int, file_name: str) -> tuple[TensorEntry, ...]:
    """The tensors of an open file, in the order of their bytes."""
    size = os.fstat(fd).st_size
    prefix = _read_exactly(fd, LENGTH_BYTES, 0, file_name)
    length = int.from_bytes(prefix, "little")
    if length == 0:
        raise incomplete(f"{file_name}: starts with zeros where the header's length belongs; it is still being written")
    if length > MAX_HEADER_BYTES:
        raise invalid(
            f"{file_name}: is no safetensors file, its header would be {length} bytes (at most {MAX_HEADER_BYTES})"
        )
    if length > size - LENGTH_BYTES:
        raise incomplete(
            f"{file_name}: ends inside its header ({size} bytes, header of {length}); half-written or truncated"
        )
    entries = _parse(_read_exactly(fd, length, LENGTH_BYTES, file_name), LENGTH_BYTES + length, file_name)
    _require_layout(entries, LENGTH_BYTES + length, size, file_name)
    return entries


def _read_exactly(fd: int, length: int, offset: int, file_name: str) -> bytes:
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise incomplete(f"{file_name}: has only {offset} bytes; half-written or truncated")
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def load_json_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no name appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise invalid(f"{what}: {name!r} appears twice")
            found[name] = value
        return found

    try:
        document = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what}: is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise invalid(f"{what}: is not a JSON object")
    return document


def _parse(raw: bytes, data_start: int, file_name: str) -> tuple[TensorEntry, ...]:
    document = load_json_object(raw, f"{file_name}: header")
    entries = [_entry(name, value, data_start, file_name) for name, value in document.items() if name != METADATA]
    if not entries:
        raise invalid(f"{file_name}: holds no tensor")
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)))


def _entry(name: str, value: object, data_start: int, file_name: str) -> TensorEntry:
    where = f"{file_name}: tensor {name}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise invalid(f"{where}: has no dtype, shape and data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise invalid(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    shape = _numbers(value["shape"], f"{where}: shape")
    if len(shape) > MAX_DIMENSIONS:
        raise invalid(f"{where}: has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are taken")
    offsets = _numbers(value["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(f"{where}: data_offsets {offsets} are not a begin and an end")
    nbytes = offsets[1] - offsets[0]
    if nbytes != prod(shape) * DTYPE_BYTES[dtype]:
        raise invalid(f"{where}: {dtype} {list(shape)} takes {prod(shape) * DTYPE_BYTES[dtype]} bytes, not {nbytes}")
    if nbytes == 0:
        raise invalid(f"{where}: is empty, so nothing could tell whether it was loaded")
    return TensorEntry(name, dtype, shape, data_start + offsets[0], nbytes)


def _numbers(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_NUMBER for item in value):
        raise invalid(f"{what}: {value!r} is not a list of non-negative integers")
    return tuple(value)


def _require_layout(entries: tuple[TensorEntry, ...], data_start: int, size: int, file_name: str) -> None:
    end = data_start
    for entry in entries:
        if entry.offset != end:
            problem = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise invalid(f"{file_name}: tensor {entry.name}: {problem}")
        end = entry.offset + entry.nbytes
    if size < end:
        cut = next(entry.name for entry in entries if entry.offset + entry.nbytes > size)
        raise incomplete(f"{file_name}: has {size} of {end} bytes, tensor {cut} is cut off; half-written or truncated")
    if size > end:
        raise invalid(f"{file_name}: has {size - end} bytes after its last tensor")
