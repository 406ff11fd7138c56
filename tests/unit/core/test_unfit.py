"""An update that no engine of the fleet can take is not waited for; one that somebody may take yet is."""

import pytest

from rollfleet_operator.api.weightversion import Probe, VerifySpec
from rollfleet_operator.core.fitness import never
from rollfleet_operator.core.moves import Update
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import build_world
from rollfleet_protocol.state import EngineState
from tests.support.simulated_pushes import make_world as make_pushed
from tests.support.simulated_pushes import push
from tests.support.simulated_updates import DEADLINES, SLACK_S, bump, condition, failed, make_world
from tests.support.simulated_world import World

FAR = VerifySpec(probe=Probe(tokens=(1, 999_999)))


def know(world: World, ordinal: int, **facts: object) -> None:
    """From now on this engine's guard tells so of itself."""
    process = world.process_of(ordinal)
    truth = process.wire

    def told(now: float) -> EngineState:
        state = truth(now)
        return state.model_copy(update={"facts": state.facts.model_copy(update=facts)})

    process.wire = told  # type: ignore[method-assign]


def lack(world: World, ordinal: int, capability: str) -> None:
    has = world.process_of(ordinal).wire(world.time).facts.capabilities
    know(world, ordinal, capabilities=tuple(each for each in has if each != capability))


@pytest.mark.parametrize("lacking", ["source/Trainer", "backend/gloo", "verify/Logprobs"])
def test_a_push_that_no_engine_can_take_fails_at_once(lacking: str) -> None:
    world = make_pushed(replicas=3)
    for ordinal in range(3):
        lack(world, ordinal, lacking)
    push(world, 1)
    assert world.run(SLACK_S, lambda: world.ended(1))
    message = failed(world, 1, "Unsupported")
    assert f"lacks {lacking}; nothing is waited for" in message
    assert message.endswith("no weights were touched, version 0 stays")
    assert {each.reason for each in world.status().progress.failed} == {"Unsupported"}
    assert world.all_serve(0)


def test_nor_is_one_tried_again_whose_probe_no_model_here_knows() -> None:
    world = make_pushed(replicas=2)
    for ordinal in range(2):
        know(world, ordinal, vocabulary=1000)
    push(world, 1, verify=FAR)
    assert world.run(SLACK_S, lambda: world.ended(1))
    assert "names token 999999, its model has 1000" in failed(world, 1, "ProbeFailed")
    assert world.all_serve(0)


def test_one_engine_of_several_that_lacks_it_is_waited_for() -> None:
    """Who makes it wait is told from the beginning."""
    world = make_pushed(replicas=2)
    lack(world, 1, "source/Trainer")
    push(world, 1)
    assert not world.run(DEADLINES.prepare_seconds / 2, lambda: world.ended(1))
    assert "lacks source/Trainer; it is tried for up to" in condition(world, "Active")[2]
    del world.process_of(1).wire  # type: ignore[attr-defined] - it tells the truth again
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))


@pytest.mark.parametrize("version", [1, 2])
def test_engines_that_are_being_replaced_by_another_image_are_waited_for(version: int) -> None:
    world = make_world(version=version - 1)
    for ordinal in range(3):
        lack(world, ordinal, "source/Checkpoint")
    spec = world.fleet.spec.model_copy(update={"image": "registry.example/engine:2"})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    bump(world, version)
    assert world.run(120, lambda: world.ended(version) and world.all_serve(version))
    assert condition(world, "Active")[:2] == ("True", "Active")


def is_hopeless(world: World) -> bool:
    observed = world.observe()
    (weight_version,) = observed.weight_versions
    update = Update(build_world(observed), Record.of(observed.fleet), weight_version, Work(world.now))
    return never(update) is not None


def test_nothing_is_hopeless_before_the_first_pod_of_another_image_is_made() -> None:
    world = make_world()
    for ordinal in range(3):
        lack(world, ordinal, "source/Checkpoint")
    bump(world, 1)
    world.run(0.3)
    assert is_hopeless(world)
    spec = world.fleet.spec.model_copy(update={"image": "registry.example/engine:2"})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    assert not is_hopeless(world)


def test_nor_while_an_engine_is_about_to_come_up() -> None:
    world = make_world()
    for ordinal in range(3):
        lack(world, ordinal, "source/Checkpoint")
    bump(world, 1)
    world.run(0.3)
    assert is_hopeless(world)
    world.crash(world.uid_of(1))
    world.run(0.3)
    assert not is_hopeless(world)
