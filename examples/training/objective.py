"""What the loop optimises and demands, and the test of whether it learned: plain numbers, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rollfleet_trainer.samples import Sample

# The test, stated before any run: rewards of two batches of answers to the same prompts, none of them learned from, one
# by the weights of the start and one by those of the end. Answers are drawn independently. Where nothing was learned,
# Welch's t exceeds 4 about once in 30,000 runs.
LEAST_T = 4.0
LEAST_RISE = 0.15  # after 20 versions: at the start about a quarter of the characters count
EPSILON = 1e-4  # a group of equal rewards has no advantages, instead of a division by zero


def reward(text: str) -> float:
    """The share of lower-case letters: 0 to 1, and 0 of an empty answer."""
    return sum(character.islower() for character in text) / len(text) if text else 0.0


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each answer to one prompt is than the others, in their own standard deviations (GRPO)."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(each - mean) / (deviation + EPSILON) for each in rewards]


@dataclass(frozen=True)
class Rise:
    """Of the mean reward, between two batches."""

    before: float
    after: float
    t: float  # Welch's; infinite where neither batch varies

    def holds(self, least: float = LEAST_RISE) -> bool:
        """Whether the reward rose clearly: by chance it would not, and by at least so much."""
        return self.t >= LEAST_T and self.after - self.before >= least


def rise(before: Sequence[float], after: Sequence[float]) -> Rise:
    """Compare two independent batches of at least two rewards each."""
    low, high = statistics.fmean(before), statistics.fmean(after)
    error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
    if error == 0:
        return Rise(low, high, math.copysign(math.inf, high - low) if high != low else 0.0)
    return Rise(low, high, (high - low) / error)


def require_versions(samples: Sequence[Sample], oldest: int, newest: int) -> None:
    """Every token of every sample names a version that it may be of, and a logprob."""
    for each in samples:
        told = each.logprobs
        if told is None or not len(each.tokens) == len(each.versions) == len(told):
            raise ValueError(f"{each.engine}: {len(each.tokens)} tokens have {len(each.versions)} versions, {told=}")
        if each.aborted or list(each.versions) != sorted(each.versions):
            raise ValueError(f"{each.engine}: {each.finish_reason}, of versions {each.versions}")
        if each.versions and not oldest <= each.versions[0] <= each.versions[-1] <= newest:
            raise ValueError(f"{each.engine}: versions {each.spans}, where {oldest} to {newest} may have spoken")
