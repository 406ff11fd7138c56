"""The checks of the demo and of the end-to-end tests must themselves be able to fail."""

import pytest

from examples.demo.checks import (
    GateChange,
    bad_refusals,
    out_of_service_s,
    overlapping_versions,
    wrong_answers,
)
from examples.demo.load import Sample, completed

KNOWN = {0: {"p": [1, 2, 3, 4]}, 1: {"p": [5, 6, 7, 8]}}


def sample(
    version: int | None, tokens: tuple[int, ...], finish: str = "length", status: int = 200, **more: object
) -> Sample:
    return Sample("p", 1.0, 2.0, status, version=version, tokens=tokens, finish_reason=finish, **more)  # type: ignore[arg-type]


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


def test_out_of_service_needs_answers_of_both_versions() -> None:
    old, new = sample(0, (1,)), Sample("p", 2.5, 3.25, 200, version=1, tokens=(5,), finish_reason="length")
    assert out_of_service_s([old, new], 0, 1) == pytest.approx(1.25)
    with pytest.raises(ValueError, match="version 1"):
        out_of_service_s([old], 0, 1)


def test_aborted_answers_do_not_count_as_completed() -> None:
    assert completed([sample(0, (1, 2)), sample(0, (1,), "abort"), sample(1, (5,))], 0) == 1
