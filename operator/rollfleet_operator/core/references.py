"""The probe of a late joiner is measured by the answer of an engine that serves already.

Where no engine serves, or none that this operator has heard of, it is measured by the answer that was recorded with
the commit: else what is damaged in one engine's memory after its digest was checked would be opened by a fleet of one.
The record speaks for pods of the template that it came from; others may compute a little differently.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal

from rollfleet_operator.api.records import ProbeAnswer
from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.probes import MAX_EXCLUDED, Disagreement, agree, compare
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.state import EngineState, Gate, ProbeResult, WeightsState

Tokens = tuple[int, ...]
CONFIRMED = 2  # engines that must have answered alike for their answer to be kept
MAX_RECORDED = 256  # tokens of a probe; a WeightVersion's spec allows no more


@dataclass
class References:
    """For each probe, the answer of an engine that serves, or did when it was heard of last, and is like the rest."""

    version: int
    tolerance: Decimal
    answers: dict[Tokens, tuple[str, ProbeResult]]
    recorded: ProbeAnswer | None = None

    @classmethod
    def of(cls, world: World, committed: Committed, weight_version: WeightVersion | None) -> "References":
        """By the operator's own limit; that of the WeightVersion may widen it, never narrow it."""
        tolerance = Decimal(str(world.settings.probe_tolerance))
        if weight_version is not None:
            tolerance = max(tolerance, Decimal(weight_version.spec.verify.probe.max_abs_logprob_diff))
        return cls(committed.version, tolerance, _answers(world, committed, tolerance), committed.probe)

    def tokens(self, default: Tokens) -> Tokens:
        """Which probe to ask for: only one that was answered already can be compared."""
        return next(iter(self.answers), default if self.recorded is None else self.recorded.tokens)

    def add(self, name: str, probe: ProbeResult) -> None:
        """Whoever is let in next is measured by it, before this one is known to serve."""
        self.answers.setdefault(probe.tokens, (name, probe))

    def difference(self, engine: Engine, state: EngineState) -> str | None:
        """How an engine's answer differs; None where none does, or where there is nothing to compare."""
        probe = state.probe
        if probe is None or probe.version != self.version or state.weights.state is not WeightsState.VERIFIED:
            return None
        reference = self.answers.get(probe.tokens) or self._record(engine, probe)
        if reference is None:
            return None
        found = compare([reference, (engine.name, probe)], self.tolerance)
        return found.text if isinstance(found, Disagreement) else None

    def _record(self, engine: Engine, probe: ProbeResult) -> tuple[str, ProbeResult] | None:
        recorded = self.recorded
        if recorded is None or (recorded.tokens, recorded.template_hash) != (probe.tokens, engine.pod.template_hash):
            return None
        logprobs = tuple(float(value) for value in recorded.logprobs)
        answer = ProbeResult(
            epoch=probe.epoch, version=self.version, tokens=recorded.tokens, logprobs=logprobs, seconds=0.0
        )
        return f"the commit of version {self.version}", answer


def to_record(
    answers: Iterable[tuple[Engine, ProbeResult | None]], odd: Collection[str], *, confirmed: bool = False
) -> ProbeAnswer | None:
    """What a commit keeps: the first answer of those that are like the rest. `odd`: names of those that are not.

    One engine alone may be the one that is wrong: then its answer would keep out every good one that comes later.
    `confirmed`: the trainer expected these answers, so that one is enough.
    """
    alike = [(engine, probe) for engine, probe in answers if probe is not None and engine.name not in odd]
    if len(alike) < (1 if confirmed else CONFIRMED) or len(alike[0][1].tokens) > MAX_RECORDED:
        return None
    engine, probe = alike[0]
    logprobs = tuple(f"{value:.9g}" for value in probe.logprobs)
    return ProbeAnswer(tokens=probe.tokens, logprobs=logprobs, template_hash=engine.pod.template_hash)


def confirmed(world: World, committed: Committed | None, work: Work) -> Committed | None:
    """The commit with an answer to the probe that it could not keep, since one engine alone gave it, once two serve."""
    if committed is None or committed.probe is not None:
        return committed
    serving = [
        (engine, state.probe)
        for engine in world.serving(committed)
        if (state := engine.state) is not None and state.probe is not None and state.probe.version == committed.version
    ]
    if len(serving) < CONFIRMED:
        return committed
    odd = agree(
        [(engine.name, probe) for engine, probe in serving], Decimal(str(world.settings.probe_tolerance)), MAX_EXCLUDED
    )
    probe = None if isinstance(odd, Disagreement) else to_record(serving, odd)
    if probe is None:
        return committed
    work.note(f"the answer to the probe of version {committed.version} is kept: {len(serving)} engines serve by it")
    return committed.model_copy(update={"probe": probe})


def _answers(world: World, committed: Committed, tolerance: Decimal) -> dict[Tokens, tuple[str, ProbeResult]]:
    """The probe that most have answered comes first. Engines that leave are asked too, as long as their gates are open.

    Where answers to the same probe differ a majority decides: one engine whose answers went wrong keeps nobody out who
    is like the rest.
    """
    groups: dict[Tokens, list[tuple[str, ProbeResult | None]]] = {}
    serving = world.serving(committed)
    names = {engine.name for engine in serving}
    for engine in (*serving, *(engine for engine in world.engines if engine.name not in names)):
        state = engine.state
        if state is None or state.gate is not Gate.OPEN or not holds(state, committed) or state.probe is None:
            continue
        if state.probe.version == committed.version:
            groups.setdefault(state.probe.tokens, []).append((engine.name, state.probe))
    return {
        tokens: _measure(group, tolerance)
        for tokens, group in sorted(groups.items(), key=lambda item: -len(item[1]))  # equal ones stay in their order
    }


def _measure(group: list[tuple[str, ProbeResult | None]], tolerance: Decimal) -> tuple[str, ProbeResult]:
    odd = agree(group, tolerance, MAX_EXCLUDED)
    left_out = frozenset() if isinstance(odd, Disagreement) else odd
    return next((name, probe) for name, probe in group if probe is not None and name not in left_out)
