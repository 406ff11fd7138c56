"""When somebody could act: operator and API server both up. Time in which nobody could costs no deadline.

A count begins with a term. What was lost in between, by reads that failed, is taken off and does not begin it anew: an
API server that drops a request now and then must not keep deadlines from passing. It is counted fleet by fleet, since
a read that fails for one of them (a namespace with too many objects to list in time) is no reason for the others.
A wall clock that is set forward counts as time in which nobody could act; one that is set back begins the count anew.
"""

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta

Interval = tuple[datetime, datetime]

EVERYWHERE = ""  # instead of a fleet's key
MAX_INTERVALS = 64  # of one fleet; of more the oldest count as time in which somebody could act
STEP = timedelta(seconds=5)  # by which a clock must be off its course to have been set


class Uptime:
    """Told by the reads that begin every pass. Keys are those of fleets."""

    def __init__(self, clock: Callable[[], datetime], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._is_up = False
        self._last: tuple[datetime, float] | None = None
        self._lost: dict[str, datetime] = {}  # since when
        self._away: dict[str, deque[Interval]] = {}
        self.since: datetime | None = None

    def seen(self, key: str = EVERYWHERE) -> None:
        """The API server answered."""
        now = self._look_at_the_clock()
        if not self._is_up:
            self._begin(now)
        for whose in {key, EVERYWHERE}:
            began = self._lost.pop(whose, None)
            if began is not None:
                self._took(whose, (began, now))

    def now(self) -> datetime:
        """The time, for `lost`."""
        return self._clock()

    def lost(self, key: str = EVERYWHERE, asked: datetime | None = None) -> None:
        """The API server did not answer what it was asked then: it takes seconds to find out."""
        if self._is_up:
            now = self._look_at_the_clock()
            self._lost.setdefault(key, now if asked is None else min(asked, now))

    def ended(self) -> None:
        """The term is over; the next answer begins a new count."""
        self._is_up = False
        self._last = None
        self._lost.clear()
        self._away.clear()

    def forget(self, key: str) -> None:
        """The fleet is gone."""
        self._lost.pop(key, None)
        self._away.pop(key, None)

    def away(self, key: str) -> tuple[Interval, ...]:
        """When nobody could act for this fleet since the count began, oldest first; intervals may overlap."""
        return tuple(sorted((*self._away.get(EVERYWHERE, ()), *self._away.get(key, ()))))

    def _begin(self, now: datetime) -> None:
        self._is_up = True
        self.since = now
        self._lost.clear()
        self._away.clear()

    def _took(self, key: str, interval: Interval) -> None:
        self._away.setdefault(key, deque(maxlen=MAX_INTERVALS)).append(interval)

    def _look_at_the_clock(self) -> datetime:
        """The time; and whether the clock was set since the last look."""
        now, ticks = self._clock(), self._monotonic()
        if self._last is not None and self._is_up:
            before, ticks_before = self._last
            step = now - before - timedelta(seconds=ticks - ticks_before)
            if step > STEP:
                self._took(EVERYWHERE, (before, before + step))
            elif step < -STEP:
                self._begin(now)
        self._last = now, ticks
        return now
