"""Files of a checkpoint directory: opened once, safely, and only when the directory looks finished.

A file is opened first and then asked where it really lies (/proc/self/fd), so that no symlink, however swapped, leads
out of the folder that the fleet's spec names. Links that stay inside are fine: Kubernetes volumes and model caches are
full of them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollfleet_engine.weights.errors import CheckpointError, incomplete, invalid
from rollfleet_engine.weights.headers import TensorEntry, load_json_object, read_header
from rollfleet_protocol.state import FailureReason

SUFFIX = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MAX_JSON_BYTES = 64 << 20
# What savers and copy tools leave beside a checkpoint that is not finished.
UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete", ".crdownload")
_OPEN_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a fifo must not hang the open
_OPEN_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


@dataclass(frozen=True)
class OpenFile:
    """A shard, open; identity and size as they were when it was opened."""

    name: str
    fd: int
    device: int
    inode: int
    size: int
    mtime_ns: int

    def unchanged(self) -> bool:
        """Whether nobody wrote to it since, as far as size and time of modification tell."""
        now = os.fstat(self.fd)
        return (now.st_size, now.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class Shard:
    """A file and the tensors in it."""

    file: OpenFile
    tensors: tuple[TensorEntry, ...]


def check_relative(relative: str) -> None:
    """Refuse a path that could name anything outside its root."""
    parts = PurePosixPath(relative).parts
    if not relative or "\0" in relative or relative.startswith("/") or ".." in parts:
        raise invalid(f'checkpoint path {relative!r}: must be relative to the checkpoints volume, without ".."')


def open_folder(root: Path, relative: str, *, confined: bool) -> int:
    """File descriptor of the checkpoint's directory; the caller closes it."""
    check_relative(relative)
    try:
        fd = os.open(root / relative, _OPEN_FOLDER)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            FailureReason.CHECKPOINT_NOT_FOUND, f"checkpoint {relative!r}: no such folder in {root}"
        ) from error
    except OSError as error:
        raise invalid(f"checkpoint {relative!r}: cannot be opened: {error.strerror}") from error
    if confined and not _inside(fd, root):
        os.close(fd)
        raise invalid(f"checkpoint {relative!r}: a symbolic link leads out of {root}")
    return fd


def _inside(fd: int, root: Path) -> bool:
    real = str(Path(f"/proc/self/fd/{fd}").readlink())
    border = os.path.realpath(root)
    return real == border or real.startswith(border.rstrip("/") + "/")


def open_file(folder: int, name: str, root: Path, *, confined: bool) -> OpenFile:
    """Open one file of the folder; the caller closes it."""
    try:
        fd = os.open(name, _OPEN_FILE, dir_fd=folder)
    except FileNotFoundError as error:
        raise incomplete(f"{name}: is absent; the checkpoint is half-written or a shard was lost") from error
    except OSError as error:
        raise invalid(f"{name}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise invalid(f"{name!r}: cannot be the name of a file: {error}") from error
    found = os.fstat(fd)
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is not a regular file"
    elif confined and not _inside(fd, root):
        problem = f"is a symbolic link that leads out of {root}"
    if problem:
        os.close(fd)
        raise invalid(f"{name}: {problem}")
    return OpenFile(name, fd, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_small(folder: int, name: str, root: Path, *, confined: bool) -> bytes:
    """Content of a small text file such as the index."""
    file = open_file(folder, name, root, confined=confined)
    try:
        if file.size > MAX_JSON_BYTES:
            raise invalid(f"{name}: has {file.size} bytes, at most {MAX_JSON_BYTES} are read")
        with open(file.fd, "rb", closefd=False) as stream:
            return stream.read(MAX_JSON_BYTES + 1)
    finally:
        os.close(file.fd)


def open_shards(folder: int, root: Path, *, confined: bool) -> tuple[Shard, ...]:
    """All files of the checkpoint with their headers, checked against the index where there is one."""
    names = sorted(os.listdir(folder))  # through the descriptor, so that the folder cannot be swapped meanwhile
    for name in names:
        if name.endswith(UNFINISHED_SUFFIXES):
            raise incomplete(f"{name}: marks the checkpoint as still being written; wait, or remove it")
    index = _read_index(folder, root, confined=confined) if INDEX in names else None
    shards: list[Shard] = []
    try:
        for name in _shard_names(names, index):
            file = open_file(folder, name, root, confined=confined)
            try:
                shards.append(Shard(file, read_header(file.fd, name)))
            except BaseException:
                os.close(file.fd)
                raise
        _require_unique(shards)
        if index is not None:
            _require_index(shards, index)
    except BaseException:
        close_shards(shards)
        raise
    return tuple(shards)


def close_shards(shards: list[Shard] | tuple[Shard, ...]) -> None:
    """Close their files, once."""
    for shard in shards:
        os.close(shard.file.fd)


def _shard_names(names: list[str], index: dict[str, str] | None) -> list[str]:
    if index is not None:
        return sorted(set(index.values()))
    found = [name for name in names if name.endswith(SUFFIX)]
    if found == [SINGLE]:
        return found
    if not found:
        raise incomplete(f"no {SINGLE} and no {INDEX}: the checkpoint is half-written, or not in safetensors format")
    raise incomplete(f"{INDEX}: is absent beside {', '.join(found[:4])}; the checkpoint is half-written")


def _read_index(folder: int, root: Path, *, confined: bool) -> dict[str, str]:
    raw = read_small(folder, INDEX, root, confined=confined)
    try:
        document = load_json_object(raw, INDEX)
    except CheckpointError as error:
        if isinstance(error.__cause__, ValueError):  # it is not JSON: most savers write it in place
            raise incomplete(f"{error.message}; the checkpoint is half-written") from error
        raise
    metadata = document.get("metadata")
    if isinstance(metadata, dict) and "delta_encoding" in metadata:  # slime's disk deltas
        raise invalid(f"{INDEX}: metadata.delta_encoding: these are differences to another version, not weights")
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise invalid(f"{INDEX}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(SUFFIX):
            raise invalid(f"{INDEX}: tensor {tensor}: {shard!r} is not the name of a {SUFFIX} file in the same folder")
    return weight_map


def _require_unique(shards: list[Shard]) -> None:
    seen: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in seen:
                raise invalid(f"tensor {tensor.name}: is in {seen[tensor.name]} and in {shard.file.name}")
            seen[tensor.name] = shard.file.name


def _require_index(shards: list[Shard], index: dict[str, str]) -> None:
    held = {tensor.name: shard.file.name for shard in shards for tensor in shard.tensors}
    for name, shard in index.items():
        if held.get(name) != shard:
            raise invalid(f"{shard}: does not hold tensor {name}, which {INDEX} says it does")
    for name, shard in held.items():
        if name not in index:
            raise invalid(f"{shard}: holds tensor {name}, which {INDEX} does not name")
