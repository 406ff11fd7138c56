"""The pure parts of the training example: reward, advantages, what samples must tell, and the test of a rise."""

import math
import random
from dataclasses import replace

import pytest

from examples.training.objective import LEAST_RISE, group_advantages, require_versions, reward, rise
from rollfleet_trainer.samples import Sample

SAMPLE = Sample(
    prompt_tokens=(1, 2),
    tokens=(3, 4, 5),
    logprobs=(-0.1, -0.2, -0.3),
    versions=(7, 7, 8),
    finish_reason="length",
    stop_reason=None,
    text="abc",
    message=None,
    routed_experts=None,
    engine="qwen-0",
    continued=1,
)


@pytest.mark.parametrize(("text", "expected"), [("abcd", 1.0), ("aB1 ", 0.25), ("A-\n", 0.0), ("", 0.0)])
def test_the_reward_is_the_share_of_lower_case_letters(text: str, expected: float) -> None:
    assert reward(text) == expected


def test_advantages_compare_an_answer_with_its_own_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1], abs=1e-3)
    shifted = group_advantages([0.3, 0.1, 0.1, 0.3])
    assert shifted == pytest.approx([1, -1, -1, 1], abs=2e-3), "neither the group's mean nor its spread counts"
    assert group_advantages([0.4] * 8) == [0.0] * 8, "nothing is learned where all are equal"


def _rewards(mean: float, seed: int) -> list[float]:
    """As 64 answers of 48 characters have them."""
    numbers = random.Random(seed)
    return [sum(numbers.random() < mean for _ in range(48)) / 48 for _ in range(64)]


def test_a_rise_is_told_from_chance() -> None:
    assert rise(_rewards(0.25, 1), _rewards(0.75, 2)).holds()
    small = rise(_rewards(0.25, 1), _rewards(0.25 + LEAST_RISE / 2, 2))
    assert small.t > 4, "beyond chance"
    assert not small.holds(), "and yet too small"
    assert not rise(_rewards(0.75, 1), _rewards(0.25, 2)).holds()
    by_chance = [rise(_rewards(0.25, 2 * seed), _rewards(0.25, 2 * seed + 1)) for seed in range(200)]
    assert not any(each.holds(least=0.0) for each in by_chance)


def test_a_rise_without_any_spread_is_no_number() -> None:
    assert rise([0.5, 0.5], [1.0, 1.0]).t == math.inf
    assert rise([0.5, 0.5], [0.5, 0.5]).t == 0.0
    assert not rise([1.0, 1.0], [0.5, 0.5]).holds()


def test_a_sample_over_two_versions_is_taken() -> None:
    require_versions([SAMPLE, replace(SAMPLE, versions=(8, 8, 8))], 7, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": (7, 7)}, "3 tokens have 2 versions"),
        ({"logprobs": None}, "told=None"),
        ({"logprobs": (-0.1, -0.2)}, "told="),
        ({"versions": (8, 7, 8)}, "of versions"),
        ({"finish_reason": "abort"}, "abort"),
        ({"versions": (6, 7, 8)}, "where 7 to 8 may have spoken"),
        ({"versions": (7, 8, 9)}, "where 7 to 8 may have spoken"),
    ],
)
def test_what_a_sample_does_not_tell_or_may_not_be_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as told:
        require_versions([SAMPLE, replace(SAMPLE, **changes)], 7, 8)  # type: ignore[arg-type]
    assert str(told.value).startswith("qwen-0: ")
