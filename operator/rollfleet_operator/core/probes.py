"""Comparing what engines answered to the probe."""

from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from statistics import median

from rollfleet_protocol.state import ProbeResult

MAX_EXCLUDED = 10  # engines that may answer the probe unlike the others; more is not their own fault

Logprobs = tuple[float, ...]
Answer = tuple[str, Logprobs]  # whose
TRAINER = "the trainer"


@dataclass(frozen=True)
class Disagreement:
    """Two engines, or two ranks of one, that answered differently under what should be the same weights.

    `settled`: the same weights would be answered for alike another time.
    """

    text: str
    settled: bool = False


def compare(
    probed: list[tuple[str, ProbeResult | None]], limit: Decimal, expected: Logprobs = ()
) -> str | Disagreement:
    """The largest difference between any two engines as a decimal, empty for fewer than two; or the two that disagree.

    Every data-parallel rank counts as one that answers, and so do the values that the trainer expects. An engine
    without an answer disagrees with everybody: an empty comparison must not pass for agreement.
    """
    answers: list[Answer] = []
    first: tuple[str, ProbeResult] | None = None
    for name, probe in probed:
        if probe is None or not all(_is_answer(logprobs) for logprobs in probe.by_rank):
            return Disagreement(f"{name} has no answer to the probe")
        first = first or (name, probe)
        if not _comparable(first[1], probe):
            return Disagreement(f"{first[0]} and {name} answered different probes")
        answers += _of_ranks(name, probe)
    if expected and answers:
        if len(expected) != len(answers[0][1]):
            return Disagreement(f"{TRAINER} expects {len(expected)} values, {answers[0][0]} gives {len(answers[0][1])}")
        answers.append((TRAINER, expected))
    if len(answers) < 2:
        return ""
    apart, one, other = max(_spread(answers, index) for index in range(len(answers[0][1])))
    if Decimal(apart) > limit:
        text = f"differ by {apart:.6g} in the log-probability of a probe token; allowed is {limit}"
        return Disagreement(f"{min(one, other)} and {max(one, other)} {text}")
    return f"{apart:.6g}"


def unlike(
    probed: list[tuple[str, ProbeResult | None]], limit: Decimal, most: int, expected: Logprobs
) -> dict[str, str] | Disagreement:
    """Who answered unlike what the trainer expects, and how: `most` at most, and not all; else the first of them.

    Nobody is where the trainer expects nothing.
    """
    if not expected:
        return {}
    found = {name: compare([(name, probe)], limit, expected) for name, probe in probed}
    texts = {name: each.text for name, each in found.items() if isinstance(each, Disagreement)}
    if texts and len(texts) == len(probed):
        text = f"no engine answers the probe as the trainer: {min(texts.values())}"
        # One alone, or some that differ, may have loaded badly. Those that agree have computed it.
        return Disagreement(text, settled=len(probed) > 1 and not isinstance(compare(probed, limit), Disagreement))
    if len(texts) > most:
        return Disagreement(f"{len(texts)} engines answer the probe unlike the trainer: {min(texts.values())}")
    return texts


def agree(probed: list[tuple[str, ProbeResult | None]], limit: Decimal, most: int) -> frozenset[str] | Disagreement:
    """Who answered unlike a majority that agrees: `most` at most; or the two that disagree where there is no majority.

    An engine that answered nothing, no numbers, or another probe, is unlike the others too: else one that is broken
    could keep all of them from ever moving. Whoever belongs to the majority is within the limit of the median of each
    token, so those furthest from the medians are left out first.
    """
    found = compare(probed, limit)
    if not isinstance(found, Disagreement):
        return frozenset()
    answers = _largest_group(probed)
    odd = frozenset(name for name, _ in probed) - {name for name, _ in answers}
    medians = [median(values) for values in zip(*(each for _, probe in answers for each in probe.by_rank), strict=True)]
    near = sorted(answers, key=lambda answer: _distance(answer[1], medians))
    for count in range(most + 1 - len(odd)):
        rest = near[: len(near) - count]
        if 2 * len(rest) <= len(probed):
            return found
        if not isinstance(compare(list(rest), limit), Disagreement):
            return odd | {name for name, _ in near[len(rest) :]}
    return found


def _largest_group(probed: list[tuple[str, ProbeResult | None]]) -> list[tuple[str, ProbeResult]]:
    """Those of which every rank answered the same probe with numbers."""
    groups: dict[tuple[object, ...], list[tuple[str, ProbeResult]]] = {}
    for name, probe in probed:
        if probe is not None and all(_is_answer(logprobs) for logprobs in probe.by_rank) and _comparable(probe, probe):
            groups.setdefault((probe.tokens, len(probe.logprobs)), []).append((name, probe))
    return max(groups.values(), key=len, default=[])


def _distance(probe: ProbeResult, medians: list[float]) -> float:
    """The largest over all tokens and ranks."""
    return max(abs(value - middle) for each in probe.by_rank for value, middle in zip(each, medians, strict=True))


def _is_answer(logprobs: Logprobs) -> bool:
    return bool(logprobs) and all(isfinite(value) for value in logprobs)


def _comparable(one: ProbeResult, other: ProbeResult) -> bool:
    wanted = len(one.logprobs)
    return one.tokens == other.tokens and all(len(logprobs) == wanted for logprobs in other.by_rank)


def _of_ranks(name: str, probe: ProbeResult) -> list[Answer]:
    ranks = probe.by_rank
    return [(name if len(ranks) == 1 else f"{name} rank {rank}", logprobs) for rank, logprobs in enumerate(ranks)]


def _spread(answers: list[Answer], index: int) -> tuple[float, str, str]:
    """Largest difference at one token, and between whom: the extremes are as far apart as any two can be."""
    values = [(logprobs[index], name) for name, logprobs in answers]
    (low, one), (high, other) = min(values), max(values)
    return high - low, one, other
