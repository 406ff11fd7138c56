"""`make bench-digest`: the digest of tensors beside a plain copy and a plain sum of the same bytes, interleaved.

python -m tests.bench.digests [-n ROUNDS]

The digest and the sum run in as many threads as a worker's digest has, on pieces of the same size; the copy is one call
of numpy, which is one thread of memcpy. Bytes are random, and of no tensor the caches keep more than fits. Ends with 1
where the digest of a tensor of PIECE_BYTES or more is below 3 GiB/s.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollfleet_kernels.digest import PIECE_BYTES, lanes, warm_up
from tests.bench.quiet import DisturbedError, undisturbed

THREADS = 2  # rollfleet_engine.vllm.transfer_engine.DIGEST_THREADS
MIB, GIB = 1 << 20, 1 << 30
LEAST_GIB_S = 3.0
LEAST_BYTES = 256 * MIB  # of one measurement: small tensors are digested several times
# name, dtype as numpy holds it, elements: a norm, a projection, an MLP, an embedding; the last is of odd length.
TENSORS = (
    ("F32, 64 KiB", np.float32, 16 << 10),
    ("BF16, 1 MiB", np.uint16, 512 << 10),
    ("F32, 4 MiB", np.float32, 1 << 20),
    ("BF16, 32 MiB", np.uint16, 16 << 20),
    ("F32, 512 MiB", np.float32, 128 << 20),
    ("F8, 256 MiB and 3 bytes", np.uint8, (256 << 20) + 3),
)
Bytes = npt.NDArray[np.uint8]


@dataclass
class Rates:
    """GiB/s, a value a round."""

    digest: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


def summed(raw: Bytes, pool: ThreadPoolExecutor) -> int:
    """A sum of 64-bit words, which reads every byte and does next to nothing with it."""
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    step = PIECE_BYTES // 8
    parts = [words[at : at + step] for at in range(0, words.size, step)]
    return sum(int(each) for each in pool.map(lambda part: part.sum(), parts))


def rate(work: Callable[[], object], size: int) -> float:
    """GiB/s of `work` on `size` bytes."""
    times = max(1, LEAST_BYTES // size)
    began = time.perf_counter()
    for _ in range(times):
        work()
    return times * size / GIB / (time.perf_counter() - began)


def measure(dtype: type, elements: int, rounds: int, pool: ThreadPoolExecutor) -> Rates:
    """One tensor, after a round that warms up."""
    size = elements * np.dtype(dtype).itemsize
    raw = np.frombuffer(np.random.default_rng(1).bytes(size), dtype=np.uint8)
    target, rates = np.empty_like(raw), Rates()

    def once() -> tuple[float, float, float]:
        digest = rate(lambda: lanes(raw, executor=pool), size)
        copy = rate(lambda: np.copyto(target, raw), size)
        return digest, copy, rate(lambda: summed(raw, pool), size)

    for place in range(rounds + 1):
        digest, copy, total = undisturbed(once)
        if place:
            rates.digest.append(digest)
            rates.copy.append(copy)
            rates.total.append(total)
    return rates


def main() -> int:
    """0 where the digest is fast enough."""
    parser = argparse.ArgumentParser(prog="tests.bench.digests", description="the digest beside a copy and a sum")
    parser.add_argument("-n", "--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    warm_up()
    passed = True
    print(f"GiB/s, median of {rounds} rounds (slowest)")
    with ThreadPoolExecutor(THREADS) as pool:
        for name, dtype, elements in TENSORS:
            try:
                rates = measure(dtype, elements, rounds, pool)
            except DisturbedError as error:
                print(f"bench-digest: {error}", file=sys.stderr)
                return 1
            told = (
                f"{what} {statistics.median(values):6.2f} ({min(values):.2f})"
                for what, values in (("digest", rates.digest), ("copy", rates.copy), ("sum", rates.total))
            )
            print(f"  {name:<24} {'   '.join(told)}", flush=True)
            large = elements * np.dtype(dtype).itemsize >= PIECE_BYTES
            passed &= not large or statistics.median(rates.digest) >= LEAST_GIB_S
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
