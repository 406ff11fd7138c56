"""Weights that another trainer's code hands over: gone through once, or given tensor by tensor. Knows nothing of TRL.

What is yielded is a copy. Gatherers let go of a tensor when they move on (FSDP1 frees its memory, a merged adapter is
taken out again in place), and a sender still holds it then, until its part is full.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rollfleet_trainer.errors import NotPossible

if TYPE_CHECKING:
    import torch

    from rollfleet_trainer.sources import Pair

Announced = tuple[str, str, Sequence[int]]  # name, dtype as "bfloat16", shape
SPENT = (
    "an attempt failed, and the fleet asks for the same weights again (status of the WeightVersion tells why): "
    "they are handed over once only"
)


def copied(tensor: torch.Tensor, dtype: torch.dtype | None, *, to_host: bool = False) -> torch.Tensor:
    """Memory of our own, in `dtype` where it is a floating one, complete when this returns."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = tensor.detach().to(device="cpu" if to_host else tensor.device, dtype=wanted, copy=True)
    if made.device.type != "cpu":
        import torch  # noqa: PLC0415

        torch.accelerator.current_stream(made.device).synchronize()  # another thread may read it
    return made


class OnePass:
    """A callable for `update`, around an iterator that must be gone through to its end, and can be only once.

    announced: what must come, in its order. keep: hold copies in host memory, so that a second attempt can have them.
    """

    def __init__(
        self,
        announced: Sequence[Announced],
        pairs: Iterable[Pair],
        dtype: torch.dtype | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self._announced = [(name, kind, list(shape)) for name, kind, shape in announced]
        self._pairs = iter(pairs)
        self._dtype, self._keep = dtype, keep
        self._kept: list[Pair] = []
        self._begun = self._ended = False

    def require_another_pass(self) -> None:
        """NotPossible where there was one already, and nothing is kept."""
        if self._begun and not self._keep:
            raise NotPossible(f"{SPENT}; FleetClient(keep_copy=True) holds a copy for that")

    def __call__(self) -> Iterator[Pair]:
        """A pass. Raises as require_another_pass."""
        self.require_another_pass()
        if self._begun:
            return iter(self._rest())
        self._begun = True
        return self._first()

    def exhaust(self) -> None:
        """To its end: other ranks are in the middle of the same collectives, and its own clean-up comes last."""
        for _ in self._pairs:
            pass

    def _rest(self) -> list[Pair]:
        """All that was kept, after what the first pass did not come to."""
        if not self._ended:
            for _ in self._first(len(self._kept)):
                pass
        return self._kept

    def _first(self, place: int = 0) -> Iterator[Pair]:
        for name, tensor in self._pairs:
            self._require_announced(place, (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            place += 1
            mine = copied(tensor, self._dtype, to_host=self._keep)
            if self._keep:
                self._kept.append((name, mine))
            yield name, mine
        self._require_announced(place, None)
        self._ended = True

    def _require_announced(self, place: int, came: tuple[str, str, list[int]] | None) -> None:
        expected = self._announced[place] if place < len(self._announced) else None
        if came != expected:
            words = [" ".join(map(str, each)) if each is not None else "nothing more" for each in (expected, came)]
            raise NotPossible(f"tensor {place}: {words[0]} was announced, {words[1]} came")


class Handed:
    """A callable for `update`: pairs from the thread that has them to the one that sends, one at a time.

    `put` waits until the one before was taken; `end` or `fail` comes last. `over` is the other side's.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Pair | None = None
        self._last = self._over = self._begun = False
        self._broken: BaseException | None = None

    def put(self, pair: Pair) -> bool:
        """Hand one over. False where nobody takes it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or self._over)
            self._next = pair
            self._changed.notify_all()
            return not self._over

    def end(self) -> None:
        """There are no more."""
        with self._changed:
            self._last = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """There will be no more: whoever takes raises this."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def over(self) -> None:
        """Nobody takes any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def require_another_pass(self) -> None:
        """NotPossible where there was one already."""
        if self._begun:
            raise NotPossible(SPENT)

    def __call__(self) -> Iterator[Pair]:
        """The pass. Raises as require_another_pass."""
        self.require_another_pass()
        self._begun = True
        return self._pairs()

    def _pairs(self) -> Iterator[Pair]:
        while (pair := self._take()) is not None:
            yield pair

    def _take(self) -> Pair | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._last or self._broken is not None)
            if self._broken is not None:
                raise self._broken
            pair, self._next = self._next, None
            self._changed.notify_all()
            return pair
