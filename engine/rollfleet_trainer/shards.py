"""Safetensors files, written tensor by tensor without knowing what comes next, and read again.

A file begins with a header that names all its tensors. It is written last, into room that was left for it, and filled
up with spaces, which the format allows for. So no tensor waits in memory for the ones that follow it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfleet_kernels.digest import Lanes, PieceLanes, TensorDigest, hexadecimal
from rollfleet_protocol.manifest import ShardRecord, TensorRecord
from rollfleet_trainer.files import Files
from rollfleet_trainer.host import PIECE_BYTES, HostTensor

SHARD_BYTES = 4 << 30
HEADER_BYTES = 256 << 10  # with the 8 bytes of length: some 1,700 tensors; a page's multiple, so that data is aligned
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_OPENING = '{"__metadata__":{"format":"pt"}'


def digest_of(tensor: HostTensor) -> Lanes:
    """Lanes of all its bytes."""
    found = PieceLanes()
    for piece in tensor.pieces():
        found.add(piece)
    return found.total


class ShardWriter:
    """Writes shards of about `shard_bytes` into a folder: a larger tensor has one of its own.

    After `finish`, `shards` and `tensors` are what a manifest tells of them.
    """

    def __init__(self, folder: Path, files: Files, shard_bytes: int) -> None:
        self._folder = folder
        self._files = files
        self._shard_bytes = shard_bytes
        self._fd = -1
        self._header = ""
        self._end = 0  # of the data in the open shard, from the header's end
        self.shards: dict[str, ShardRecord] = {}
        self.tensors: dict[str, TensorRecord] = {}
        self.digests: list[TensorDigest] = []

    @property
    def _name(self) -> str:
        return f"model-{len(self.shards) + 1:05d}.safetensors"

    def add(self, name: str, tensor: HostTensor) -> None:
        """Write it and digest it, in one pass over its bytes."""
        if self._fd >= 0 and not self._fits(name, tensor):
            self._finish_shard()
        if self._fd < 0:
            self._fd, self._header, self._end = self._files.create(self._folder / self._name), _OPENING, 0
        entry = self._entry(name, tensor)
        found = PieceLanes()
        for piece in tensor.pieces():
            self._files.write(self._fd, piece.data, HEADER_BYTES + self._end)
            found.add(piece)
            self._end += len(piece)
        self._header += entry
        self.tensors[name] = TensorRecord(
            dtype=tensor.dtype, shape=tensor.shape, lanes=hexadecimal(found.total), shard=self._name
        )
        self.digests.append(TensorDigest(name, tensor.dtype, tensor.shape, found.total))

    def _entry(self, name: str, tensor: HostTensor) -> str:
        offsets = [self._end, self._end + tensor.nbytes]
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        return f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"

    def _fits(self, name: str, tensor: HostTensor) -> bool:
        """Readers map files: a tensor lies at a multiple of its element's size, and there may be no gaps."""
        room = HEADER_BYTES - LENGTH_BYTES - len("}")
        return (
            self._end + tensor.nbytes <= self._shard_bytes
            and len(self._header) + len(self._entry(name, tensor)) <= room
            and self._end % tensor.item_bytes == 0
        )

    def _finish_shard(self) -> None:
        length = HEADER_BYTES - LENGTH_BYTES
        raw = length.to_bytes(LENGTH_BYTES, "little") + f"{self._header}}}".ljust(length).encode()
        self._files.write(self._fd, memoryview(raw), 0)
        self._files.sync(self._fd)
        fd, self._fd = self._fd, -1
        self._files.close(fd)
        record = ShardRecord(size=HEADER_BYTES + self._end, header_sha256=hashlib.sha256(raw).hexdigest())
        self.shards[self._name] = record

    def finish(self) -> None:
        """The last shard is on disk."""
        if self._fd >= 0:
            self._finish_shard()

    def abandon(self) -> None:
        """Let go of the open file, whatever is in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class UnreadableError(ValueError):
    """A file is no whole safetensors file: it may still be being written."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


def read_shard(fd: int, name: str) -> tuple[ShardRecord, tuple[Stored, ...]]:
    """The header of an open file whose tensors fill it. Raises UnreadableError; the engines' guards check much more."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise UnreadableError(f"{name}: ends inside its header, {size} bytes")
    raw = os.pread(fd, LENGTH_BYTES + length, 0)
    try:
        header = json.loads(raw[LENGTH_BYTES:])
        found = tuple(_stored(tensor, entry, len(raw)) for tensor, entry in header.items() if tensor != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{name}: its header cannot be read: {error}") from error
    end = max((each.offset + each.nbytes for each in found), default=len(raw))
    if not found or end != size:
        raise UnreadableError(f"{name}: has {size} bytes, its tensors end at {end}")
    return ShardRecord(size=size, header_sha256=hashlib.sha256(raw).hexdigest()), found


def _stored(name: str, entry: dict[str, Any], start: int) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, end - begin)


def stored_pieces(fd: int, tensor: Stored, name: str) -> Iterator[bytes]:
    """Its bytes, as HostTensor.pieces gives them."""
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        wanted = min(PIECE_BYTES, tensor.nbytes - start)
        piece = os.pread(fd, wanted, tensor.offset + start)
        if len(piece) != wanted:
            raise UnreadableError(f"{name}: ends inside tensor {tensor.name}")
        yield piece
