"""Reading ahead: the same items in the same order as without it, whoever is slow and whatever fails."""

import threading
import weakref
from contextlib import closing, nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.weights.ahead import read_ahead

WAIT_S = 10.0


@dataclass(frozen=True)
class Item:
    number: int
    nbytes: int


class Got:
    def __init__(self, item: Item) -> None:
        self.item = item


def numbered(sizes: list[int]) -> list[Item]:
    return [Item(number, size) for number, size in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 10), max_size=12), most=st.integers(0, 20))
def test_every_item_comes_once_and_in_order(sizes: list[int], most: int) -> None:
    items = numbered(sizes)
    assert [(item, got.item) for item, got in read_ahead(items, Got, most)] == [(item, item) for item in items]


@given(sizes=st.lists(st.integers(0, 10), max_size=12), most=st.integers(0, 20), failing=st.integers(0, 11))
def test_what_fails_is_raised_in_its_place(sizes: list[int], most: int, failing: int) -> None:
    def fetch(item: Item) -> int:
        if item.number == failing:
            raise ValueError(item.number)
        return item.number

    found: list[int] = []
    items = read_ahead(numbered(sizes), fetch, most)
    with closing(items), pytest.raises(ValueError, match=str(failing)) if failing < len(sizes) else nullcontext():
        for _, number in items:
            found.append(number)
    assert found == list(range(min(failing, len(sizes))))


def test_the_next_is_fetched_while_the_one_before_is_used() -> None:
    fetched = [threading.Event(), threading.Event()]

    def fetch(item: Item) -> None:
        fetched[item.number].set()

    with closing(read_ahead(numbered([1, 1]), fetch, 2)) as items:
        next(items)
        assert fetched[1].wait(WAIT_S)


def test_two_that_are_too_large_together_are_fetched_one_after_the_other() -> None:
    fetched = []
    for item, _ in read_ahead(numbered([1, 9, 1, 1]), fetched.append, 5):
        fetched_by_now = [each.number for each in fetched]
        assert fetched_by_now[: item.number + 1] == list(range(item.number + 1))
        if item.number in (0, 1):
            assert len(fetched_by_now) == item.number + 1


def test_nothing_is_fetched_any_more_once_it_is_closed() -> None:
    inside, go_on, left = threading.Event(), threading.Event(), []

    def fetch(item: Item) -> None:
        if item.number:
            inside.set()
            assert go_on.wait(WAIT_S)
            left.append(item.number)

    items = read_ahead(numbered([1, 1, 1]), fetch, 2)
    next(items)
    assert inside.wait(WAIT_S)
    threading.Timer(0.0, go_on.set).start()
    items.close()
    assert left == [1]


def test_at_most_two_are_held() -> None:
    alive: list[weakref.ref[Got]] = []

    def fetch(item: Item) -> Got:
        got = Got(item)
        alive.append(weakref.ref(got))
        return got

    with closing(read_ahead(numbered([1] * 8), fetch, 2)) as items:
        for _, got in items:
            del got
            assert sum(each() is not None for each in alive) <= 2


def test_a_thread_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(read_ahead(numbered([1, 1]), Got, 2))
