"""Pushes that come to nothing before weights are touched: what is said of them, and what it costs."""

from typing import Any

import pytest

from rollfleet_operator.api.weightversion import Phase
from rollfleet_protocol.state import DigestSource, Failure, FailureReason, OperationName, WeightsState
from tests.support.simulated_engine import fault
from tests.support.simulated_pushes import NO_RETRY, make_world, push
from tests.support.simulated_trainer import ACCOUNT, Trainer
from tests.support.simulated_updates import failed
from tests.support.simulated_world import World

MISFIT = fault(FailureReason.COVERAGE_FAILED, "the model has no tensor 'model.nrom.weight'")
BROKE_OFF = fault(FailureReason.TRANSFER_FAILED, 'the trainer broke off: "..."')


def waiting_for_tensors(**spec: Any) -> World:
    """Version 1 was pushed and is stored nowhere; of version 2 nothing has come yet."""
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    push(world, 2, Trainer(holder=f"{ACCOUNT}/2", stalls=True), **spec)
    assert world.run(60, lambda: all(each.state.push is not None for each in processes(world)))
    return world


def processes(world: World) -> list[Any]:
    return [pod.process for pod in world.pods.values() if pod.process is not None]


def refuse(world: World, faults: dict[int, Failure]) -> None:
    for ordinal, failure in faults.items():
        process = world.pods[world.uid_of(ordinal)].process
        assert process is not None
        process.refuse_push(world.time, failure)


def test_tensors_that_fit_nobody_cost_a_pause_and_the_end_is_told_when_nobody_takes_any_more() -> None:
    world = waiting_for_tensors()
    refuse(world, {0: BROKE_OFF, 1: MISFIT})
    world.run(5)
    assert world.in_phase(Phase.TRANSFERRING), "the last one hears of it from the trainer, and might take tensors then"
    refuse(world, {2: BROKE_OFF})
    assert world.run(10, lambda: world.ended(2) and world.all_serve(1))
    message = failed(world, 2, "CoverageFailed")
    assert message.endswith("the same weights would end alike; no weights were touched, version 1 stays")
    assert world.status().attempt == 1


def test_a_trainer_that_breaks_nothing_off_is_waited_for_as_long_as_its_lease_lasts() -> None:
    world = waiting_for_tensors(on_failure=NO_RETRY)
    refuse(world, {1: BROKE_OFF})
    assert world.lease.trainer is not None
    world.lease.trainer.alive = False
    assert world.run(30, lambda: world.ended(2) and world.all_serve(1))
    message = failed(world, 2, "TransferFailed")
    assert message.endswith("engines that hold version 1 serve it again, as it is stored nowhere")


def test_who_has_taken_tensors_is_waited_for_no_longer() -> None:
    world = waiting_for_tensors(on_failure=NO_RETRY)
    first = world.pods[world.uid_of(0)].process
    assert first is not None
    first.push(world.time, "sha256:2", DigestSource.TRAINER, 1000.0)
    refuse(world, {1: BROKE_OFF})
    assert world.run(5, lambda: world.ended(2))
    assert "no weights were touched" not in failed(world, 2, "TransferFailed")


def test_a_group_that_does_not_form_is_tried_again() -> None:
    """That nothing was touched is no reason to give up."""
    world = waiting_for_tensors()
    group = fault(FailureReason.TRANSFER_FAILED, "rank 1 of 4 cannot join")
    refuse(world, dict.fromkeys(range(3), group))
    assert world.lease.trainer is not None
    world.lease.trainer.stalls = False
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert (world.status().phase, world.status().attempt) == (Phase.ACTIVE, 2)


def test_an_end_after_an_attempt_that_touched_weights_does_not_say_that_none_were() -> None:
    world = waiting_for_tensors()
    touched = world.pods[world.uid_of(0)].process
    assert touched is not None
    touched.push(world.time, "sha256:2", DigestSource.TRAINER, 1.0)
    world.run(0.5)
    world.pods[world.uid_of(0)].temper.fails[OperationName.TRANSFER] = BROKE_OFF
    refuse(world, {1: BROKE_OFF, 2: BROKE_OFF})
    assert world.run(60, lambda: world.status().attempt == 2 and world.in_phase(Phase.TRANSFERRING))
    assert world.run(5, lambda: all(each.state.push is not None for each in processes(world)))
    refuse(world, dict.fromkeys(range(3), MISFIT))
    assert world.run(60, lambda: world.ended(2))
    assert "no weights were touched" not in world.status().history[-1].message


@pytest.mark.parametrize("failure", [MISFIT, BROKE_OFF])
def test_one_attempt_that_touched_nothing_reopens_at_once(failure: Failure) -> None:
    world = waiting_for_tensors(on_failure=NO_RETRY)
    refuse(world, dict.fromkeys(range(3), failure))
    assert world.run(5, lambda: world.ended(2) and world.all_serve(1))
    assert all(each.state.weights.state is WeightsState.VERIFIED for each in processes(world))
    assert failed(world, 2, failure.reason.value).endswith("no weights were touched, version 1 stays")


def test_weights_that_only_an_odd_engine_holds_are_lost() -> None:
    """It never serves them."""
    world = make_world()
    push(world, 1)
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    odd = world.pods[world.uid_of(2)]
    odd.temper.skew = -0.5
    assert world.run(60, lambda: world.ended(1))
    odd.temper.skew = 0.0
    push(world, 2, Trainer(holder=f"{ACCOUNT}/2", stalls=True), on_failure=NO_RETRY)
    assert world.run(60, lambda: all(each.state.push is not None for each in processes(world)))
    for ordinal in (0, 1):
        pod = world.pods[world.uid_of(ordinal)]
        assert pod.process is not None
        pod.process.push(world.time, "sha256:2", DigestSource.TRAINER, 1.0)
        pod.temper.fails[OperationName.TRANSFER] = BROKE_OFF
    refuse(world, {2: BROKE_OFF})
    assert world.run(60, lambda: world.ended(2))
    assert failed(world, 2, "WeightsLost").endswith("the fleet stays closed until it is given another one")
