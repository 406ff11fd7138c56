"""Headers of safetensors files, as libraries write them and as no library would."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.headers import MAX_HEADER_BYTES, read_header
from rollfleet_protocol.state import FailureReason

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def file_of(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def failure(path: Path) -> CheckpointError:
    with opened(path) as fd, pytest.raises(CheckpointError) as raised:
        read_header(fd, path.name)
    return raised.value


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(7, dtype=np.int64)}
    save_file(arrays, path, metadata={"format": "pt"})
    with opened(path) as fd:
        entries = read_header(fd, path.name)
        found = {each.name: os.pread(fd, each.nbytes, each.offset) for each in entries}
    assert {each.name: (each.dtype, each.shape) for each in entries} == {"a": ("I64", ()), "b": ("F32", (2, 3))}
    assert found == {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "not JSON"),
        ({}, b"", "holds no tensor"),
        (b'{"a": 1, "a": 2}', b"", "'a' appears twice"),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "tensor a: has no dtype, shape and data_offsets"),
        ({"a": GOOD["a"] | {"dtype": "F31"}}, bytes(8), "tensor a: dtype 'F31'"),
        ({"a": GOOD["a"] | {"dtype": ["F32"]}}, bytes(8), "tensor a: dtype"),
        ({"a": GOOD["a"] | {"shape": [-2]}}, bytes(8), "tensor a: shape"),
        ({"a": GOOD["a"] | {"shape": [2.0]}}, bytes(8), "tensor a: shape"),
        ({"a": GOOD["a"] | {"shape": [True, 2]}}, bytes(8), "tensor a: shape"),
        ({"a": GOOD["a"] | {"shape": [2**64]}}, bytes(8), "tensor a: shape"),
        ({"a": GOOD["a"] | {"shape": [2] + [1] * 64}}, bytes(8), "tensor a: has 65 dimensions"),
        ({"a": GOOD["a"] | {"shape": [2**63 - 1] * 20_000}}, bytes(8), "tensor a: has 20000 dimensions"),
        ({"a": GOOD["a"] | {"shape": [3]}}, bytes(8), "takes 12 bytes, not 8"),
        ({"a": GOOD["a"] | {"data_offsets": [8, 0]}}, bytes(8), "not a begin and an end"),
        ({"a": GOOD["a"] | {"data_offsets": [0]}}, bytes(8), "not a begin and an end"),
        ({"a": GOOD["a"] | {"shape": [0], "data_offsets": [0, 0]}}, b"", "tensor a: is empty"),
        ({"a": GOOD["a"], "b": GOOD["a"]}, bytes(8), "overlaps"),
        ({"a": GOOD["a"], "b": GOOD["a"] | {"data_offsets": [12, 20]}}, bytes(20), "tensor b: leaves a gap"),
        (GOOD, bytes(9), "1 bytes after its last tensor"),
    ],
)
def test_malformed_headers_are_invalid(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    error = failure(file_of(tmp_path / "x.safetensors", header, data))
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert error.message.startswith("x.safetensors")
    assert words in error.message


def test_a_length_beyond_reason_is_no_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(100))
    assert failure(path).reason is FailureReason.CHECKPOINT_INVALID


@given(st.data())
def test_cut_off_anywhere_it_is_incomplete(tmp_path_factory: pytest.TempPathFactory, pick: st.DataObject) -> None:
    path = file_of(tmp_path_factory.mktemp("cut") / "x.safetensors", GOOD)
    whole = path.read_bytes()
    path.write_bytes(whole[: pick.draw(st.integers(0, len(whole) - 1))])
    error = failure(path)
    assert error.reason is FailureReason.CHECKPOINT_INCOMPLETE
    assert "x.safetensors" in error.message


def test_space_that_was_only_reserved_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(4096))
    assert failure(path).reason is FailureReason.CHECKPOINT_INCOMPLETE


@given(st.binary(max_size=300))
def test_any_bytes_give_an_error_or_tensors_within_the_file(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with opened(path) as fd:
        try:
            entries = read_header(fd, path.name)
        except CheckpointError:
            return
    assert all(entry.offset + entry.nbytes <= path.stat().st_size for entry in entries)
