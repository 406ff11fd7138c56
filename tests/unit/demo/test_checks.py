"""The checks of the demo and of the end-to-end tests must themselves be able to fail."""

import pytest

from examples.demo.checks import (
    GateChange,
    bad_refusals,
    first_answer_s,
    overlapping_versions,
    stale_answers,
    wrong_answers,
)
from examples.demo.load import Sample, completed

KNOWN = {0: {"p": [1, 2, 3, 4]}, 1: {"p": [5, 6, 7, 8]}}


def sample(
    version: int | None, tokens: tuple[int, ...], finish: str = "length", status: int = 200, **more: object
) -> Sample:
    asked = 4 if finish == "abort" else len(tokens) or 1
    fields = {"started": 1.0, "ended": 2.0, "asked": asked, "version": version, "tokens": tokens} | more
    return Sample(prompt="p", status=status, finish_reason=finish, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        (sample(0, (1, 2)), 0),
        (sample(1, (5, 6, 7, 8)), 0),
        (sample(0, (1, 2), "abort"), 0),
        (sample(0, (), "abort"), 0),
        (sample(0, (5, 6)), 1),  # says 0, is 1
        (sample(0, (1, 6)), 1),  # mixed
        (sample(0, (1, 2, 3, 4), "abort"), 1),  # not a strict prefix
        (sample(0, ()), 1),  # empty, and not aborted
        (sample(0, (1, 2), asked=3), 1),  # ended early
        (sample(None, (1, 2)), 1),  # no version named
        (sample(9, (1, 2)), 1),
    ],
)
def test_an_answer_is_what_its_version_gives(answer: Sample, problems: int) -> None:
    assert len(wrong_answers([answer], KNOWN)) == problems


def test_only_503_with_retry_after_may_be_refused() -> None:
    fine = sample(None, (), status=503, retry_after="1")
    assert not bad_refusals([fine, sample(0, (1,))])
    bad = [
        sample(None, (), status=503),
        sample(None, (), status=500, error="x"),
        sample(None, (), status=0, error="reset"),
    ]
    assert sum(bad_refusals(bad).values()) == 3


def test_an_older_version_is_stale_once_a_newer_one_had_answered_before_the_request_began() -> None:
    newer = sample(1, (5,), started=3.0, ended=4.0)
    in_flight, stale = sample(0, (1,), started=3.9, ended=9.0), sample(0, (1,), started=4.1, ended=4.2)
    refused = sample(None, (), status=503, started=5.0, ended=5.1)
    assert stale_answers([in_flight, newer, refused]) == []
    assert len(stale_answers([stale, in_flight, newer])) == 1


def test_overlap_of_versions_is_found_in_opening_and_in_admission() -> None:
    clean = [
        GateChange("a", 1, True, 0),
        GateChange("b", 1, True, 0),
        GateChange("a", 2, False, 0, last_admission=1.9),
        GateChange("b", 2.1, False, 0, last_admission=2.05),
        GateChange("a", 3, True, 1),
        GateChange("b", 3.1, True, 1),
    ]
    assert overlapping_versions(clean) == []
    late_admission = [*clean[:3], GateChange("b", 3.2, False, 0, last_admission=3.05), *clean[4:]]
    assert len(overlapping_versions(late_admission)) == 1
    never_closed = [change for change in clean if change != clean[2] and change != clean[4]]
    assert len(overlapping_versions(never_closed)) == 1
    late_opening = [*clean, GateChange("c", 4, True, 0)]
    assert len(overlapping_versions(late_opening)) == 1


def test_the_first_answer_is_a_whole_one_of_that_version() -> None:
    samples = [
        sample(0, (1,)),
        sample(1, (5,), "abort"),
        Sample("p", 1, 2.5, 3.25, 200, version=1, tokens=(5,), finish_reason="length"),
    ]
    assert first_answer_s(samples, 1, 3.0) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="version 1"):
        first_answer_s(samples[:2], 1, 3.0)


def test_aborted_answers_do_not_count_as_completed() -> None:
    assert completed([sample(0, (1, 2)), sample(0, (1,), "abort"), sample(1, (5,))], 0) == 1
