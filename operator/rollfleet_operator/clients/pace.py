"""How fast something may come again: so many at once, then so many a second."""


class Pace:
    """A token bucket. It is told the time, in seconds of any clock that does not go back."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most = most
        self._per_s = per_s
        self._left = most
        self._since: float | None = None

    def take(self, now: float) -> float:
        """One comes; the seconds until the next may."""
        if self._since is not None:
            self._left = min(self._most, self._left + max(0.0, now - self._since) * self._per_s)
        self._since = now
        self._left = max(self._left - 1, -1.0)  # who came too early owes no more than one
        return max(0.0, -self._left) / self._per_s
