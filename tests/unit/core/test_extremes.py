"""Specs as far as the schema goes: the API server takes them, so every pass must be able to go on with them."""

from datetime import timedelta

import pytest

from rollfleet_operator.api.update_policies import OnFailure, Rolling, Strategy, StrategyType
from rollfleet_operator.api.weightversion import Deadlines, Pause, PauseMode, Phase, Probe, VerifySpec
from tests.support.builders import make_fleet, make_settings
from tests.support.simulated_updates import bump
from tests.support.simulated_world import NOW, World

DAY_S = 86400
LONGEST = Deadlines(prepare_seconds=DAY_S, quiesce_seconds=DAY_S, transfer_seconds=DAY_S, verify_seconds=DAY_S)
SHORTEST = Deadlines(prepare_seconds=1, quiesce_seconds=1, transfer_seconds=1, verify_seconds=1)
ROLLING = Strategy(type=StrategyType.ROLLING, rolling=Rolling(max_unavailable=1))
HIGHEST = 2**63 - 1


@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("strategy", [Strategy(), ROLLING], ids=["Atomic", "Rolling"])
def test_an_update_with_the_longest_deadlines_ends(strategy: Strategy, mode: PauseMode) -> None:
    world = World(make_fleet(replicas=3))
    assert world.run(60, lambda: world.all_serve(0))
    pause = Pause(mode=mode, drain_timeout_seconds=DAY_S - 1)
    tokens = VerifySpec(probe=Probe(tokens=(1, 2) * 128))
    bump(world, HIGHEST, strategy=strategy, pause=pause, deadlines=LONGEST, verify=tokens)
    assert world.run(120, lambda: world.ended(HIGHEST) and world.all_serve(HIGHEST))
    assert world.status().phase is Phase.ACTIVE


@pytest.mark.parametrize("strategy", [Strategy(), ROLLING], ids=["Atomic", "Rolling"])
def test_an_update_that_can_not_be_ends_as_well(strategy: Strategy) -> None:
    world = World(make_fleet(replicas=2))
    assert world.run(60, lambda: world.all_serve(0))
    bump(world, 1, strategy=strategy, deadlines=SHORTEST, min_serving=1000, on_failure=OnFailure(max_attempts=100))
    assert world.run(60, lambda: world.ended(1))
    assert world.status().phase is Phase.FAILED
    assert world.run(60, lambda: world.all_serve(0))


def test_an_outage_adds_nothing_to_what_an_engine_may_be_told() -> None:
    world = World(make_fleet(replicas=2))
    assert world.run(60, lambda: world.all_serve(0))
    month = (world.now, world.now + timedelta(days=30))
    world.settings = make_settings(up_since=NOW, away=(month,))
    bump(world, 1, deadlines=LONGEST)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
