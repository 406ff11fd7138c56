"""Whether every engine holds, and answers from, the committed version: judged from what each says now. Pure.

Nothing passes on nothing: an engine that cannot be asked, that is missing, or that has no answer is a problem. So is a
fleet that rolls: engines still hold the version before, which is named, and compared with each other only.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from rollfleet_cli.asking import Answer
from rollfleet_cli.conformance.checks.fleet import as_result
from rollfleet_operator.api.rolloutengine import Committed, RolloutEngine
from rollfleet_operator.api.weightversion import Probe, WeightVersion
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.probes import Disagreement, agree, compare
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.state import ProbeReport, WeightsState


@dataclass(frozen=True)
class Checked:
    """One engine."""

    engine: str
    gate: str
    version: int | None
    digest: str
    ranks: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """All engines."""

    committed: int | None
    digest: str
    engines: tuple[Checked, ...]
    max_abs_logprob_diff: str  # largest between two engines or ranks; empty for fewer than two, or where they disagree
    allowed: str
    problems: tuple[str, ...]  # of the fleet as a whole

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and not any(engine.problems for engine in self.engines)

    @property
    def words(self) -> str:
        """All problems in one line."""
        single = [f"{each.engine}: {problem}" for each in self.engines for problem in each.problems]
        return "; ".join([*self.problems, *single])

    def to_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return asdict(self) | {"holds": self.holds}


def verify(fleet: RolloutEngine, probe: Probe, answers: tuple[Answer[ProbeReport], ...]) -> Verification:
    """Compare with the commit record, and engines with each other."""
    committed = fleet.status.committed
    limit = Decimal(probe.max_abs_logprob_diff)
    reports = [(answer.pod, answer.said) for answer in answers if answer.said is not None]
    behind = [each for each in reports if _is_behind(each[1], committed)]
    ahead = [each for each in reports if not _is_behind(each[1], committed)]
    odd, apart, quarrel = _compare(ahead, limit)
    odd_behind, apart_behind, quarrel_behind = _compare(behind, limit)
    usual = _usual_digest(report for _, report in ahead)
    engines = tuple(_check(answer, committed, usual, odd | odd_behind, limit) for answer in answers)
    return Verification(
        committed=None if committed is None else committed.version,
        digest=usual,
        engines=engines,
        max_abs_logprob_diff=max((apart, apart_behind), key=lambda text: Decimal(text or -1)),
        allowed=probe.max_abs_logprob_diff,
        problems=(*_of_fleet(fleet, len(answers), (quarrel, quarrel_behind)), *_of_update(fleet, answers)),
    )


def probe_of(charge: WeightVersion | None) -> Probe:
    """The fleet's own probe, where a WeightVersion says one."""
    return Probe() if charge is None else charge.spec.verify.probe


def _of_fleet(fleet: RolloutEngine, asked: int, quarrels: tuple[str, ...]) -> Iterator[str]:
    committed = fleet.status.committed
    if committed is None:
        yield "nothing is committed, so there is nothing to compare with"
    elif committed.previous is not None:
        text = f"the fleet rolls from version {committed.previous.version} to version {committed.version}"
        yield f"{text} (condition MixedVersions): ask again when it has"
    if asked < fleet.spec.replicas:
        yield f"{fleet.spec.replicas - asked} of {fleet.spec.replicas} engines have no pod"
    elif asked == 0:
        yield "the fleet has no engines"
    yield from filter(None, quarrels)


def _of_update(fleet: RolloutEngine, answers: tuple[Answer[ProbeReport], ...]) -> Iterator[str]:
    """Why engines may say nothing."""
    moving = find(fleet.status.conditions, "Progressing")
    if moving is not None and moving.reason == Reason.UPDATING and any(answer.said is None for answer in answers):
        yield "an update has closed engines, and closed ones can't be probed: ask again when it has ended"


def _is_behind(report: ProbeReport, committed: Committed | None) -> bool:
    """Whether it holds what the fleet rolls away from, and may answer from it until its turn."""
    previous, weights = None if committed is None else committed.previous, report.weights
    if previous is None or weights.state is not WeightsState.VERIFIED or weights.version != previous.version:
        return False
    return previous.digest in (None, weights.digest)


def _compare(reports: list[tuple[str, ProbeReport]], limit: Decimal) -> tuple[frozenset[str], str, str]:
    """Engines that answer unlike a majority, the largest difference, and the words where no majority agrees."""
    probed = [(name, as_result(report)) for name, report in reports]
    if not probed:
        return frozenset(), "", ""
    found = agree(list(probed), limit, len(probed) // 2)
    if isinstance(found, Disagreement):
        return frozenset(), "", found.text
    whole = compare(list(probed), limit)
    return found, "" if isinstance(whole, Disagreement) else whole, ""


def _usual_digest(reports: Iterator[ProbeReport]) -> str:
    """The digest that most engines name; version 0 as loaded at start has none."""
    counts = Counter(report.weights.digest for report in reports if report.weights.digest)
    return counts.most_common(1)[0][0] if counts else ""


def _check(
    answer: Answer[ProbeReport], committed: Committed | None, usual: str, odd: frozenset[str], limit: Decimal
) -> Checked:
    report = answer.said
    if report is None:
        return Checked(answer.pod, "", None, "", 0, (f"can't be asked: {answer.error}",))
    problems = [*_of_weights(report, committed, usual)]
    if answer.pod in odd:
        problems.append(f"answers the probe unlike the others, by more than {limit}")
    weights = report.weights
    return Checked(
        engine=answer.pod,
        gate=report.gate.value,
        version=weights.version,
        digest=weights.digest or "",
        ranks=len(report.by_rank),
        problems=tuple(problems),
    )


def _of_weights(report: ProbeReport, committed: Committed | None, usual: str) -> Iterator[str]:
    weights = report.weights
    digest = weights.digest or ""
    if committed is not None and _is_behind(report, committed):
        yield f"holds version {weights.version} until the roll to {committed.version} comes to it"
        return
    if weights.state is not WeightsState.VERIFIED:
        yield f"its weights are {weights.state.value}"
    if committed is not None and weights.version != committed.version:
        yield f"holds version {weights.version}, and {committed.version} is committed"
    elif committed is not None and committed.digest and digest != committed.digest:
        yield f"holds digest {digest or 'none'}, and {committed.digest} is committed"
    elif digest and digest != usual:
        yield f"holds digest {digest}, most hold {usual}"
