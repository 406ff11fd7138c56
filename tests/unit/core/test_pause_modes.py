"""Pause modes in the core: passed on to the guards, told in a condition, refused where they contradict a deadline."""

import pytest

from rollfleet_operator.api.weightversion import Deadlines, Pause, PauseMode
from rollfleet_operator.core.accept import judge_weight_version
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.fitness import NEEDED
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.commands import Close
from tests.support.builders import make_fleet, make_weight_version
from tests.support.simulated_updates import bump, condition, make_world
from tests.support.simulated_world import World


def closes(world: World) -> list[Close]:
    calls = [action for decision in world.decisions for action in decision.actions if isinstance(action, GuardCall)]
    return [call.command for call in calls if isinstance(call.command, Close)]


@pytest.mark.parametrize("mode", list(PauseMode))
def test_guards_are_told_the_mode_and_its_bounds(mode: PauseMode) -> None:
    world = make_world()
    bump(world, 1, pause=Pause(mode=mode, drain_timeout_seconds=7))
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    told = closes(world)
    assert len(told) >= 3
    for command in told:
        assert (command.mode.value, command.drain_timeout_seconds, command.keep_seconds) == (mode.value, 7, 90)
    if mode is PauseMode.KEEP:
        assert condition(world, "SpansVersions")[:2] == ("True", "RequestsKept")
    else:
        assert find(world.status().conditions, "SpansVersions") is None


def test_a_later_update_that_keeps_nobody_says_so() -> None:
    world = make_world()
    bump(world, 1, pause=Pause(mode=PauseMode.KEEP))
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    bump(world, 2)
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))
    assert condition(world, "SpansVersions")[:2] == ("False", "NoneKept")


def test_waiting_must_end_before_quiescing_has_to() -> None:
    deadlines = Deadlines(quiesce_seconds=60)
    for mode, drain, accepted in (
        (PauseMode.WAIT, 60, False),
        (PauseMode.WAIT, 59, True),
        (PauseMode.KEEP, 60, True),
        (PauseMode.ABORT, 600, True),
    ):
        weight_version = make_weight_version(
            1, pause=Pause(mode=mode, drain_timeout_seconds=drain), deadlines=deadlines
        )
        verdict = judge_weight_version(weight_version, make_fleet(), weight_version, None)
        assert verdict.accepted is accepted, mode
        if not accepted:
            assert verdict.reason is Reason.INVALID_SPEC
            assert "spec.pause.drainTimeoutSeconds" in verdict.message


def test_an_engine_that_cannot_keep_is_named_before_any_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    able = ("source/Checkpoint", *NEEDED, "pause/abort")
    lacking = world.process_of(0).wire(0).facts.model_copy(update={"capabilities": able})
    monkeypatch.setattr("tests.support.simulated_engine.FACTS", lacking)
    bump(world, 1, pause=Pause(mode=PauseMode.KEEP), deadlines=Deadlines(prepare_seconds=5))
    assert world.run(30, lambda: world.ended(1))
    assert not closes(world)
    assert "lacks pause/keep" in condition(world, "Active")[2]
