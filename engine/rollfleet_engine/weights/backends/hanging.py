"""Calls that may never come back, and that nothing can end: made in a thread that is waited for only so long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

MOST_HANGING = 8  # threads that were given up and still wait; each holds a socket and its stack

_T = TypeVar("_T")
_places = threading.BoundedSemaphore(MOST_HANGING)


class HangingError(Exception):
    """There was no answer in time, or too many calls before this one still wait for theirs."""


def within(seconds: float, name: str, call: Callable[[], _T]) -> _T:
    """What the call returns or raises, if that comes in time; else HangingError, and its thread (a daemon) is left.

    What it returns too late is dropped by that thread.
    """
    if seconds <= 0:
        raise HangingError("no time is left for it")
    if not _places.acquire(blocking=False):
        raise HangingError(f"{MOST_HANGING} calls before this one still wait for an answer: restart the engine")
    outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - carried over to who waits, who raises it again
            outcome.put((None, error))
        finally:
            _places.release()

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise HangingError(f"no answer within {seconds:g} s") from None
    if error is None:
        return result  # type: ignore[return-value]
    try:
        raise error
    finally:
        del error  # its traceback holds this frame: what the call held would outlive it
