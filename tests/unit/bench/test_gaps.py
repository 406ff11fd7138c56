"""What a client saw of an update, from answers that are made up: one engine stops from 10 to 12, the other later."""

import math

import pytest

from tests.bench.gaps import Answer, both_at_once, out_of_service, seen, usual_gap

OLD, NEW = -1.0, -2.0


def answers(engine: str, begin: float, stopped: float, again: float, end: float, pause: float = 0.1) -> list[Answer]:
    """One answer each tenth of a second, by the old weights until it stops, by the new ones when it goes on."""
    found, now = [], begin
    while now < end:
        if stopped < now < again:
            now = again
        logprob = OLD if now <= stopped else NEW
        found.append(Answer(engine, now - pause / 2, now, logprob))
        now += pause
    return found


def test_the_usual_gap_is_the_median() -> None:
    assert usual_gap([1.0, 1.1, 1.2, 3.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="1 answers"):
        usual_gap([1.0])


def test_out_of_service_is_the_longest_gap_of_the_update_less_the_usual_one() -> None:
    times = [8.0, 8.1, 8.2, 10.2, 10.3]
    assert out_of_service(times, 8.2, 10.2) == pytest.approx(1.9)
    assert out_of_service(times, 10.2, 10.3) == pytest.approx(0), "what was before the update does not count"


def test_a_gap_that_begins_before_the_update_or_ends_after_it_counts_whole() -> None:
    times = [1.0, 1.1, 1.2, 4.2, 4.3]
    assert out_of_service(times, 2.0, 3.0) == pytest.approx(2.9)


@pytest.mark.parametrize(("begin", "end"), [(0.5, 1.1), (1.1, 1.4)])
def test_nobody_can_tell_without_answers_on_both_sides(begin: float, end: float) -> None:
    with pytest.raises(ValueError, match=r"before .* until after"):
        out_of_service([1.0, 1.1, 1.2, 1.3], begin, end)


def test_engines_that_change_together_never_serve_two_versions() -> None:
    both = answers("a", 8, 10, 12, 14) + answers("b", 8.03, 10, 12.1, 14)
    found = seen(both, 9.9, 12.2, OLD, NEW)
    assert found.both == 0.0
    assert found.worst == pytest.approx(2.0, abs=0.1)
    assert found.lost == pytest.approx(4.0, abs=0.2)
    assert found.nobody == pytest.approx(1.95, abs=0.1)
    assert found.strange == 0


def test_engines_that_change_one_after_the_other_serve_all_the_time_and_two_versions() -> None:
    both = answers("a", 8, 10, 11, 14) + answers("b", 8.03, 11.25, 12.25, 14)
    found = seen(both, 9.9, 12.4, OLD, NEW)
    assert found.nobody < 0.1
    assert found.worst == pytest.approx(0.9, abs=0.1)
    assert found.both == pytest.approx(0.2, abs=0.1), "until the second one stops"
    later = answers("a", 8, 10, 11, 14) + answers("b", 8.03, 12, 13, 15)
    assert seen(later, 9.9, 13.2, OLD, NEW).both == pytest.approx(1.0, abs=0.15)


def test_a_question_that_was_asked_before_the_new_weights_is_no_second_version() -> None:
    """It was answered late."""
    both = [Answer("a", 0.0, 3.0, OLD), Answer("b", 1.0, 2.0, NEW)]
    assert both_at_once(both, OLD, NEW) == 0.0
    assert both_at_once([*both, Answer("a", 2.5, 3.0, OLD)], OLD, NEW) == pytest.approx(0.5)


def test_answers_by_neither_weights_are_counted() -> None:
    both = [*answers("a", 8, 10, 12, 14), Answer("a", 12.0, 12.01, -1.5)]
    assert seen(sorted(both, key=lambda each: each.answered), 9.9, 12.2, OLD, NEW).strange == 1


def test_weights_that_nobody_answered_by_are_not_both_served() -> None:
    assert both_at_once([Answer("a", 0.0, 1.0, OLD)], OLD, NEW) == 0.0
    assert math.isclose(both_at_once([], OLD, NEW), 0.0)
