"""The digest's inner loop as machine code. Imports numba, so only `digest` imports it, and only when it digests.

The loop over a block's words has nothing in it but loads, xors, a shift, a product and a sum, which LLVM turns into
vector code (a multiplication of 32 by 32 bits into 64 is one instruction there).
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from rollfleet_kernels.digest import BLOCK_NUMBERS, BLOCK_WORDS, GOLDEN, LANES, SCRAMBLE_1, SCRAMBLE_2, WINDOW_BITS

_u64 = np.uint64
_ONE, _LANES, _BLOCK = _u64(1), _u64(LANES), _u64(BLOCK_WORDS)
_BLOCK_NUMBERS, _WINDOW_BITS = _u64(BLOCK_NUMBERS), _u64(WINDOW_BITS)
_GOLDEN, _SCRAMBLE_1, _SCRAMBLE_2 = _u64(GOLDEN), _u64(SCRAMBLE_1), _u64(SCRAMBLE_2)
_S27, _S30, _S31, _S32 = (_u64(shift) for shift in (27, 30, 31, 32))
_LOW = _u64(0xFFFFFFFF)
# Read-only arrays are the wider type: writable ones convert to it.
_SIGNATURE = types.UniTuple(types.uint64, 2)(
    types.Array(types.uint64, 1, "C", readonly=True), types.uint64, types.Array(types.uint64, 2, "C", readonly=True)
)


def compile_kernel() -> Callable[..., Any]:
    """lanes(words, place of the first word in its tensor, the lanes' tables), without the GIL."""

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def block_number(block: Any, lane: Any) -> Any:
        z = _u64((_BLOCK_NUMBERS + _LANES * block + lane + _ONE) * _GOLDEN)
        z = _u64((z ^ (z >> _S30)) * _SCRAMBLE_1)
        z = _u64((z ^ (z >> _S27)) * _SCRAMBLE_2)
        return _u64(z ^ (z >> _S31))

    @numba.njit(_SIGNATURE, nogil=True)  # type: ignore[untyped-decorator]
    def kernel(words: Any, first: Any, tables: Any) -> Any:
        a = b = _u64(0)
        count, done = words.size, 0
        while done < count:
            place = _u64(first + _u64(done))
            block, within = _u64(place // _BLOCK), np.int64(place % _BLOCK)
            size = min(BLOCK_WORDS - within, count - done)
            of_a, of_b = block_number(block, _u64(0)), block_number(block, _ONE)
            at_a, at_b = within + np.int64(of_a >> _WINDOW_BITS), within + np.int64(of_b >> _WINDOW_BITS)
            key_a, key_b = _u64(of_a * _GOLDEN), _u64(of_b * _GOLDEN)
            part = words[done : done + size]
            table_a, table_b = tables[0, at_a : at_a + size], tables[1, at_b : at_b + size]
            for i in range(size):
                x = part[i] ^ key_a ^ table_a[i]
                a += (x & _LOW) * (x >> _S32)
                y = part[i] ^ key_b ^ table_b[i]
                b += (y & _LOW) * (y >> _S32)
            done += size
        return a, b

    compiled: Callable[..., Any] = kernel
    return compiled
