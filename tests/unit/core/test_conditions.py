"""Merging conditions."""

from datetime import timedelta

import pytest

from rollfleet_operator.api.meta import MAX_MESSAGE, Condition, ConditionStatus
from rollfleet_operator.core.conditions import claim, find, merge
from rollfleet_operator.core.reasons import Reason
from tests.support.builders import NOW

LATER = NOW + timedelta(minutes=5)


def test_the_transition_time_stays_while_the_status_does() -> None:
    first = merge((), (claim("Available", False, Reason.STARTING),), 1, NOW)
    second = merge(first, (claim("Available", False, Reason.CATCHING_UP),), 2, LATER)
    third = merge(second, (claim("Available", True, Reason.SERVING),), 2, LATER)
    assert [found.last_transition_time for found in (first[0], second[0], third[0])] == [NOW, NOW, LATER]
    assert (second[0].reason, second[0].observed_generation) == ("CatchingUp", 2)


def test_an_unchanged_claim_gives_an_equal_list() -> None:
    claims = (claim("Accepted", True, Reason.ACCEPTED), claim("Degraded", None, Reason.ALL_WELL))
    merged = merge((), claims, 1, NOW)
    assert merge(merged, claims, 1, LATER) == merged
    assert merged[1].status is ConditionStatus.UNKNOWN


def test_conditions_of_others_are_kept() -> None:
    foreign = Condition(type="Audited", status=ConditionStatus.TRUE, reason="Fine", last_transition_time=NOW)
    merged = merge((foreign,), (claim("Accepted", True, Reason.ACCEPTED),), 1, NOW)
    assert find(merged, "Audited") == foreign
    assert find(merged, "Absent") is None


def test_a_message_is_bounded_and_never_empty() -> None:
    assert len(claim("Accepted", False, Reason.INVALID_SPEC, "x" * 5000).message) == MAX_MESSAGE
    assert claim("Accepted", False, Reason.INVALID_SPEC).message == Reason.INVALID_SPEC.sentence


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n    ", "\f", "\u2028"])
def test_a_message_is_one_line(end: str) -> None:
    """vLLM's own words are a traceback now and then."""
    said = claim("Active", False, Reason.UPDATE_FAILED, f"Traceback (most recent call last):{end}RuntimeError: broken")
    assert said.message == "Traceback (most recent call last): RuntimeError: broken"


def test_every_reason_is_one_word_with_one_sentence() -> None:
    for reason in Reason:
        assert reason.value.isalpha(), reason
        assert reason.value[0].isupper(), reason
        assert reason.sentence.endswith("."), reason
    assert len({reason.sentence for reason in Reason}) == len(Reason)
