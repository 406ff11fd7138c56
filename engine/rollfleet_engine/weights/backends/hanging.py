"""Calls that may never come back: so many may be left behind, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from rollfleet_transport.aside import Aside

MOST_HANGING = 8  # threads that were given up and still wait; each holds a socket and its stack

_T = TypeVar("_T")
_places = threading.BoundedSemaphore(MOST_HANGING)


class HangingError(Exception):
    """There was no answer in time, or too many calls before this one still wait for theirs."""


def begin(name: str, call: Callable[[], _T], late: Callable[[_T], object] | None = None) -> Aside[_T]:
    """The call, in a thread of its own. HangingError where too many before it hang."""
    if not _places.acquire(blocking=False):
        raise HangingError(f"{MOST_HANGING} calls before this one still wait for an answer: restart the engine")
    try:
        return Aside(name, call, late=late, ended=_places.release)
    except BaseException:  # no room for a thread: nothing was begun
        _places.release()
        raise


def within(seconds: float, name: str, call: Callable[[], _T], late: Callable[[_T], object] | None = None) -> _T:
    """What the call returns or raises, if that comes in time; else HangingError, and its thread (a daemon) is left.

    What it returns too late is given to `late` by that thread, or dropped.
    """
    if seconds <= 0:
        raise HangingError("no time is left for it")
    work = begin(name, call, late)
    if not work.done(seconds) and work.give_up():
        raise HangingError(f"no answer within {round(seconds, 1):g} s")
    return work.result()
