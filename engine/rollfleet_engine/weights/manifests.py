"""A checkpoint held against its manifest, where it has one: sizes before anything is hashed, bytes afterwards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollfleet_engine.weights.errors import incomplete, invalid
from rollfleet_engine.weights.headers import TensorEntry
from rollfleet_engine.weights.layout import INDEX, OpenFile, Shard, read_small
from rollfleet_kernels.digest import Lanes, hexadecimal
from rollfleet_protocol.manifest import MANIFEST, Manifest, TornManifestError, UnknownManifestError, decode


def read_manifest(folder: int, root: Path, *, confined: bool) -> Manifest | None:
    """The folder's manifest; None where whoever wrote the checkpoint made none. Raises CheckpointError."""
    if MANIFEST not in os.listdir(folder):
        return None
    raw = read_small(folder, MANIFEST, root, confined=confined)
    try:
        return decode(raw)
    except TornManifestError as error:
        raise incomplete(f"{MANIFEST}: {error}; the checkpoint is half-written, or was damaged") from error
    except UnknownManifestError as error:
        raise invalid(f"{MANIFEST}: {error}; publish it again by the release that the fleet's engines have") from error


def require_complete(manifest: Manifest, shards: Iterable[Shard], folder: int, root: Path, *, confined: bool) -> None:
    """Every file is there with its size, headers and index are those that were written, no tensor is more or less."""
    found = {shard.file.name: shard for shard in shards}
    _require_names(manifest, found)
    for name, shard in sorted(found.items()):
        _require_size(name, shard.file.size, manifest.shards[name].size)
    for name, record in sorted(manifest.files.items()):
        _require_size(name, _size(folder, name), record.size)
    for name, shard in sorted(found.items()):
        if _header_sha256(shard) != manifest.shards[name].header_sha256:
            raise invalid(f"{name}: its header is not the one that was published; publish the checkpoint again")
    index = manifest.files.get(INDEX)
    if index is not None:
        raw = read_small(folder, INDEX, root, confined=confined)
        if hashlib.sha256(raw).hexdigest() != index.sha256:
            raise invalid(f"{INDEX}: is not the one that was published; publish the checkpoint again")


def require_bytes(manifest: Manifest, digested: Iterable[tuple[OpenFile, TensorEntry, Lanes]], digest: str) -> None:
    """The bytes of every tensor are those that were published; the error names tensor and file."""
    for file, entry, lanes in digested:
        record = manifest.tensors[entry.name]
        found, told = hexadecimal(lanes), record.lanes
        if found != told:
            message = f"tensor {entry.name} in {file.name}: digest {found} is not {told}, with which it was published"
            raise invalid(f"{message}: the file is damaged, or its bytes have not all arrived; publish it again")
    if digest != manifest.digest:
        raise invalid(f"{MANIFEST}: says digest {manifest.digest}, its tensors have {digest}")


def _require_names(manifest: Manifest, found: Mapping[str, Shard]) -> None:
    other = sorted(manifest.shards.keys() ^ found.keys())
    if other:
        name = other[0]
        where = f"only {MANIFEST} names it" if name in manifest.shards else f"{MANIFEST} does not name it"
        raise incomplete(f"{name}: {where}; the folder holds parts of different checkpoints, or not all of one")
    entries = {entry.name: (name, entry) for name, shard in found.items() for entry in shard.tensors}
    for tensor in sorted(entries.keys() ^ manifest.tensors.keys()):
        holder = "the files hold it" if tensor in entries else f"only {MANIFEST} has it"
        raise invalid(f"tensor {tensor}: {holder}: the files are not those that were published")
    for tensor, (name, entry) in entries.items():
        record = manifest.tensors[tensor]
        if (record.shard, record.dtype, record.shape) != (name, entry.dtype, entry.shape):
            told = f"{record.dtype} {list(record.shape)} in {record.shard}"
            raise invalid(f"tensor {tensor}: is {entry.dtype} {list(entry.shape)} in {name}, {MANIFEST} says {told}")


def _size(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder).st_size
    except FileNotFoundError as error:
        raise incomplete(f"{name}: is absent, {MANIFEST} names it; not all of the checkpoint is there") from error


def _require_size(name: str, found: int, told: int) -> None:
    if found != told:
        why = "half-written, truncated, or its bytes have not all arrived"
        raise incomplete(f"{name}: has {found} bytes, {MANIFEST} says {told}; {why}")


def _header_sha256(shard: Shard) -> str:
    """Of all that comes before the first tensor; the tensors cover the rest of the file without a gap."""
    length = min(entry.offset for entry in shard.tensors)
    sha, place = hashlib.sha256(), 0
    while place < length:
        part = os.pread(shard.file.fd, min(length - place, 1 << 20), place)
        if not part:
            raise incomplete(f"{shard.file.name}: has only {place} bytes; half-written or truncated")
        sha.update(part)
        place += len(part)
    return sha.hexdigest()
