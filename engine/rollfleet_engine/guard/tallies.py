"""What the guard counts, in plain numbers: made by who acts, read at a scrape. No label is a stranger's word."""

from collections import Counter

from rollfleet_protocol.refusals import ClosedReason

# Upper bounds of the histogram, seconds: a pause takes some 10 ms, a large checkpoint minutes.
BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Durations:
    """One histogram of seconds."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.total_s += seconds
        place = next((place for place, bound in enumerate(BOUNDS_S) if seconds <= bound), len(BOUNDS_S))
        self._counts[place] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them, with +Inf at the end."""
        names, sums, so_far = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"], [], 0
        for count in self._counts:
            so_far += count
            sums.append(float(so_far))
        return list(zip(names, sums, strict=True))


class ClosedTime:
    """Seconds that the gate was closed, by reason."""

    def __init__(self, now: float) -> None:
        self._sums = dict.fromkeys(ClosedReason, 0.0)
        self._reason: ClosedReason | None = ClosedReason.STARTING
        self._since = now

    def move(self, reason: ClosedReason | None, now: float) -> None:
        """From now on closed for this reason; None: open."""
        self._sums = self.sums(now)
        self._reason, self._since = reason, now

    def sums(self, now: float) -> dict[ClosedReason, float]:
        """Up to now."""
        running = {} if self._reason is None else {self._reason: now - self._since}
        return {reason: sum_s + running.get(reason, 0.0) for reason, sum_s in self._sums.items()}


class Tallies:
    """All counts of one guard's process."""

    def __init__(self, now: float) -> None:
        self.admitted = 0
        self.refused: Counter[str] = Counter()  # requests on the serving port, by reason; of a closed gate: by its own
        self.control: Counter[tuple[str, str]] = Counter()  # calls on the control port, by command and outcome
        self.operations: dict[tuple[str, str], Durations] = {}  # by operation and how it ended
        self.closed = ClosedTime(now)

    def operation(self, name: str, status: str, seconds: float) -> None:
        """One that ended."""
        self.operations.setdefault((name, status), Durations()).add(seconds)
