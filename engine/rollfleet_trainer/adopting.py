"""Gives a directory that another trainer's saver has written the manifest that ours have.

slime writes `weight_v000042` without a marker, its index last; prime-rl writes `step_42` and then an empty file STABLE;
verl's Hugging Face folders lie below `global_step_42`, with a tracker file beside that is written afterwards
(docs/checkpoints.md names the sources). None of them says which bytes belong to it. From the manifest on everybody
knows, and retain() may look after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollfleet_kernels.digest import PieceLanes, TensorDigest, hexadecimal, version_digest
from rollfleet_protocol.manifest import MANIFEST, FileRecord, Manifest, ShardRecord, TensorRecord, encode
from rollfleet_trainer.checkpoints import (
    INDEX,
    SINGLE,
    SUFFIX,
    UNFINISHED_SUFFIXES,
    Published,
    manifest_of,
    published_as,
    relative_path,
)
from rollfleet_trainer.errors import CheckpointNotReadyError, PublishError
from rollfleet_trainer.files import FILES, Files, NotRegularError, open_regular, read_small
from rollfleet_trainer.publishing import LARGEST_ASSET
from rollfleet_trainer.shards import Stored, UnreadableError, read_shard, stored_pieces

LOOK_S = 0.5
LARGEST_INDEX = 64 << 20  # bytes, as the engines' guards have it
# A manifest that an adopter did not come to finish: only ever this, so another one may take it away.
_OWN_UNFINISHED = (f"{MANIFEST}.", ".part")


@dataclass(frozen=True)
class _Shard:
    record: ShardRecord
    tensors: tuple[Stored, ...]
    mtime_ns: int


def adopt(
    root: Path | str,
    path: str,
    *,
    step: str | int,
    marker: str = "",
    wait_s: float = 0.0,
    files: Files = FILES,
) -> Published:
    """Wait until root/path is whole, read and digest all of it, and write its manifest. Blocks.

    marker: a file below root that its writer makes when it has ended, "broadcasts/step_42/STABLE" say. Without one the
    folder counts as written when its index, or its only file, and all the files that it names are there with all the
    bytes that their headers tell of. No more is to be seen of it: who fills files in afterwards needs a marker.

    A folder that has a manifest, and no file younger than that, is only looked at. Raises CheckpointNotReadyError after
    `wait_s` with what is missing, PublishError where files change while they are read or cannot be read, ValueError for
    a path that is none.
    """
    started, root = time.monotonic(), Path(root)
    within, _, name = path.rpartition("/")
    path = relative_path(within, name)
    folder = root / path
    there = manifest_of(folder)
    if there is not None and not _written_since(folder, there):
        return published_as(root, path, there)
    try:
        shards = _wait_whole(folder, root / marker if marker else None, started + wait_s)
        manifest = _manifest(folder, shards, str(step))
        manifest = _write(folder, manifest, files)
    except OSError as error:
        raise PublishError(f"{folder}: {error.filename or ''}: {error.strerror}") from error
    return published_as(root, path, manifest, time.monotonic() - started)


def _written_since(folder: Path, manifest: Manifest) -> bool:
    """Whether a saver has used the folder again, under the manifest of what it held before."""
    return any((folder / name).stat().st_mtime_ns > manifest.created_ns for name in manifest.shards)


def _wait_whole(folder: Path, marker: Path | None, deadline: float) -> dict[str, _Shard]:
    while True:
        if marker is not None and not marker.exists():
            missing = f"{marker} is not there"
        else:
            try:
                return _look(folder)
            except (FileNotFoundError, NotADirectoryError) as error:
                missing = f"{error.filename} is not there"
            except UnreadableError as error:
                missing = str(error)
        left = deadline - time.monotonic()
        if left <= 0:
            raise CheckpointNotReadyError(f"{folder}: is not whole: {missing}")
        time.sleep(min(LOOK_S, left))


def _look(folder: Path) -> dict[str, _Shard]:
    """All shards with their headers. Raises UnreadableError or FileNotFoundError for what may still come."""
    names = sorted(path.name for path in folder.iterdir())
    unfinished = [name for name in names if name.endswith(UNFINISHED_SUFFIXES) and not _is_own(name)]
    if unfinished:
        raise UnreadableError(f"{unfinished[0]} is being written")
    wanted = _named(folder) if INDEX in names else {}
    shards: dict[str, _Shard] = {}
    for name in sorted(wanted) or [SINGLE]:
        fd = open_regular(folder / name)
        try:
            record, found = read_shard(fd, name)
            shards[name] = _Shard(record, found, os.fstat(fd).st_mtime_ns)
        finally:
            os.close(fd)
        if name in wanted and {each.name for each in found} != wanted[name]:
            raise UnreadableError(f"{name}: its tensors are not those that {INDEX} names")
    return shards


def _named(folder: Path) -> dict[str, set[str]]:
    """Tensors of each shard, as the index has it."""
    try:
        raw = read_small(folder / INDEX, LARGEST_INDEX)
        if len(raw) > LARGEST_INDEX:
            raise PublishError(f"{folder}: {INDEX} has more than {LARGEST_INDEX} bytes")
        document = json.loads(raw)
        weight_map = {str(tensor): str(shard) for tensor, shard in document["weight_map"].items()}
        delta = "delta_encoding" in document.get("metadata", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{INDEX}: cannot be read: {error}") from error
    if delta:
        raise PublishError(f"{folder}: holds differences to another version (delta_encoding in {INDEX}), not weights")
    wanted: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if "/" in shard or not shard.endswith(SUFFIX):
            raise PublishError(f"{folder}: {INDEX}: {shard!r} is not the name of a {SUFFIX} file in the same folder")
        wanted.setdefault(shard, set()).add(tensor)
    if not wanted:
        raise UnreadableError(f"{INDEX}: has no weight_map")
    return wanted


def _manifest(folder: Path, shards: dict[str, _Shard], step: str) -> Manifest:
    tensors: dict[str, TensorRecord] = {}
    digests: list[TensorDigest] = []
    for name, shard in shards.items():
        for digest in _digests(folder / name, shard):
            digests.append(digest)
            tensors[digest.name] = TensorRecord(
                dtype=digest.dtype, shape=digest.shape, lanes=hexadecimal(digest.lanes), shard=name
            )
    return Manifest(
        step=step,
        digest=version_digest(digests),
        created_ns=time.time_ns(),
        nbytes=sum(each.nbytes for shard in shards.values() for each in shard.tensors),
        shards={name: shard.record for name, shard in shards.items()},
        files=_others(folder),
        tensors=tensors,
    )


def _digests(path: Path, shard: _Shard) -> list[TensorDigest]:
    """Of all tensors of a file that stays as it is meanwhile, and is on disk afterwards."""
    found = []
    fd = open_regular(path)
    try:
        for tensor in shard.tensors:
            digested = PieceLanes()
            for piece in stored_pieces(fd, tensor, path.name):
                digested.add(piece)
            found.append(TensorDigest(tensor.name, tensor.dtype, tensor.shape, digested.total))
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (shard.record.size, shard.mtime_ns):
            raise PublishError(f"{path}: changed while it was read: it is still being written")
        os.fsync(fd)  # its writer may not have
    except UnreadableError as error:
        raise PublishError(f"{path}: changed while it was read: {error}") from error
    finally:
        os.close(fd)
    return found


def _others(folder: Path) -> dict[str, FileRecord]:
    """What else the folder holds, but for what is large: it belongs to others, an optimiser say."""
    found: dict[str, FileRecord] = {}
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.endswith(SUFFIX) or name == MANIFEST or _is_own(name) or not path.is_file():
            continue
        with suppress(NotRegularError):
            data = read_small(path, LARGEST_ASSET)
            if len(data) > LARGEST_ASSET:
                continue
            found[name] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return found


def _is_own(name: str) -> bool:
    return name.startswith(_OWN_UNFINISHED[0]) and name.endswith(_OWN_UNFINISHED[1])


def _write(folder: Path, manifest: Manifest, files: Files) -> Manifest:
    """Under a name of its own first. Of two who adopt the same folder at once one may take the other's away."""
    unfinished = folder / f"{MANIFEST}.{uuid.uuid4().hex}.part"
    fd = files.create(unfinished)
    try:
        raw = encode(manifest)
        files.write(fd, memoryview(raw), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    try:
        files.rename(unfinished, folder / MANIFEST)
    except FileNotFoundError:
        there = manifest_of(folder)
        if there is None or there.digest != manifest.digest:
            raise
        manifest = there
    for path in folder.iterdir():
        if _is_own(path.name):
            with suppress(FileNotFoundError):
                files.remove(path)
    files.sync_folder(folder)
    return manifest
