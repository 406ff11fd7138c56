"""Digest of tensors by their raw bytes: the same bits from the compiled host kernel, numpy and torch.

Definition, in arithmetic modulo 2**32:

* A tensor's raw bytes are little-endian 32-bit words w[0], w[1], ...; the last word is padded with zero bytes.
* Words are counted in chunks of 2**31, so that a kernel can index with int32: word i has chunk c = i >> 31 and index
  j = i & (2**31 - 1).
* Lane k of 4 mixes each word with its place and sums:
      h = w ^ (j * INDEX_MULTIPLIER + SEEDS[k] + c * CHUNK_MULTIPLIERS[k])
      h = (h ^ (h >> 16)) * MULTIPLIERS[k]
      lane += h ^ (h >> 15)
* Digest of a version: SHA-256 over the domain line and then, sorted by name, one line of JSON per tensor:
  [name, dtype, shape, [lane, lane, lane, lane]] with lanes as 8 hex digits, dtype as safetensors spells it.

Every step on a word is a bijection, so a change of one word changes all four lanes with certainty. The shift before the
multiplication is there for sign bits: without it, two values that differ only in bit 31 change a lane by one of two
amounts, and swapping x and -x would go unseen once in 16 times. Sums make the digest independent of the order in which
pieces are digested. It detects faults, not forgers.

Nothing digests to "empty": no bytes and no tensors are errors, for an empty digest would match another empty one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

SEEDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # pi's first hex digits after the point
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)  # odd, so that multiplication is a bijection
INDEX_MULTIPLIER = 0x9E3779B1  # odd, near 2**32 / golden ratio: neighbours differ in high bits
CHUNK_MULTIPLIERS = (0x7FEB352D, 0x846CA68B, 0x6C8E9CF5, 0x58F38DED)  # odd, one per lane
CHUNK_WORDS = 1 << 31
WORD_BYTES = 4
PIECE_BYTES = 4 << 20  # unit of parallel work: large against a thread's hand-over, small against caches' loss
HOST_BYTES = 64 << 20  # of an accelerator's tensor, on the host at a time
DOMAIN = b"rollfleet digest 1\n"

Lanes = tuple[int, int, int, int]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint32]
_MASK = 0xFFFFFFFF


class DeviceBytes(Protocol):
    """A flat torch tensor of uint8 on an accelerator: only what is asked of it here, so that nobody needs torch."""

    def numel(self) -> int:
        """Bytes."""
        ...

    def __getitem__(self, part: slice, /) -> Self:
        """A view of a part."""
        ...

    def cpu(self) -> Self:
        """On the host; itself where it lies there. Waits for what its stream still does to it."""
        ...

    def numpy(self) -> npt.NDArray[np.uint8]:
        """A view, of one on the host."""
        ...


class EmptyInputError(ValueError):
    """There was nothing to digest."""


@dataclass(frozen=True)
class TensorDigest:
    """One line of a version's digest."""

    name: str
    dtype: str  # as safetensors spells it: "BF16", "F32"
    shape: tuple[int, ...]
    lanes: Lanes


def add_lanes(one: Lanes, other: Lanes) -> Lanes:
    """Lanes of two pieces of the same tensor together."""
    a, b, c, d = ((x + y) & _MASK for x, y in zip(one, other, strict=True))
    return a, b, c, d


def version_digest(tensors: Iterable[TensorDigest]) -> str:
    """Digest of all tensors together, as "sha256:<hex>"."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    if not ordered:
        raise EmptyInputError("a version without tensors has no digest")
    sha = hashlib.sha256(DOMAIN)
    previous = None
    for tensor in ordered:
        if tensor.name == previous:
            raise ValueError(f"tensor {tensor.name} appears twice")
        previous = tensor.name
        line = [tensor.name, tensor.dtype, list(tensor.shape), [f"{lane:08x}" for lane in tensor.lanes]]
        sha.update(json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return f"sha256:{sha.hexdigest()}"


def lanes(data: Buffer, word_offset: int = 0, *, executor: Executor | None = None) -> Lanes:
    """Lanes of `data`, a piece of a tensor that starts at word `word_offset`.

    All pieces but a tensor's last are whole words. With an executor, pieces are digested in its threads: the compiled
    kernel holds no GIL. Takes the compiled kernel where numba is installed, else the reference of the same bits.
    """
    kernel = _compiled_kernel() if has_compiled_kernel() else _reference_kernel
    jobs = list(_split(_as_bytes(data), word_offset))
    run = executor.map if executor is not None and len(jobs) > 1 else map
    return _sum(run(lambda job: kernel(_as_words(job[0]), job[1], job[2]), jobs))


def lanes_reference(data: Buffer, word_offset: int = 0) -> Lanes:
    """Reference of `lanes` in numpy. Also the faster choice for small data: it compiles nothing."""
    pieces = _split(_as_bytes(data), word_offset)
    return _sum(_reference_kernel(_as_words(raw), index, chunk) for raw, index, chunk in pieces)


def lanes_torch(tensor: torch.Tensor) -> Lanes:
    """Reference of `lanes` in torch, on the tensor's own device, for one whole tensor."""
    import torch  # noqa: PLC0415 - whoever has a tensor has torch; nobody else should need it

    if tensor.numel() == 0:
        raise EmptyInputError("an empty tensor has no digest")
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % WORD_BYTES)).view(-1, WORD_BYTES).to(torch.int64)
    # int64 holds a 32-bit word without sign trouble, and its low 32 bits survive the wrap of a product.
    words = padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | padded[:, 3] << 24
    index = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    place = (index & (CHUNK_WORDS - 1)) * INDEX_MULTIPLIER
    out = []
    for seed, multiplier, chunk_multiplier in zip(SEEDS, MULTIPLIERS, CHUNK_MULTIPLIERS, strict=True):
        h = words ^ ((place + seed + (index >> 31) * chunk_multiplier) & _MASK)
        h = ((h ^ (h >> 16)) * multiplier) & _MASK
        out.append(int((h ^ (h >> 15)).sum().item()) & _MASK)
    return out[0], out[1], out[2], out[3]


def lanes_on_device(raw: DeviceBytes, kernel: Callable[[Buffer, int], Lanes] = lanes) -> Lanes:
    """Lanes of a whole tensor that lies on an accelerator, of host copies of HOST_BYTES at most.

    `lanes_torch` would copy nothing, and takes int64 on the device: eight times the memory of what it digests, of which
    an engine in mid-update has none to spare, in operations that were never seen to give the same bits on an NPU.
    """
    if raw.numel() == 0:
        raise EmptyInputError("an empty tensor has no digest")
    places = range(0, raw.numel(), HOST_BYTES)
    return _sum(kernel(raw[place : place + HOST_BYTES].cpu().numpy(), place // WORD_BYTES) for place in places)


def has_compiled_kernel() -> bool:
    """Whether `lanes` runs compiled; numba is optional for those who only compare digests."""
    return importlib.util.find_spec("numba") is not None


def warm_up() -> None:
    """Compile the kernel now (about 1 s with numba's import), so that no pause pays for it."""
    if has_compiled_kernel():
        _compiled_kernel()


def _as_bytes(data: Buffer) -> _Bytes:
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size == 0:
        raise EmptyInputError("no bytes have no digest")
    if sys.byteorder != "little":
        raise RuntimeError("the digest is defined on little-endian words; this machine is big-endian")
    return raw


def _as_words(raw: _Bytes) -> _Words:
    """One piece. It is copied only where it must be: the last one of a ragged tensor, and those that lie askew."""
    if raw.size % WORD_BYTES or raw.ctypes.data % WORD_BYTES:
        padded = np.zeros(-(-raw.size // WORD_BYTES) * WORD_BYTES, dtype=np.uint8)
        padded[: raw.size] = raw
        raw = padded
    return raw.view(np.uint32)


def _split(raw: _Bytes, word_offset: int) -> Iterable[tuple[_Bytes, int, int]]:
    """Pieces of at most PIECE_BYTES that cross no chunk border, each with (index in chunk, chunk)."""
    count, done = -(-raw.size // WORD_BYTES), 0
    while done < count:
        chunk, index = divmod(word_offset + done, CHUNK_WORDS)
        size = min(PIECE_BYTES // WORD_BYTES, count - done, CHUNK_WORDS - index)
        yield raw[done * WORD_BYTES : (done + size) * WORD_BYTES], index, chunk
        done += size


def _sum(pieces: Iterable[Lanes]) -> Lanes:
    total: Lanes = (0, 0, 0, 0)
    for piece in pieces:
        total = add_lanes(total, piece)
    return total


def _lane_seeds(chunk: int) -> list[int]:
    return [(seed + chunk * by) & _MASK for seed, by in zip(SEEDS, CHUNK_MULTIPLIERS, strict=True)]


def _reference_kernel(words: _Words, index: int, chunk: int) -> Lanes:
    place = np.arange(index, index + words.size, dtype=np.uint32) * np.uint32(INDEX_MULTIPLIER)
    out = []
    for seed, multiplier in zip(_lane_seeds(chunk), MULTIPLIERS, strict=True):
        h = words ^ (place + np.uint32(seed))
        h = (h ^ (h >> np.uint32(16))) * np.uint32(multiplier)
        out.append(int((h ^ (h >> np.uint32(15))).sum(dtype=np.uint32)))
    return out[0], out[1], out[2], out[3]


@cache
def _compiled_kernel() -> Callable[[_Words, int, int], Lanes]:
    """The kernel as machine code. Not cached on disk: a pod's code is read-only, and compiling takes 0.3 s."""
    from rollfleet_kernels import digest_numba  # noqa: PLC0415 - numba is optional and slow to import

    compiled: Callable[..., Any] = digest_numba.compile_kernel()

    def kernel(words: _Words, index: int, chunk: int) -> Lanes:
        a, b, c, d = compiled(words, np.uint32(index), np.array(_lane_seeds(chunk), dtype=np.uint32))
        return int(a), int(b), int(c), int(d)

    return kernel
