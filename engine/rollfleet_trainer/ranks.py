"""Sharded trainers: every rank goes through the weights, rank 0 alone speaks to cluster and engines.

Rank 0 tells the others what to do next; while it waits for the operator it says so every few seconds, so that no
collective of theirs times out. What an update ends with, good or bad, is told to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollfleet_trainer.errors import NotPossible, TrainerError

if TYPE_CHECKING:
    from rollfleet_trainer.sources import Weights

T = TypeVar("T")


class Word(StrEnum):
    """What rank 0 tells the others."""

    WAIT = "Wait"  # with the version that is asked for
    SEND = "Send"  # go through the weights once
    DONE = "Done"  # with what it gave
    FAILED = "Failed"  # with the error


class Ranks(Protocol):
    """The ranks of a trainer. Both calls are collectives: one tells, all others hear."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def tell(self, word: Word, what: Any = None) -> None: ...

    def hear(self) -> tuple[Word, Any]: ...


class Alone:
    """A trainer of one process."""

    rank, size = 0, 1

    def tell(self, word: Word, what: Any = None) -> None:
        """There is nobody to hear it."""

    def hear(self) -> tuple[Word, Any]:
        """Nobody tells it anything."""
        raise RuntimeError("a trainer of one process hears of nobody")


class ProcessGroupRanks:
    """Over a process group of torch.distributed. A gloo group of all ranks keeps words off the devices."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - who has a group has torch

        self._dist, self._group = dist, group
        self.rank, self.size = int(dist.get_rank(group)), int(dist.get_world_size(group))
        self._source = int(dist.get_global_rank(group, 0))

    def tell(self, word: Word, what: Any = None) -> None:
        """To all others."""
        self._dist.broadcast_object_list([word.value, what], src=self._source, group=self._group)

    def hear(self) -> tuple[Word, Any]:
        """From rank 0. torch pickles between ranks, as it does for all objects."""
        said: list[Any] = [None, None]
        self._dist.broadcast_object_list(said, src=self._source, group=self._group)
        return Word(said[0]), said[1]


def lead(ranks: Ranks, act: Callable[[], T]) -> T:
    """What rank 0 does for all: how it ends is told to the others, good or bad."""
    try:
        found = act()
    except TrainerError as error:
        ranks.tell(Word.FAILED, error)
        raise
    except Exception as error:  # of the caller's own, which others may not be able to read
        ranks.tell(Word.FAILED, TrainerError(f"rank 0: {type(error).__name__}: {error}"))
        raise
    ranks.tell(Word.DONE, found)
    return found


def follow(ranks: Ranks, weights: Weights, asked: Callable[[int], None]) -> Any:
    """An update or a publication on all ranks but 0: its end is theirs. `asked` is told of the version."""
    refused: NotPossible | None = None  # of a tensor that rank 0 refuses as well, and then says so
    while True:
        word, what = ranks.hear()
        if word is Word.WAIT and what is not None:
            asked(what)
        elif word is Word.SEND:
            try:
                for _ in weights.go_through():
                    pass  # gathered for rank 0
            except NotPossible as error:
                refused = error
        elif word is Word.DONE:
            if refused is not None:
                raise refused
            return what
        elif word is Word.FAILED:
            raise what
