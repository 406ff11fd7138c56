"""The probe of a late joiner is measured by the answer of an engine that serves already."""

from dataclasses import dataclass
from decimal import Decimal

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.probes import Disagreement, compare
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.state import EngineState, Gate, ProbeResult, WeightsState

Tokens = tuple[int, ...]


@dataclass
class References:
    """For each probe, the answer of one engine that serves, or served when it was heard of last."""

    version: int
    tolerance: Decimal
    answers: dict[Tokens, tuple[str, ProbeResult]]

    @classmethod
    def of(cls, world: World, committed: Committed, weight_version: WeightVersion | None) -> "References":
        """By the operator's own limit; that of the WeightVersion may widen it, never narrow it."""
        tolerance = Decimal(str(world.settings.probe_tolerance))
        if weight_version is not None:
            tolerance = max(tolerance, Decimal(weight_version.spec.verify.probe.max_abs_logprob_diff))
        return cls(committed.version, tolerance, _answers(world, committed))

    def tokens(self, default: Tokens) -> Tokens:
        """Which probe to ask for: only one that was answered already can be compared."""
        return next(iter(self.answers), default)

    def add(self, name: str, probe: ProbeResult) -> None:
        """Whoever is let in next is measured by it, before this one is known to serve."""
        self.answers.setdefault(probe.tokens, (name, probe))

    def difference(self, engine: Engine, state: EngineState) -> str | None:
        """How an engine's answer differs; None where none does, or where there is nothing to compare."""
        probe = state.probe
        if probe is None or probe.version != self.version or state.weights.state is not WeightsState.VERIFIED:
            return None
        reference = self.answers.get(probe.tokens)
        if reference is None:
            return None
        found = compare([reference, (engine.name, probe)], self.tolerance)
        return found.text if isinstance(found, Disagreement) else None


def _answers(world: World, committed: Committed) -> dict[Tokens, tuple[str, ProbeResult]]:
    found: dict[Tokens, tuple[str, ProbeResult]] = {}
    serving = world.serving(committed)
    for engine in (*serving, *(engine for engine in world.engines if engine.answering is None)):
        state = engine.state
        if state is None or state.gate is not Gate.OPEN or not holds(state, committed) or state.probe is None:
            continue
        if state.probe.version == committed.version:
            found.setdefault(state.probe.tokens, (engine.name, state.probe))
    return found
