"""The manifest of a published checkpoint: what its directory holds when it is complete.

The publisher writes it last, under MANIFEST_UNFINISHED until it is on disk: a directory that has a file of that name is
being written, or its writer died. Readers that find MANIFEST hold the directory against it; a directory that has none
was written by somebody else and is judged by its own headers and index.

On disk: lines of JSON. The first one tells of the whole and of its files; then one for each tensor, as
[name, dtype, shape, lanes, shard]; the last one has the SHA-256 of all bytes before it, so that a manifest that is
torn, or was edited, is no manifest. Lines, because a model may have 100,000 tensors, and a guard that reads them in one
go would hold up the requests that it serves meanwhile for half a second.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rollfleet_protocol.base import Answer

MANIFEST = "rollfleet-manifest.jsonl"
MANIFEST_UNFINISHED = f"{MANIFEST}.part"
FORMAT = 2  # raised when a reader of another one would judge a checkpoint wrongly; 1 had another digest of tensors
MAX_MANIFEST_BYTES = 64 << 20  # 100,000 tensors take 16 MB

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(min_length=1, max_length=255, pattern="^[^/\\x00]+$")]
Size = Annotated[int, Field(ge=0)]


class ManifestError(Exception):
    """Base of both: there is a manifest, and it says nothing that a reader could use."""


class TornManifestError(ManifestError):
    """Cut off, empty or changed since it was written."""


class UnknownManifestError(ManifestError):
    """Whole, and of a form that this reader does not know."""


class ShardRecord(Answer):
    """A safetensors file. The bytes of its tensors are under the tensors' lanes."""

    size: Size
    header_sha256: Sha256  # of the 8 bytes of length and the header


class FileRecord(Answer):
    """Any other file: index, config, tokenizer."""

    size: Size
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor, as a line of the version digest tells it (rollfleet_kernels.digest)."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    lanes: str  # two words of 64 bits, in hexadecimal
    shard: str


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint directory."""

    step: str  # the trainer's label
    digest: str  # of the version: "sha256:<hex>"
    created_ns: int  # wall clock of the publisher
    nbytes: int  # of all tensors
    shards: Mapping[str, ShardRecord]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    tied: Mapping[str, str] = field(default_factory=dict)  # names that were left out -> that of the same memory
    format: int = FORMAT


class _Head(Answer):
    """The first line."""

    format: int
    step: str
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    created_ns: int
    nbytes: Size
    shards: Annotated[dict[FileName, ShardRecord], Field(min_length=1)]
    files: dict[FileName, FileRecord]
    tied: dict[str, str]


_LANES = re.compile("[0-9a-f]{32}")


def encode(manifest: Manifest) -> bytes:
    """As it is stored."""
    head = _Head(
        format=manifest.format,
        step=manifest.step,
        digest=manifest.digest,
        created_ns=manifest.created_ns,
        nbytes=manifest.nbytes,
        shards=dict(manifest.shards),
        files=dict(manifest.files),
        tied=dict(manifest.tied),
    )
    rows = ([name, each.dtype, each.shape, each.lanes, each.shard] for name, each in manifest.tensors.items())
    raw = b"".join(_line(document) for document in (head.model_dump(mode="json", by_alias=True), *rows))
    return raw + _line({"sha256": hashlib.sha256(raw).hexdigest()})


def _line(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(raw: bytes) -> Manifest:
    """Inverse of encode. Raises ManifestError."""
    *lines, last, after = raw.split(b"\n") if raw.count(b"\n") > 1 else (b"", b"", b"?")
    told = hashlib.sha256(raw[: len(raw) - len(last) - 1]).hexdigest()
    if after or last + b"\n" != _line({"sha256": told}):
        raise TornManifestError("is cut off or damaged: its last line is not the SHA-256 of those before")
    try:
        head = json.loads(lines[0])
        form = head["format"]
        if form != FORMAT:
            raise UnknownManifestError(f"has format {form!r}, this reader knows {FORMAT}")
        told_head = _Head.model_validate(head)
        tensors = _tensors(lines[1:], told_head)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UnknownManifestError(f"is not of format {FORMAT}: {where}: {first['msg']}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UnknownManifestError(f"is not of format {FORMAT}: {type(error).__name__}: {error}") from error
    return Manifest(
        step=told_head.step,
        digest=told_head.digest,
        created_ns=told_head.created_ns,
        nbytes=told_head.nbytes,
        shards=told_head.shards,
        files=told_head.files,
        tensors=tensors,
        tied=told_head.tied,
    )


def _tensors(lines: Iterable[bytes], head: _Head) -> dict[str, TensorRecord]:
    found: dict[str, TensorRecord] = {}
    for line in lines:
        name, dtype, shape, lanes, shard = json.loads(line)
        if not _LANES.fullmatch(lanes) or shard not in head.shards or name in found:
            raise UnknownManifestError(f"is not of format {FORMAT}: tensor {name!r:.80} cannot be as it is told")
        found[str(name)] = TensorRecord(str(dtype), tuple(map(int, shape)), lanes, shard)
    if not found:
        raise UnknownManifestError("names no tensor")
    return found
