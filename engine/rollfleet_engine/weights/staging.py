"""Staging: all that can fail about a checkpoint, found out while the engine goes on serving.

Files are opened, headers checked, names, dtypes and shapes compared with the model, and every byte hashed, which also
warms the page cache. Where the publisher left a manifest, the folder is held against it. What comes out keeps the
files open: the transfer reads the same inodes, even if the folder is deleted meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollfleet_engine.weights.coverage import ModelTensors, require_coverage
from rollfleet_engine.weights.errors import CheckpointError, incomplete, invalid
from rollfleet_engine.weights.layout import OpenFile, Shard, close_shards, open_folder, open_shards
from rollfleet_engine.weights.manifests import read_manifest, require_bytes, require_complete
from rollfleet_kernels.digest import (
    NO_LANES,
    PIECE_BYTES,
    WORD_BYTES,
    Lanes,
    TensorDigest,
    add_lanes,
    has_compiled_kernel,
    lanes,
    lanes_reference,
    version_digest,
    warm_up,
)
from rollfleet_protocol.manifest import Manifest
from rollfleet_protocol.state import FailureReason

# Below this, numpy's reference (1 GiB/s) is done before numba is imported and has compiled (0.6 s).
COMPILE_WORTH_BYTES = 512 << 20
HASH_THREADS = 2  # memory speed on 2 cores; more would take cores from the requests that are still served

Progress = Callable[[int, int], None]  # bytes done, bytes in all; called from a hashing thread
Kernel = Callable[[memoryview, int], Lanes]


@dataclass(frozen=True)
class StagedTensor:
    """A tensor of a staged checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int  # index into files
    offset: int  # from the start of the file
    nbytes: int
    lanes: Lanes


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that is complete, fits the model, and stays readable until it is closed."""

    path: str  # as asked for, relative to its root
    files: tuple[OpenFile, ...]
    tensors: tuple[StagedTensor, ...]
    digest: str
    root: str = field(default="", kw_only=True)  # absolute
    confined: bool = field(default=True, kw_only=True)
    open_fds: list[int] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.open_fds is None:
            object.__setattr__(self, "open_fds", [file.fd for file in self.files])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def close(self) -> None:
        """Let the files go. Each is closed once, however often this is called: its number is somebody else's then."""
        while self.open_fds:
            os.close(self.open_fds.pop())


def stage_checkpoint(
    root: Path,
    relative: str,
    model: ModelTensors,
    *,
    confined: bool = True,
    progress: Progress = lambda _done, _total: None,
    cancelled: threading.Event | None = None,
) -> StagedCheckpoint:
    """Stage root/relative. Blocks, so it is for a thread; raises CheckpointError and then holds nothing open.

    `confined` refuses symbolic links that lead out of root; only the model's own folder (relative ".") may do without.
    """
    folder = open_folder(root, relative, confined=confined)
    shards: tuple[Shard, ...] = ()
    try:
        manifest = read_manifest(folder, root, confined=confined)
        shards = open_shards(folder, root, confined=confined)
        require_coverage(shards, model)
        if manifest is not None:
            require_complete(manifest, shards, folder, root, confined=confined)
        staged = _hash(relative, shards, manifest, progress, cancelled or threading.Event())
        return replace(staged, root=str(root), confined=confined)
    except OSError as error:
        close_shards(shards)
        raise invalid(f"checkpoint {relative!r}: cannot be read: {error.strerror}") from error
    except BaseException:
        close_shards(shards)
        raise
    finally:
        os.close(folder)


def _hash(
    relative: str,
    shards: tuple[Shard, ...],
    manifest: Manifest | None,
    progress: Progress,
    cancelled: threading.Event,
) -> StagedCheckpoint:
    work = [(shard.file, entry.offset, entry.nbytes) for shard in shards for entry in shard.tensors]
    found = hash_ranges(work, progress, cancelled)
    for shard in shards:
        if not shard.file.unchanged():
            raise incomplete(f"{shard.file.name}: changed while it was read; it is still being written")
    entries = ((index, entry) for index, shard in enumerate(shards) for entry in shard.tensors)
    tensors = tuple(
        StagedTensor(entry.name, entry.dtype, entry.shape, index, entry.offset, entry.nbytes, each)
        for (index, entry), each in zip(entries, found, strict=True)
    )
    digest = version_digest(TensorDigest(tensor.name, tensor.dtype, tensor.shape, tensor.lanes) for tensor in tensors)
    if manifest is not None:
        digested = ((shard.file, entry) for shard in shards for entry in shard.tensors)
        require_bytes(manifest, ((*place, each) for place, each in zip(digested, found, strict=True)), digest)
    return StagedCheckpoint(relative, tuple(shard.file for shard in shards), tensors, digest)


def hash_ranges(work: list[tuple[OpenFile, int, int]], progress: Progress, cancelled: threading.Event) -> list[Lanes]:
    """Lanes of byte ranges (file, offset, bytes), in the order given. Raises CheckpointError, also when cancelled."""
    return _HashRun(work, progress, cancelled).run()


class _HashRun:
    """Hashes byte ranges of open files in a few threads, each with one buffer of PIECE_BYTES."""

    def __init__(self, work: list[tuple[OpenFile, int, int]], progress: Progress, cancelled: threading.Event) -> None:
        self._pieces = iter(_pieces(work))
        self._total = sum(nbytes for _, _, nbytes in work)
        self._lanes: list[Lanes] = [NO_LANES] * len(work)
        self._done = 0
        self._lock = threading.Lock()
        self._progress = progress
        self._cancelled = cancelled
        self._failed = threading.Event()

    def run(self) -> list[Lanes]:
        """Lanes of each range, in the order given."""
        kernel = _choose_kernel(self._total)
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="rollfleet-hash") as pool:
            threads = [pool.submit(self._hash_pieces, kernel) for _ in range(HASH_THREADS)]
        for thread in threads:
            thread.result()
        if self._cancelled.is_set():
            raise CheckpointError(FailureReason.CANCELLED, "staging was cancelled")
        return self._lanes

    def _hash_pieces(self, kernel: Kernel) -> None:
        buffer = memoryview(bytearray(min(PIECE_BYTES, self._total)))
        try:
            while not (self._cancelled.is_set() or self._failed.is_set()):
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                index, file, offset, nbytes, word = piece
                read_into(file.fd, buffer[:nbytes], offset, file.name)
                self._add(index, nbytes, kernel(buffer[:nbytes], word))
        except BaseException:
            self._failed.set()
            raise

    def _add(self, index: int, nbytes: int, part: Lanes) -> None:
        with self._lock:
            self._lanes[index] = add_lanes(self._lanes[index], part)
            self._done += nbytes
            self._progress(self._done, self._total)


def _choose_kernel(total: int) -> Kernel:
    if total < COMPILE_WORTH_BYTES or not has_compiled_kernel():
        return lanes_reference
    warm_up()
    return lanes


def _pieces(work: Iterable[tuple[OpenFile, int, int]]) -> Iterator[tuple[int, OpenFile, int, int, int]]:
    for index, (file, offset, nbytes) in enumerate(work):
        for start in range(0, nbytes, PIECE_BYTES):
            yield index, file, offset + start, min(PIECE_BYTES, nbytes - start), start // WORD_BYTES


def read_into(fd: int, buffer: memoryview, offset: int, file_name: str) -> None:
    """Fill the buffer from the file, or say that the file is too short."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise incomplete(f"{file_name}: ends at byte {offset + done}, shorter than when it was opened")
        done += count
