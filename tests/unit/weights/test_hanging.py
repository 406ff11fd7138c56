"""Calls that may never come back."""

import threading

import pytest

from rollfleet_engine.weights.backends.hanging import MOST_HANGING, HangingError, within


def test_what_it_returns_and_raises_comes_over() -> None:
    assert within(5, "test", lambda: 7) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        within(5, "test", lambda: int("x"))


def test_no_time_is_no_call() -> None:
    called = threading.Event()
    with pytest.raises(HangingError, match="no time is left"):
        within(0, "test", called.set)
    assert not called.is_set()


def test_who_hangs_is_left_and_takes_a_place_until_it_comes_back() -> None:
    released = threading.Event()
    back = threading.Semaphore(0)

    def hang() -> None:
        released.wait(60)

    for _ in range(MOST_HANGING):
        with pytest.raises(HangingError, match="no answer within"):
            within(0.01, "test", hang)
    with pytest.raises(HangingError, match="restart the engine"):
        within(5, "test", back.release)
    released.set()
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(60)
    within(5, "test", back.release)
    assert back.acquire(timeout=5)
