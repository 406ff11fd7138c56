"""Digest of tensors by their raw bytes: the same bits from the compiled host kernel, numpy and torch.

Definition ("rollfleet digest 2"), in arithmetic modulo 2**64:

* A tensor's raw bytes are little-endian 64-bit words w[0], w[1], ...; the last word is padded with zero bytes. Word i
  has place j = i & 511 in block b = i >> 9.
* scramble(n) is the n-th number of splitmix64 from state 0: z = (n + 1) * GOLDEN; z = (z ^ (z >> 30)) * SCRAMBLE_1;
  z = (z ^ (z >> 27)) * SCRAMBLE_2; z ^ (z >> 31).
* Lane k of 2 has a table T[n] = scramble(1024 * k + n) of 1024 words, and for each block a number
  B = scramble(2**63 + 2 * b + k). It mixes each word with its place and sums:
      x = w ^ (B * GOLDEN) ^ T[j + (B >> 55)]
      lane += (x & 0xFFFFFFFF) * (x >> 32)
* Digest of a version: SHA-256 over the domain line and then, sorted by name, one line of JSON per tensor:
  [name, dtype, shape, [lane, lane]] with lanes as 16 hex digits, dtype as safetensors spells it.

The sum of products is the hash NH of UMAC (Black et al., CRYPTO 1999), with words keyed by xor as in XXH3: one
multiplication takes eight bytes, which is what makes it cheap on any processor with vectors. NH's keys are as long as
its message; here they come from a small table and a key per block, and each block begins at a place of its own in the
table: rows that are exchanged with each other in several blocks meet unrelated keys, but for one pair of blocks in 512
of each lane. A changed word goes unseen by a lane only if its other half equals the lane's key there, an exchange of
two words as rarely; the lanes have different keys, so both miss one in 2**64. The weakest that is known are four words
that differ in one bit and are exchanged crosswise between two blocks: once in millions for a lane, which makes 2**44
for both. Sums make the digest independent of the order in which pieces are digested. It detects faults, not forgers.

Nothing digests to "empty": no bytes and no tensors are errors, for an empty digest would match another empty one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import operator
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    import torch

GOLDEN, SCRAMBLE_1, SCRAMBLE_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's
WORD_BYTES = 8
BLOCK_WORDS = 512
TABLE_WORDS = 2 * BLOCK_WORDS  # a block takes a window of it, which begins at one of the first 512
WINDOW_BITS = 55  # a block's number has nine bits above these, which say where
BLOCK_NUMBERS = 1 << 63  # where scramble's numbers for blocks begin, far from the tables'
LANES = 2
PIECE_BYTES = 4 << 20  # unit of parallel work: large against a thread's hand-over, small against caches' loss
THREADS_WORTH_BYTES = 32 << 20  # less lies in a cache, where one thread is done sooner than another has woken up
REFERENCE_BYTES = 64 << 10  # what numpy is given at a time: its temporaries should stay in a cache
MOST_WORDS = 1 << 62  # of a tensor: far below where integers of 64 bits end
HOST_BYTES = 64 << 20  # of an accelerator's tensor, on the host at a time
DOMAIN = b"rollfleet digest 2\n"

Lanes = tuple[int, int]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]
_HALF = 0xFFFFFFFF
_MASK = (1 << 64) - 1
NO_LANES: Lanes = (0, 0)  # of no bytes: where sums begin


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
    return (one[0] + other[0]) & _MASK, (one[1] + other[1]) & _MASK


def hexadecimal(found: Lanes) -> str:
    """As manifests and messages have them: 32 digits."""
    return "".join(f"{lane:016x}" for lane in found)


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
        line = [tensor.name, tensor.dtype, list(tensor.shape), [f"{lane:016x}" for lane in tensor.lanes]]
        sha.update(json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return f"sha256:{sha.hexdigest()}"


class PieceLanes:
    """Lanes of a tensor whose bytes come in order, in pieces: whole words each, but the last."""

    def __init__(self, kernel: Callable[[Buffer, int], Lanes] | None = None) -> None:
        self._kernel = kernel or lanes
        self._bytes = 0
        self.total = NO_LANES  # of all pieces until now

    def add(self, piece: Buffer) -> None:
        """Digest the next piece. Raises ValueError where the one before it ended inside a word."""
        word, inside = divmod(self._bytes, WORD_BYTES)
        if inside:
            raise ValueError(f"a piece ended {inside} bytes into a word of {WORD_BYTES}, and another one follows it")
        self.total = add_lanes(self.total, self._kernel(piece, word))
        self._bytes += _as_bytes(piece).size


def lanes(data: Buffer, word_offset: int = 0, *, executor: Executor | None = None) -> Lanes:
    """Lanes of `data`, a piece of a tensor that starts at word `word_offset` (0 to MOST_WORDS, else ValueError).

    All pieces but a tensor's last are whole words. With an executor, the pieces of large data are digested in its
    threads: the compiled kernel holds no GIL. Takes the compiled kernel where numba is installed, else the reference of
    the same bits.
    """
    if not has_compiled_kernel():
        return lanes_reference(data, word_offset)
    kernel, raw = _compiled_kernel(), _as_bytes(data)
    run = executor.map if executor is not None and raw.size > THREADS_WORTH_BYTES else map
    return _sum(run(lambda job: kernel(_as_words(job[0]), job[1]), _split(raw, word_offset, PIECE_BYTES)))


def lanes_reference(data: Buffer, word_offset: int = 0) -> Lanes:
    """Reference of `lanes` in numpy. Compiles nothing: sooner done in a process that digests little."""
    pieces = _split(_as_bytes(data), word_offset, REFERENCE_BYTES)
    return _sum(_reference_kernel(_as_words(raw), first) for raw, first in pieces)


def lanes_torch(tensor: torch.Tensor) -> Lanes:
    """Reference of `lanes` in torch, on the tensor's own device, for one whole tensor.

    int64 wraps as uint64 does; only a shift to the right must be cut back from the sign that it brings along.
    """
    import torch  # noqa: PLC0415 - whoever has a tensor has torch; nobody else should need it

    if tensor.numel() == 0:
        raise EmptyInputError("an empty tensor has no digest")
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = NO_LANES
    for start in range(0, raw.numel(), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        padded = torch.nn.functional.pad(piece, (0, -piece.numel() % WORD_BYTES)).view(-1, WORD_BYTES).to(torch.int64)
        words = sum((padded[:, byte] << 8 * byte for byte in range(WORD_BYTES)), torch.zeros_like(padded[:, 0]))
        out = []
        for keys in word_keys(start // WORD_BYTES, words.numel()):
            x = words ^ torch.from_numpy(keys.view(np.int64)).to(words.device)
            out.append(int(((x & _HALF) * (x >> 32 & _HALF)).sum().item()) & _MASK)
        total = add_lanes(total, (out[0], out[1]))
    return total


def lanes_on_device(raw: DeviceBytes, kernel: Callable[[Buffer, int], Lanes] = lanes) -> Lanes:
    """Lanes of a whole tensor that lies on an accelerator, of host copies of HOST_BYTES at most.

    `lanes_torch` would copy nothing, and takes int64 on the device, in operations that were never seen to give the same
    bits on an NPU.
    """
    if raw.numel() == 0:
        raise EmptyInputError("an empty tensor has no digest")
    found = PieceLanes(kernel)
    for place in range(0, raw.numel(), HOST_BYTES):
        found.add(raw[place : place + HOST_BYTES].cpu().numpy())
    return found.total


def word_keys(first: int, count: int) -> Iterable[_Words]:
    """What each of `count` words from `first` on is xored with, for each lane."""
    block, within = divmod(first, BLOCK_WORDS)
    blocks = np.arange(block, -(-(first + count) // BLOCK_WORDS), dtype=np.uint64)
    for lane, table in enumerate(_tables()):
        numbers = _scramble(np.uint64(BLOCK_NUMBERS + lane) + np.uint64(LANES) * blocks)
        windows = sliding_window_view(table, BLOCK_WORDS)[numbers >> np.uint64(WINDOW_BITS)]
        keys = windows ^ (numbers * np.uint64(GOLDEN))[:, None]
        yield keys.reshape(-1)[within : within + count]


@cache
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
    return raw.view(np.uint64)


def _split(raw: _Bytes, word_offset: int, piece_bytes: int) -> Iterable[tuple[_Bytes, int]]:
    """Pieces of so many bytes, each with the place of its first word."""
    first = operator.index(word_offset)
    if not 0 <= first <= MOST_WORDS:
        raise ValueError(f"a tensor's piece begins at one of its first {MOST_WORDS} words, not at {word_offset}")
    for start in range(0, raw.size, piece_bytes):
        yield raw[start : start + piece_bytes], first + start // WORD_BYTES


def _sum(pieces: Iterable[Lanes]) -> Lanes:
    total = NO_LANES
    for piece in pieces:
        total = add_lanes(total, piece)
    return total


def _scramble(numbers: _Words) -> _Words:
    z = (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(SCRAMBLE_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SCRAMBLE_2)
    return z ^ (z >> np.uint64(31))


@cache
def _tables() -> _Words:
    """One row per lane. Read-only: every caller has the same."""
    tables = _scramble(np.arange(LANES * TABLE_WORDS, dtype=np.uint64)).reshape(LANES, TABLE_WORDS)
    tables.setflags(write=False)
    return tables


def _reference_kernel(words: _Words, first: int) -> Lanes:
    out = []
    for keys in word_keys(first, words.size):
        x = words ^ keys
        out.append(int(((x & np.uint64(_HALF)) * (x >> np.uint64(32))).sum(dtype=np.uint64)))
    return out[0], out[1]


@cache
def _compiled_kernel() -> Callable[[_Words, int], Lanes]:
    """The kernel as machine code. Not cached on disk: a pod's code is read-only, and compiling takes less than 1 s."""
    from rollfleet_kernels import digest_numba  # noqa: PLC0415 - numba is optional and slow to import

    compiled: Callable[..., Any] = digest_numba.compile_kernel()

    def kernel(words: _Words, first: int) -> Lanes:
        one, other = compiled(words, np.uint64(first), _tables())
        return int(one), int(other)

    return kernel
