"""Back-off and deadlines."""

from datetime import timedelta

import pytest

from rollfleet_operator.core.policies import Deadline, attempt_wait_s, backoff_s, retry_at, seconds_text
from rollfleet_protocol.commands import LONGEST_SECONDS
from tests.support.builders import NOW


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def test_back_off_doubles_up_to_thirty_seconds() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 4, 5, 6, 7, 10_000)] == [1, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(("attempt", "after"), [(1, 1), (2, 3), (3, 7), (5, 31), (6, 61), (7, 91)])
def test_an_attempt_begins_after_the_sum_of_the_waits(attempt: int, after: float) -> None:
    assert retry_at(NOW, attempt) == NOW + seconds(after)


def test_the_next_attempt_of_an_update_waits_within_prepare_seconds() -> None:
    assert [attempt_wait_s(attempt, 600) for attempt in (2, 3, 4, 5, 6, 7, 100)] == [1, 2, 4, 8, 16, 30, 30]
    assert [attempt_wait_s(attempt, 3) for attempt in (2, 3, 4)] == [1, 1.5, 1.5]


def test_a_deadline_counts_from_when_somebody_could_act() -> None:
    now = NOW + seconds(200)
    assert Deadline.of(NOW, 60, now).ends == NOW + seconds(60)
    assert Deadline.of(NOW, 60, now, NOW - seconds(100)).ends == NOW + seconds(60)
    assert Deadline.of(NOW, 60, now, NOW + seconds(100)).ends == NOW + seconds(160)


AWAY: dict[str, tuple[list[tuple[float, float]], float]] = {  # from, to; when the minute is over
    "never": ([], 60),
    "in between": ([(10, 15), (20, 40)], 85),
    "before it began": ([(-30, -10)], 60),
    "as it began": ([(-30, 10)], 70),
    "at the very end": ([(59, 100)], 101),
    "after its end": ([(60, 100)], 60),
    "twice at the same time": ([(10, 30), (20, 40), (25, 28)], 90),
}


@pytest.mark.parametrize("case", AWAY)
def test_time_away_is_taken_off_and_begins_nothing_anew(case: str) -> None:
    away, ends = AWAY[case]
    gone = [(NOW + seconds(left), NOW + seconds(back)) for left, back in away]
    assert Deadline.of(NOW, 60, NOW + seconds(200), NOW - seconds(100), gone).ends == NOW + seconds(ends)


@pytest.mark.parametrize(
    ("up_since", "counts_from"), [(None, 0), (-100, -100), (30, 0)], ids=["unknown", "before", "set back since"]
)
def test_a_start_in_the_future_counts_from_when_we_could_act(up_since: float | None, counts_from: float) -> None:
    up = None if up_since is None else NOW + seconds(up_since)
    assert Deadline.of(NOW + seconds(3600), 60, NOW, up).ends == NOW + seconds(counts_from + 60)


def test_an_engine_is_always_given_at_least_a_second() -> None:
    deadline = Deadline.of(NOW, 60, NOW)
    assert deadline.left_s(NOW + seconds(20)) == 40
    assert deadline.left_s(NOW + seconds(90)) == 1
    assert Deadline.of(NOW, 10**6, NOW).left_s(NOW) == LONGEST_SECONDS, "a roll of many batches; told again in time"
    assert not deadline.passed(NOW + seconds(59.9))
    assert deadline.passed(NOW + seconds(60))


def test_durations_are_decimals() -> None:
    assert seconds_text(NOW, NOW + seconds(1.25)) == "1.250"
    assert seconds_text(NOW, NOW - seconds(1)) == "0.000"
    assert seconds_text(None, NOW) == ""
