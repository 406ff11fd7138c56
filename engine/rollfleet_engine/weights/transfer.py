"""What the workers are told of a staged checkpoint, and how they read it again.

Workers open the guard's own descriptors through /proc, which gives the inodes that were staged whatever became of the
path. They run in the guard's container and as its user, so /proc lets them. All values here are JSON: the four phases
carry plain dicts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import StagedCheckpoint, StagedTensor, read_into
from rollfleet_kernels.digest import Buffer, Lanes, PieceLanes, hexadecimal
from rollfleet_protocol.state import FailureReason

SOURCE_TYPE = "Checkpoint"
PUSH_TYPE = "Trainer"
CACHED_BYTES = 1 << 20  # read and digested at a time: small against a processor's caches, large against the calls


@dataclass(frozen=True)
class FileReference:
    """A file that another process holds open."""

    path: str  # /proc/<pid>/fd/<n>
    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class CheckpointUpdate:
    """One whole update from a checkpoint."""

    files: tuple[FileReference, ...]
    tensors: tuple[StagedTensor, ...]
    digest: str
    # Where workers of other nodes find their own copy of the same files.
    root: str = ""  # absolute
    path: str = ""  # relative to root
    confined: bool = True

    @classmethod
    def of(cls, staged: StagedCheckpoint, pid: int | None = None) -> Self:
        """The update for a checkpoint that process `pid` (this one, if left out) holds open."""
        owner = os.getpid() if pid is None else pid
        files = tuple(
            FileReference(f"/proc/{owner}/fd/{file.fd}", file.name, file.device, file.inode, file.size, file.mtime_ns)
            for file in staged.files
        )
        return cls(files, staged.tensors, staged.digest, staged.root, staged.path, staged.confined)

    def to_wire(self) -> dict[str, Any]:
        """As plain JSON; tensors as rows, since a large model has tens of thousands."""
        rows = [
            [
                tensor.name,
                tensor.dtype,
                list(tensor.shape),
                tensor.file,
                tensor.offset,
                tensor.nbytes,
                list(tensor.lanes),
            ]
            for tensor in self.tensors
        ]
        return {
            "files": [asdict(file) for file in self.files],
            "tensors": rows,
            "digest": self.digest,
            "root": self.root,
            "path": self.path,
            "confined": self.confined,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Inverse of to_wire."""
        files = tuple(FileReference(**file) for file in wire["files"])
        tensors = tuple(_tensor(row) for row in wire["tensors"])
        return cls(files, tensors, wire["digest"], wire["root"], wire["path"], wire["confined"])


def _tensor(row: Sequence[Any]) -> StagedTensor:
    name, dtype, shape, file, offset, nbytes, lanes = row
    return StagedTensor(name, dtype, tuple(shape), file, offset, nbytes, _two(lanes))


def _two(lanes: Sequence[int]) -> Lanes:
    one, other = lanes
    return one, other


class CheckpointReader:
    """Reads a staged checkpoint again, in this or another process. A context manager: leaving it closes the files."""

    def __init__(self, update: CheckpointUpdate, open_again: Callable[[FileReference], int] | None = None) -> None:
        self._update = update
        self._open = open_again or _open_same
        self._fds: list[int] = []

    def __enter__(self) -> Self:
        try:
            for file in self._update.files:
                self._fds.append(self._open(file))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def read_checked(self, tensor: StagedTensor, buffer: memoryview, kernel: Callable[[Buffer, int], Lanes]) -> Lanes:
        """Fill `buffer`, as long as the tensor, with its bytes, each piece digested while it lies in a cache.

        Raises CheckpointError where they cannot be read or are not those that were staged.
        """
        name, fd, found = self._update.files[tensor.file].name, self._fds[tensor.file], PieceLanes(kernel)
        if len(buffer) != tensor.nbytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes for the {tensor.nbytes} of {tensor.name}")
        try:
            for start in range(0, len(buffer), CACHED_BYTES):
                piece = buffer[start : start + CACHED_BYTES]
                read_into(fd, piece, tensor.offset + start, name)
                found.add(piece)
        except OSError as error:
            raise _changed(f"{name}: cannot be read again: {error.strerror}") from error
        if found.total != tensor.lanes:
            digests = f"digest {hexadecimal(found.total)} is not the staged {hexadecimal(tensor.lanes)}"
            raise CheckpointError(FailureReason.DIGEST_MISMATCH, f"tensor {tensor.name} in {name}: {digests}")
        return found.total


def _open_same(file: FileReference) -> int:
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _changed(f"{file.name}: cannot be opened again at {file.path}: {error.strerror}") from error
    found = os.fstat(fd)
    now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if now != (file.device, file.inode, file.size, file.mtime_ns):
        os.close(fd)
        raise _changed(f"{file.name}: was changed or replaced since it was staged; stage it again")
    return fd


def _changed(message: str) -> CheckpointError:
    return CheckpointError(FailureReason.CHECKPOINT_CHANGED, message)
