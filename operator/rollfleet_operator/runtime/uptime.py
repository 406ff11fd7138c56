"""Since when somebody could act: operator and API server both up. Deadlines count from there at least."""

from collections.abc import Callable
from datetime import datetime


class Uptime:
    """Told by the reads that begin every pass."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._is_up = False
        self.since: datetime | None = None

    def seen(self) -> None:
        """The API server answered."""
        if not self._is_up:
            self._is_up = True
            self.since = self._clock()

    def lost(self) -> None:
        """The API server did not answer; the next answer begins a new count."""
        self._is_up = False
