"""The manifest of a published checkpoint: what its directory holds when it is complete.

The publisher writes it last, under MANIFEST_UNFINISHED until it is on disk: a directory that has a file of that name is
being written, or its writer died. Readers that find MANIFEST hold the directory against it; a directory that has none
was written by somebody else and is judged by its own headers and index.

On disk: JSON, {"manifest": {...}, "sha256": hex over the canonical form of it}, so that a manifest that is torn, or was
edited, is no manifest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from rollfleet_protocol.base import Answer

MANIFEST = "rollfleet-manifest.json"
MANIFEST_UNFINISHED = f"{MANIFEST}.part"
FORMAT = 1  # raised when a reader of the older one could take an incomplete checkpoint for a complete one
MAX_MANIFEST_BYTES = 64 << 20  # 200,000 tensors take 40 MiB

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(min_length=1, max_length=255, pattern="^[^/\\x00]+$")]
Size = Annotated[int, Field(ge=0)]


class ManifestError(ValueError):
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


class TensorRecord(Answer):
    """A tensor, as a line of the version digest tells it (rollfleet_kernels.digest)."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    lanes: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # four words of 32 bits
    shard: FileName


class Manifest(Answer):
    """A complete checkpoint directory."""

    format: int = FORMAT
    step: str  # the trainer's label
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]  # of the version
    created_ns: int  # wall clock of the publisher
    nbytes: Size  # of all tensors
    shards: Annotated[dict[FileName, ShardRecord], Field(min_length=1)]
    files: dict[FileName, FileRecord]
    tensors: Annotated[dict[str, TensorRecord], Field(min_length=1)]
    tied: dict[str, str] = Field(default_factory=dict)  # names that were left out -> that of the same memory

    @model_validator(mode="after")
    def _shards_exist(self) -> Manifest:
        for name, tensor in self.tensors.items():
            if tensor.shard not in self.shards:
                raise ValueError(f"tensor {name}: {tensor.shard} is no shard of it")
        return self


def encode(manifest: Manifest) -> bytes:
    """As it is stored."""
    content = manifest.model_dump(mode="json", by_alias=True)
    return json.dumps({"manifest": content, "sha256": _sha256(content)}, ensure_ascii=True).encode() + b"\n"


def decode(raw: bytes) -> Manifest:
    """Inverse of encode. Raises ManifestError."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TornManifestError(f"is cut off or damaged: it is not JSON ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("manifest"), dict):
        raise TornManifestError("is damaged: it holds no manifest")
    content = document["manifest"]
    if document.get("sha256") != _sha256(content):
        raise TornManifestError("is damaged: its sha256 is not that of its content")
    if content.get("format") != FORMAT:
        raise UnknownManifestError(f"has format {content.get('format')!r}, this reader knows {FORMAT}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UnknownManifestError(f"is not of format {FORMAT}: {where}: {first['msg']}") from error


def _sha256(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
