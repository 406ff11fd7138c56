"""Since when somebody could act."""

from datetime import UTC, datetime, timedelta

from rollfleet_operator.runtime.uptime import Uptime

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def test_it_counts_from_the_first_answer_and_from_the_first_after_an_outage() -> None:
    times = iter(NOW + timedelta(minutes=minute) for minute in range(10))
    uptime = Uptime(lambda: next(times))
    assert uptime.since is None
    uptime.seen()
    uptime.seen()
    assert uptime.since == NOW
    uptime.lost()
    uptime.lost()
    assert uptime.since == NOW
    uptime.seen()
    assert uptime.since == NOW + timedelta(minutes=1)
