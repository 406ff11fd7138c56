"""Tensors of a checkpoint, the next one read and digested while the model loads the one before."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

MOST_AHEAD = 256 << 20  # bytes of two tensors together; every worker of a node reads its own


class Sized(Protocol):
    """What can be fetched."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


Item = TypeVar("Item", bound=Sized)
Got = TypeVar("Got")


def read_ahead(
    items: Sequence[Item], fetch: Callable[[Item], Got], most_bytes: int = MOST_AHEAD
) -> Generator[tuple[Item, Got], None, None]:
    """Each item with what `fetch` gives for it, in order; at most two of these are held here at a time.

    The next one is fetched by a thread while the caller does something with the one before, unless both together have
    more than `most_bytes`. What fetch raises is raised in the place of its item. Close it, or end it: only then no
    thread is inside `fetch` any more.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rollfleet-ahead") as thread:
        coming: Future[Got] | None = None
        for place, item in enumerate(items):
            got = fetch(item) if coming is None else coming.result()
            coming = None
            following = items[place + 1 : place + 2]
            if following and item.nbytes + following[0].nbytes <= most_bytes:
                coming = thread.submit(fetch, following[0])
            yield item, got
            del got  # the caller's by now, who may be done with it
