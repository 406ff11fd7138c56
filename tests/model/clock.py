"""The simulated clock: what happens next, in the order of time."""

import heapq
from collections.abc import Callable
from datetime import datetime, timedelta

from tests.support.builders import NOW


class Clock:
    """Seconds since NOW, and what is to be done when."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def now(self) -> datetime:
        """As operators see it."""
        return NOW + timedelta(seconds=self.time)

    def second(self) -> datetime:
        """As the API server stamps objects: whole seconds."""
        return self.now().replace(microsecond=0)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something then; things of the same time in the order in which they were asked for."""
        self._serial += 1
        heapq.heappush(self._agenda, (self.time + max(0.0, delay_s), self._serial, act))

    def step(self) -> None:
        """Go on to the next event."""
        when, _, act = heapq.heappop(self._agenda)
        self.time = max(self.time, when)
        self.events += 1
        act()
