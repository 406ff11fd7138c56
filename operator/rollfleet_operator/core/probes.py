"""Comparing what engines answered to the probe."""

from dataclasses import dataclass
from decimal import Decimal
from math import isfinite

from rollfleet_protocol.state import ProbeResult

Answer = tuple[str, ProbeResult]


@dataclass(frozen=True)
class Disagreement:
    """Two engines that answered differently under what should be the same weights."""

    text: str


def compare(probed: list[tuple[str, ProbeResult | None]], limit: Decimal) -> str | Disagreement:
    """The largest difference between any two engines as a decimal, empty for fewer than two; or the two that disagree.

    An engine without an answer disagrees with everybody: an empty comparison must not pass for agreement.
    """
    answers: list[Answer] = []
    for name, probe in probed:
        if probe is None or not probe.logprobs or not all(isfinite(value) for value in probe.logprobs):
            return Disagreement(f"{name} has no answer to the probe")
        if answers and not _comparable(answers[0][1], probe):
            return Disagreement(f"{answers[0][0]} and {name} answered different probes")
        answers.append((name, probe))
    if len(answers) < 2:
        return ""
    apart, one, other = max(_spread(answers, index) for index in range(len(answers[0][1].logprobs)))
    if Decimal(apart) > limit:
        text = f"differ by {apart:.6g} in the log-probability of a probe token; allowed is {limit}"
        return Disagreement(f"{min(one, other)} and {max(one, other)} {text}")
    return f"{apart:.6g}"


def _comparable(one: ProbeResult, other: ProbeResult) -> bool:
    return one.tokens == other.tokens and len(one.logprobs) == len(other.logprobs)


def _spread(answers: list[Answer], index: int) -> tuple[float, str, str]:
    """Largest difference at one token, and between whom: the extremes are as far apart as any two can be."""
    values = [(probe.logprobs[index], name) for name, probe in answers]
    (low, one), (high, other) = min(values), max(values)
    return high - low, one, other
