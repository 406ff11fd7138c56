"""Back-off and deadlines."""

from datetime import timedelta

import pytest

from rollfleet_operator.core.policies import Deadline, backoff_s, retry_at, seconds_text
from tests.support.builders import NOW


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def test_back_off_doubles_up_to_thirty_seconds() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 4, 5, 6, 7, 10_000)] == [1, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(("attempt", "after"), [(1, 1), (2, 3), (3, 7), (5, 31), (6, 61), (7, 91)])
def test_an_attempt_begins_after_the_sum_of_the_waits(attempt: int, after: float) -> None:
    assert retry_at(NOW, attempt) == NOW + seconds(after)


def test_a_deadline_counts_from_when_somebody_could_act() -> None:
    assert Deadline.of(NOW, 60, None).ends == NOW + seconds(60)
    assert Deadline.of(NOW, 60, NOW - seconds(100)).ends == NOW + seconds(60)
    assert Deadline.of(NOW, 60, NOW + seconds(100)).ends == NOW + seconds(160)


def test_an_engine_is_always_given_at_least_a_second() -> None:
    deadline = Deadline.of(NOW, 60, None)
    assert deadline.left_s(NOW + seconds(20)) == 40
    assert deadline.left_s(NOW + seconds(90)) == 1
    assert not deadline.passed(NOW + seconds(59.9))
    assert deadline.passed(NOW + seconds(60))


def test_durations_are_decimals() -> None:
    assert seconds_text(NOW, NOW + seconds(1.25)) == "1.250"
    assert seconds_text(NOW, NOW - seconds(1)) == "0.000"
    assert seconds_text(None, NOW) == ""
