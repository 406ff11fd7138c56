"""Manifests come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_protocol.manifest import (
    FORMAT,
    FileRecord,
    Manifest,
    ManifestError,
    ShardRecord,
    TensorRecord,
    TornManifestError,
    UnknownManifestError,
    decode,
    encode,
)

SHARD = "model-00001.safetensors"
WHOLE = Manifest(
    step="7",
    digest=f"sha256:{'0' * 64}",
    created_ns=1,
    nbytes=8,
    shards={SHARD: ShardRecord(size=100, header_sha256="1" * 64)},
    files={"config.json": FileRecord(size=2, sha256="2" * 64)},
    tensors={"w": TensorRecord("F32", (2,), "3" * 32, SHARD)},
    tied={"head": "w"},
)
NAMES = st.text(min_size=1, max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=8,
)


def sealed(*lines: Any) -> bytes:
    """Whole, whatever it says."""
    raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    told = json.dumps({"sha256": hashlib.sha256(raw).hexdigest()}, separators=(",", ":"))
    return raw + told.encode() + b"\n"


@given(names=st.sets(NAMES, min_size=1, max_size=5), shape=st.lists(st.integers(1, 2**40), max_size=4), step=st.text())
def test_it_comes_back_as_it_was(names: set[str], shape: list[int], step: str) -> None:
    tensors = {name: TensorRecord("BF16", tuple(shape), "a" * 32, SHARD) for name in names}
    manifest = replace(WHOLE, tensors=tensors, step=step)
    assert decode(encode(manifest)) == manifest


@given(st.binary(max_size=300))
def test_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(TornManifestError):
        decode(raw)


@given(st.integers(0, len(encode(WHOLE)) - 1), st.integers(1, 255))
def test_a_manifest_with_another_byte_is_none(place: int, change: int) -> None:
    raw = bytearray(encode(WHOLE))
    raw[place] ^= change
    with pytest.raises(TornManifestError):
        decode(bytes(raw))


@given(st.integers(0, len(encode(WHOLE)) - 1))
def test_a_manifest_that_is_cut_off_is_none(length: int) -> None:
    raw = encode(WHOLE)
    for torn in (raw[:length], raw[:length] + bytes(len(raw) - length), raw + raw[:length] + b"x"):
        with pytest.raises(TornManifestError):
            decode(torn)


@given(st.lists(JSON, max_size=4))
def test_json_is_no_manifest(lines: list[Any]) -> None:
    with pytest.raises(ManifestError):
        decode(sealed(*lines))


HEAD, TENSOR, _ = (json.loads(line) for line in encode(WHOLE).splitlines())


@pytest.mark.parametrize(
    ("head", "rows", "words"),
    [
        ({"format": FORMAT + 1}, [TENSOR], f"has format {FORMAT + 1}, this reader knows {FORMAT}"),
        ({"format": 1}, [TENSOR], "has format 1, this reader knows 2"),  # its lanes are of another digest
        ({"shards": {}}, [TENSOR], "shards: "),
        ({"shards": {"../x": HEAD["shards"][SHARD]}}, [TENSOR], "shards"),
        ({"files": {"a/b": HEAD["files"]["config.json"]}}, [TENSOR], "pattern|files"),
        ({"digest": "sha256:"}, [TENSOR], "digest: "),
        ({}, [], "names no tensor"),
        ({}, [TENSOR, TENSOR], "tensor 'w' cannot be as it is told"),
        ({}, [[*TENSOR[:3], "xyz", SHARD]], "cannot be as it is told"),
        ({}, [[*TENSOR[:4], "other"]], "cannot be as it is told"),
        ({}, [TENSOR[:4]], "ValueError"),
        ({}, [["w", "F32", ["x"], *TENSOR[3:]]], "ValueError"),
    ],
)
def test_what_a_reader_of_this_format_does_not_know(head: dict[str, Any], rows: list[Any], words: str) -> None:
    with pytest.raises(UnknownManifestError, match=words):
        decode(sealed(HEAD | head, *rows))
