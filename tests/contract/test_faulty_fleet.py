"""Updates of a fleet whose engines fail by a seed: each ends Active or Failed, never mixed, never stale."""

import itertools
from collections.abc import Iterator

import pytest

from rollfleet_engine.faults.plan import DRAWN
from rollfleet_protocol.state import Gate, WeightsState
from tests.contract.faulty import SIMULATED
from tests.contract.faulty_fleet import Fleet, Load, Member, Outcome
from tests.contract.models import SimulatedModels
from tests.contract.process import Site

SEEDS = (1, 2)
UPDATES = 3  # of each seed
WORSE = 3.0  # the usual mix, so much more often: few updates, many faults


@pytest.fixture
def fleet(site: Site, tmp_path) -> Iterator[tuple[Fleet, SimulatedModels]]:
    """Three engines that serve version 1."""
    models = SimulatedModels(tmp_path)
    fleet = Fleet([Member(f"member-{tmp_path.name}-{number}", SIMULATED, site, models) for number in range(3)])
    assert fleet.update(1, "step-1", models.digest(1)) is Outcome.ACTIVE
    yield fleet, models
    fleet.stop()


@pytest.mark.parametrize("seed", SEEDS)
def test_updates_by_a_seed_end_well_or_not_at_all(fleet: tuple[Fleet, SimulatedModels], seed: int):
    engines, models = fleet
    rules = [rule.model_copy(update={"probability": min(1.0, WORSE * (rule.probability or 0))}) for rule in DRAWN]
    for number, member in enumerate(engines.members):
        plain = [
            rule.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True) for rule in rules
        ]
        member.engine.plan(*plain, seed=100 * seed + number)
    steps = {1: 1} | {version: 1 + version % 3 for version in range(2, UPDATES + 2)}
    committed, outcomes = 1, []
    with Load(engines, models, steps) as load:
        for version in range(2, UPDATES + 2):
            outcome = engines.update(version, f"step-{steps[version]}", models.digest(steps[version]))
            outcomes.append(outcome)
            committed = version if outcome is Outcome.ACTIVE else committed
            serving = {state.weights.version for state in engines.states() if state.gate is Gate.OPEN}
            assert serving <= {committed}, engines.failures
    assert Outcome.ACTIVE in outcomes
    assert sum(len(member.engine.lines("fault")) for member in engines.members) >= UPDATES
    assert load.answers
    assert all(answer.right for answer in load.answers)
    # Nobody is asked after an answer of a newer version, and answers by an older one.
    newest_told = 0
    for asked, later in itertools.pairwise(sorted(load.answers, key=lambda answer: answer.asked)):
        newest_told = max([newest_told, *(a.version for a in load.answers if a.told < later.asked)])
        assert later.version >= newest_told, (asked, later)
    assert all(state.weights.state is WeightsState.VERIFIED for state in engines.states() if state.gate is Gate.OPEN)
