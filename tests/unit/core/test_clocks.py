"""Clocks that do not agree: the API server's, that of the operator before, and ours."""

from datetime import timedelta

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.state import FailureReason
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_settings,
    make_state,
)
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import DEADLINES, bump
from tests.support.simulated_world import World

HOUR = timedelta(hours=1)


def _bump_to_nothing(world: World) -> None:
    world.store.faults["step-1"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no such folder")
    bump(world, 1)


def test_an_update_ends_on_a_fleet_that_was_made_in_the_future() -> None:
    fleet = make_fleet(replicas=2)
    metadata = fleet.metadata.model_copy(update={"creation_timestamp": NOW + HOUR})
    world = World(fleet.model_copy(update={"metadata": metadata}))
    assert world.run(30, lambda: world.all_serve(0))
    bump(world, 1)
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    assert (world.fleet.status.epoch, world.status().phase) == (2, Phase.ACTIVE)


def test_a_deadline_passes_though_another_clock_began_the_phase_in_the_future() -> None:
    world = World(make_fleet(replicas=2))
    assert world.run(30, lambda: world.all_serve(0))
    _bump_to_nothing(world)
    assert world.run(5, lambda: world.status().phase is Phase.PREPARING)
    (found,) = world.weight_versions.values()
    later = found.status.model_copy(update={"phase_started_at": world.now + HOUR})
    world.weight_versions[found.metadata.name] = found.model_copy(update={"status": later})
    world.restart_operator()
    assert world.run(DEADLINES.prepare_seconds + 5, lambda: world.status().phase is Phase.FAILED)


def test_counts_are_written_though_the_last_ones_were_written_in_the_future() -> None:
    observed = make_observed(make_fleet(status=RolloutEngineStatus(epoch=1, committed=make_committed(0))))
    first = plan(observed, NOW + HOUR).fleet_status
    assert first is not None
    guards = {"pod-0": make_guard(make_state(0)), "pod-1": make_guard(make_state(0, open=False, incarnation="b"))}
    told = plan(make_observed(make_fleet(status=first.status), guards=guards), NOW).fleet_status
    assert told is not None
    assert told.status.serving_replicas == 1


def test_time_in_which_the_api_server_was_away_costs_an_update_nothing() -> None:
    world = World(make_fleet(replicas=2))
    assert world.run(30, lambda: world.all_serve(0))
    _bump_to_nothing(world)
    assert world.run(5, lambda: world.status().phase is Phase.PREPARING)
    begun, seconds = world.now, DEADLINES.prepare_seconds
    world.settings = make_settings(up_since=NOW, away=((begun, begun + HOUR),))
    assert not world.run(seconds + 5, lambda: world.status().phase is Phase.FAILED)
    assert world.run(3600, lambda: world.status().phase is Phase.FAILED)
