"""When somebody could act."""

from datetime import UTC, datetime, timedelta

from rollfleet_operator.runtime.uptime import MAX_INTERVALS, Uptime

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
ONE, OTHER = "rl/one", "rl/other"


class Time:
    """A wall clock, and one that nobody sets."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.set_by = 0.0
        self.uptime = Uptime(self.wall, lambda: self.seconds)

    def wall(self) -> datetime:
        return at(self.seconds + self.set_by)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_it_counts_from_the_first_answer_of_a_term() -> None:
    time = Time()
    time.uptime.lost(ONE)
    assert time.uptime.since is None
    for time.seconds in (10, 20):
        time.uptime.seen(ONE)
    assert (time.uptime.since, time.uptime.away(ONE)) == (at(10), ())
    time.uptime.ended()
    time.seconds = 60
    time.uptime.seen(ONE)
    assert (time.uptime.since, time.uptime.away(ONE)) == (at(60), ())


def test_an_outage_is_taken_off_and_begins_no_new_count() -> None:
    time = Time()
    time.uptime.seen(ONE)
    for time.seconds in (10, 12, 14):
        time.uptime.lost(ONE)
    time.seconds = 15
    time.uptime.seen(ONE)
    assert (time.uptime.since, time.uptime.away(ONE)) == (at(0), ((at(10), at(15)),))


def test_an_outage_began_when_what_was_not_answered_was_asked() -> None:
    time = Time()
    time.uptime.seen(ONE)
    asked = time.uptime.now()
    time.seconds = 10
    time.uptime.lost(ONE, asked)
    time.seconds = 15
    time.uptime.seen(ONE)
    assert time.uptime.away(ONE) == ((at(0), at(15)),)


def test_reads_that_fail_for_one_fleet_are_no_outage_for_another() -> None:
    time = Time()
    time.uptime.seen(ONE)
    time.seconds = 10
    time.uptime.lost(ONE)
    time.seconds = 20
    time.uptime.seen(OTHER)
    time.seconds = 30
    time.uptime.seen(ONE)
    assert (time.uptime.away(ONE), time.uptime.away(OTHER)) == (((at(10), at(30)),), ())


def test_an_outage_that_a_list_found_is_one_for_all_until_anybody_is_answered() -> None:
    time = Time()
    time.uptime.seen(ONE)
    time.seconds = 10
    time.uptime.lost()
    time.seconds = 20
    time.uptime.seen(OTHER)
    assert time.uptime.away(ONE) == time.uptime.away(OTHER) == ((at(10), at(20)),)


def test_an_api_server_that_comes_and_goes_for_ever_is_remembered_in_part() -> None:
    time = Time()
    time.uptime.seen(ONE)
    for _ in range(1000):
        time.seconds += 1
        time.uptime.lost(ONE)
        time.seconds += 1
        time.uptime.seen(ONE)
    assert time.uptime.away(ONE) == tuple((at(s), at(s + 1)) for s in range(2001 - 2 * MAX_INTERVALS, 2000, 2))


def test_a_clock_that_is_set_forward_lets_no_deadline_pass() -> None:
    time = Time()
    time.uptime.seen(ONE)
    time.seconds, time.set_by = 10, 3600
    time.uptime.seen(ONE)
    assert (time.uptime.since, time.uptime.away(ONE)) == (at(0), ((at(0), at(3600)),))


def test_a_clock_that_is_set_back_begins_a_new_count() -> None:
    time = Time()
    time.uptime.seen(ONE)
    time.seconds, time.set_by = 10, -3600
    time.uptime.seen(ONE)
    assert (time.uptime.since, time.uptime.away(ONE)) == (at(-3590), ())


def test_a_fleet_that_is_gone_is_forgotten() -> None:
    time = Time()
    time.uptime.seen(ONE)
    time.uptime.lost(ONE)
    time.seconds = 5
    time.uptime.seen(ONE)
    time.uptime.forget(ONE)
    assert time.uptime.away(ONE) == ()
