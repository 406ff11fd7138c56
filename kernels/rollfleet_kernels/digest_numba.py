"""The digest's inner loop as machine code. Imports numba, so only `digest` imports it, and only when it digests.

numba widens uint32 arithmetic to 64 bits; each step is cut back by a cast, which LLVM turns into plain 32-bit vector
code.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from rollfleet_kernels.digest import INDEX_MULTIPLIER, MULTIPLIERS

_u32 = np.uint32
_M0, _M1, _M2, _M3 = (np.uint32(multiplier) for multiplier in MULTIPLIERS)
_STEP = np.uint32(INDEX_MULTIPLIER)
_HALF = np.uint32(16)
_LATE = np.uint32(15)
# Read-only arrays are the wider type: writable ones convert to it.
_SIGNATURE = types.UniTuple(types.uint32, 4)(
    types.Array(types.uint32, 1, "C", readonly=True), types.uint32, types.Array(types.uint32, 1, "C")
)


def compile_kernel() -> Callable[..., Any]:
    """lanes(words, index of the first word in its chunk, the chunk's four seeds), without the GIL."""

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def mix(word: Any, key: Any, multiplier: Any) -> Any:
        h = _u32(word ^ key)
        h = _u32(_u32(h ^ _u32(h >> _HALF)) * multiplier)
        return _u32(h ^ _u32(h >> _LATE))

    @numba.njit(_SIGNATURE, nogil=True)  # type: ignore[untyped-decorator]
    def kernel(words: Any, index: Any, seeds: Any) -> Any:
        a = b = c = d = _u32(0)
        s0, s1, s2, s3 = seeds[0], seeds[1], seeds[2], seeds[3]
        place = _u32(_u32(index) * _STEP)
        for i in range(words.size):
            word = words[i]
            a = _u32(a + mix(word, _u32(place + s0), _M0))
            b = _u32(b + mix(word, _u32(place + s1), _M1))
            c = _u32(c + mix(word, _u32(place + s2), _M2))
            d = _u32(d + mix(word, _u32(place + s3), _M3))
            place = _u32(place + _STEP)
        return a, b, c, d

    compiled: Callable[..., Any] = kernel
    return compiled
