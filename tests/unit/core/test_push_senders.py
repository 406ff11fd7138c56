"""A sender that goes away, gives up, loses its right, or is another one."""

import pytest

from rollfleet_operator.api.launch import TrainerRef
from rollfleet_operator.api.weightversion import Phase
from rollfleet_protocol.state import OperationName
from tests.support.simulated_pushes import NO_RETRY, ask, make_world, push
from tests.support.simulated_trainer import ACCOUNT, Trainer
from tests.support.simulated_updates import aftermath, condition, failed, fleet_condition


@pytest.mark.parametrize("phase", [Phase.QUIESCING, Phase.TRANSFERRING])
def test_untouched_the_fleet_reopens_as_soon_as_the_lease_runs_out(phase: Phase) -> None:
    world = make_world()
    for pod in world.pods.values():
        pod.temper.seconds = lambda step: 20.0 if step is OperationName.CLOSE and phase is Phase.QUIESCING else 0.1
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(phase))
    sender.alive = False
    died = world.time
    assert world.run(60, lambda: world.ended(1) and world.all_serve(0))
    assert world.time - died < 25
    assert "has not renewed" in failed(world, 1, "SenderLost")
    assert aftermath(world) == "Reopened"


def test_touched_it_waits_closed_for_a_sender_and_another_one_brings_it_to_its_end() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(send_s=30.0))
    assert world.run(60, lambda: sender.touched == 3)
    sender.alive = False
    assert world.run(60, lambda: world.status().attempt == 2)
    world.run(5)
    assert world.open_versions() == []
    other = world.lease.take(Trainer(holder=f"{ACCOUNT}/2"))
    other.offer(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert world.status().sender is not None
    assert world.status().sender.holder == f"{ACCOUNT}/2"  # type: ignore[union-attr]


def test_touched_and_nobody_comes_the_version_before_is_restored() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(send_s=30.0))
    assert world.run(60, lambda: sender.touched == 3)
    sender.alive = False
    assert world.run(200, lambda: world.ended(1) and world.all_serve(0))
    assert "model.path" in failed(world, 1, "SenderMissing")
    assert aftermath(world) == "Restored"


def test_what_is_stored_nowhere_and_lost_asks_for_weights() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    sender = push(world, 2, Trainer(holder=f"{ACCOUNT}/2", send_s=30.0), on_failure=NO_RETRY)
    assert world.run(60, lambda: sender.touched == 3)
    sender.alive = False
    assert world.run(200, lambda: world.ended(2))
    assert condition(world, "Active")[1] == "WeightsLost"
    assert world.run(30, lambda: fleet_condition(world, "Available").reason == "WeightsLost")
    push(world, 3, Trainer(holder=f"{ACCOUNT}/3"))
    assert world.run(60, lambda: world.ended(3) and world.all_serve(3))


def test_a_lease_that_changes_hands_ends_the_push() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    thief = world.lease.take(Trainer(holder=f"{ACCOUNT}/2", stalls=True))
    thief.offer(world, 1)
    assert world.run(10, lambda: world.ended(1))
    assert f"{ACCOUNT}/2" in failed(world, 1, "SenderLost")
    assert sender.touched == 0
    assert world.run(10, lambda: world.all_serve(0))


@pytest.mark.parametrize("how", ["offers nothing", "is taken off the list"])
def test_a_sender_that_gives_up_or_loses_its_right_is_not_waited_for(how: str) -> None:
    world = make_world()
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    if how == "offers nothing":
        sender.offers, sender.message = "", "NaN in the gradients"
    else:
        spec = world.fleet.spec.model_copy(update={"trainers": (TrainerRef(service_account_name="other"),)})
        world.fleet = world.fleet.model_copy(update={"spec": spec})
    assert world.run(10, lambda: world.ended(1))
    text = failed(world, 1, "SenderLost")
    assert ("NaN in the gradients" if how == "offers nothing" else "may not send") in text


def test_once_all_hold_the_weights_the_trainer_is_not_needed() -> None:
    world = make_world()
    for pod in world.pods.values():
        pod.temper.seconds = lambda step: 15.0 if step is OperationName.VERIFY else 0.1
    sender = push(world, 1)
    assert world.run(60, lambda: world.in_phase(Phase.VERIFYING))
    sender.alive = False
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))


def test_time_in_which_nobody_could_renew_is_not_held_against_the_trainer() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    left = world.now
    world.down_until = world.time + 30
    world.run(30)
    world.settings = world.settings.__class__(**{**world.settings.__dict__, "away": ((left, world.now),)})
    sender.stalls = False
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))


def test_an_attempt_after_an_interruption_has_no_sender_before_it_pauses() -> None:
    """The epoch was raised over it, as by another operator whose word of it never came: what it chose is forgotten."""
    world = make_world()
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    raised = world.fleet.status.model_copy(update={"epoch": world.fleet.status.epoch + 1})
    world.fleet = world.fleet.model_copy(update={"status": raised})
    sender.offers, sender.stalls = "", False
    assert world.run(60, lambda: world.in_phase(Phase.PREPARING))
    assert (world.status().sender, world.status().digest) == (None, "")
    sender.offer(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))


def test_a_higher_version_goes_straight_on_from_a_push_that_touched() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(send_s=30.0))
    assert world.run(60, lambda: sender.touched == 3)
    sender.send_s = 1.0
    ask(world, 2)
    sender.offer(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().history[0].outcome == "Superseded"


def test_a_running_push_of_an_older_epoch_is_not_waited_for() -> None:
    """Its transfer has 40 s: a newer version begins at once all the same."""
    world = make_world()
    sender = push(world, 1, Trainer(stalls=True))
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    began = world.time
    sender.stalls = False
    ask(world, 2)
    sender.offer(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert world.time - began < 20
