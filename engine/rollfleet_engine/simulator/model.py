"""What a simulated model says: a pure function of its weights' digest and the tokens before.

So a test computes the only right answer of each checkpoint, as it knows that of a real model from its expected.json.
"""

import hashlib
from collections.abc import Sequence
from typing import Self

from rollfleet_engine.simulator.tokens import ALPHABET

_NUMBER_BYTES = 4
_HASH_BYTES = 16


class Context:
    """The tokens so far, under the weights of one digest. Adding a token costs the same at any length."""

    def __init__(self, digest: str, tokens: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest.encode(), digest_size=_HASH_BYTES)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """One more token."""
        self._hash.update(token.to_bytes(_NUMBER_BYTES, "little"))

    def copy(self) -> Self:
        """An independent continuation."""
        other = type(self).__new__(type(self))
        other._hash = self._hash.copy()
        return other

    def best(self) -> int:
        """The token that greedy decoding takes next."""
        return int.from_bytes(self._hash.digest()[:_NUMBER_BYTES], "little") % len(ALPHABET)

    def logprob(self, token: int) -> float:
        """Natural logarithm of a token's probability here: that of the best one in (-1, -0.1], others below -3."""
        salted = self._hash.copy()
        salted.update(b"p" + token.to_bytes(_NUMBER_BYTES, "little"))
        share = int.from_bytes(salted.digest()[:_NUMBER_BYTES], "little") / 2**32
        return -0.1 - 0.9 * share if token == self.best() else -3.0 - 5.0 * share


def greedy(digest: str, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The next `count` tokens."""
    context = Context(digest, prompt)
    found = []
    for _ in range(count):
        found.append(context.best())
        context.append(found[-1])
    return tuple(found)


def following_logprobs(digest: str, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probability of each token after the first, given those before it."""
    context = Context(digest, tokens[:1])
    found = []
    for token in tokens[1:]:
        found.append(context.logprob(token))
        context.append(token)
    return tuple(found)
