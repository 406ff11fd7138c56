"""Weights that a trainer sends, through the whole of an update: who is waited for, what is recorded, what fails how."""

import random
from typing import Any

import pytest

from rollfleet_operator.api.weightversion import FailureType, OnFailure, Phase, WeightVersionStatus
from rollfleet_operator.api.weightversion import Trainer as SourceTrainer
from rollfleet_operator.core.accept import judge_weight_version
from rollfleet_protocol.commands import Close, Transfer
from rollfleet_protocol.state import DigestSource, EngineState, FailureReason, OperationName, WeightsState
from tests.support.builders import make_fleet, make_settings, make_weight_version
from tests.support.simulated_engine import fault
from tests.support.simulated_pushes import GLOO, NO_RETRY, TRAINERS, ask, make_world, push
from tests.support.simulated_trainer import ACCOUNT, PUSHED, Trainer, digest_sent, still_old
from tests.support.simulated_updates import DEADLINES, SLACK_S, bump, condition, failed, phases
from tests.support.simulated_world import World


def closes(world: World) -> int:
    return sum(isinstance(getattr(call, "command", None), Close) for each in world.decisions for call in each.actions)


def test_a_push_goes_through_every_phase_and_is_committed_by_the_digest_that_the_trainer_told() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    status, committed = world.status(), world.fleet.status.committed
    assert committed is not None
    assert (committed.version, committed.digest, committed.checkpoint) == (1, digest_sent(1), None)
    assert (status.digest, status.digest_source) == (digest_sent(1), DigestSource.TRAINER)
    assert status.sender is not None
    assert (status.sender.service_account_name, status.sender.uid) == (ACCOUNT, "account-uid")
    assert (status.history[-1].digest_source, status.history[-1].checkpoint) == (DigestSource.TRAINER, "")
    wanted = [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING, Phase.ACTIVE]
    assert [phase for phase in phases(world) if phase in wanted] == wanted


def test_ranks_follow_the_ordinals_and_the_group_counts_everybody() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1))
    pushes = {
        call.pod: call.command.push
        for each in world.decisions
        for call in each.actions
        if isinstance(getattr(call, "command", None), Transfer)
    }
    assert sorted((made.rank_offset, made.world_size, made.workers) for made in pushes.values()) == [
        (1, 4, 1),
        (2, 4, 1),
        (3, 4, 1),
    ]
    assert {made.holder for made in pushes.values()} == {f"{ACCOUNT}/1"}
    assert {made.sender.subject for made in pushes.values()} == {f"system:serviceaccount:rl:{ACCOUNT}"}


def sentences(world: World, phase: Phase) -> set[str]:
    """What condition Active has said in this phase."""
    written = [write.status for each in world.decisions for write in each.weight_version_statuses]
    return {each.message for one in written if one.phase is phase for each in one.conditions if each.type == "Active"}


def test_nothing_that_is_said_of_a_push_speaks_of_a_checkpoint() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    said = {each for phase in Phase for each in sentences(world, phase)}
    told = {each.message for each in world.events if each.kind == "WeightVersion"}
    assert "All that can fail is checked before anything is paused." in said
    assert "version 1: All that can fail is checked before anything is paused." in told
    assert not [each for each in said | told if "checkpoint" in each]


def test_nor_of_its_second_attempt() -> None:
    world = make_world()
    sender = push(world, 1, Trainer(send_s=30.0))
    assert world.run(60, lambda: sender.touched == 3)
    sender.alive = False
    assert world.run(60, lambda: world.status().attempt == 2)
    sender = world.lease.take(Trainer(holder=f"{ACCOUNT}/2"))
    world.run(5)
    sender.offer(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    again = [each for each in sentences(world, Phase.PREPARING) if "attempt 1 failed" in each]
    assert again
    assert all(each.startswith("Engines stay closed until a trainer sends the version. Attempt 2") for each in again)


# --- before the pause


def _nobody(world: World) -> None:
    """No trainer at all."""


def _another_version(world: World) -> None:
    world.lease.take(Trainer()).offer(world, 7)


def _nothing_offered(world: World) -> None:
    world.lease.take(Trainer())


def _a_stranger(world: World) -> None:
    world.lease.take(Trainer(holder="ppo/1")).offer(world, 1)


def _an_account_that_is_gone(world: World) -> None:
    world.lease.take(Trainer(account_uid="")).offer(world, 1)


def _dead(world: World) -> None:
    sender = world.lease.take(Trainer(alive=False))
    sender.offer(world, 1)


def _gave_up(world: World) -> None:
    world.lease.take(Trainer()).offer(world, 1)
    world.lease.release("out of memory")


@pytest.mark.parametrize(
    ("arrange", "words"),
    [
        (_nobody, "no trainer holds Lease 'qwen-sender'"),
        (_another_version, "does not offer version 1"),
        (_nothing_offered, "does not offer version 1"),
        (_a_stranger, "'ppo' may not send this version"),
        (_an_account_that_is_gone, "there is no ServiceAccount 'grpo'"),
        (_dead, "has not renewed"),
        (_gave_up, "out of memory"),
    ],
)
def test_no_fleet_pauses_for_a_sender_that_is_not_there(arrange: Any, words: str) -> None:
    world = make_world()
    ask(world, 1)
    arrange(world)
    world.run(DEADLINES.prepare_seconds / 2)
    assert words in condition(world, "Active")[2], "what is waited for is told before the deadline"
    assert world.run(DEADLINES.prepare_seconds, lambda: world.ended(1))
    assert words in failed(world, 1, "SenderMissing")
    assert closes(world) == 0
    assert world.all_serve(0)


def test_a_trainer_that_comes_late_is_taken_at_once() -> None:
    world = make_world()
    ask(world, 1)
    world.run(20)
    before = world.time
    world.lease.take(Trainer()).offer(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert world.time - before < 10


def test_only_the_account_that_the_version_names_may_send_it() -> None:
    world = make_world()
    bump(world, 1, source=PUSHED.model_copy(update={"trainer": SourceTrainer(service_account_name="other")}))
    world.lease.take(Trainer()).offer(world, 1)
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(1))
    assert "may not send this version" in failed(world, 1, "SenderMissing")


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"weight_transfer": GLOO}, "spec.trainers"),
        ({"trainers": TRAINERS}, "spec.weightTransfer"),
    ],
)
def test_a_push_that_nobody_could_make_is_refused(fleet: dict[str, Any], words: str) -> None:
    verdict = judge_weight_version(make_weight_version(1, source=PUSHED), make_fleet(**fleet), None, None)
    assert not verdict.accepted
    assert words in verdict.message


# --- what came


def test_who_received_other_bytes_than_most_is_out_by_itself() -> None:
    world = make_world()
    push(world, 1, Trainer(tells_digest=False, received={1: "sha256:pushed-flipped"}))
    assert world.run(60, lambda: world.ended(1))
    assert (world.status().digest, world.status().digest_source) == (digest_sent(1), DigestSource.ENGINES_ONLY)
    assert world.open_versions().count(1) == 2
    assert world.process_of(1).state.gate == "Closed"


def _lie(world: World, ordinal: int, digest: str | None) -> None:
    """This guard says so of what it received."""
    process = world.process_of(ordinal)
    truth = process.wire

    def told(now: float) -> EngineState:
        state = truth(now)
        new = (state.weights.version or 0) > 1
        return (
            state.model_copy(update={"weights": state.weights.model_copy(update={"digest": digest})}) if new else state
        )

    process.wire = told  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("digest", "words"),
    [(None, "names no digest"), ("", "names no digest"), (digest_sent(1), "nobody says that this was sent")],
)
def test_c28_success_without_new_weights_is_never_a_match(digest: str | None, words: str) -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    for ordinal in range(3):
        _lie(world, ordinal, digest)
    sender = Trainer(holder=f"{ACCOUNT}/2", tells_digest=False)
    push(world, 2, sender, on_failure=OnFailure(type=FailureType.HOLD))
    assert world.run(200, lambda: world.ended(2))
    assert words in failed(world, 2, "DigestDisagrees")


def test_the_same_weights_sent_again_are_a_version_of_their_own() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    push(world, 2, Trainer(holder=f"{ACCOUNT}/2", received=dict.fromkeys(range(3), digest_sent(1))))
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))


def test_no_majority_no_commit() -> None:
    world = make_world(replicas=2)
    push(world, 1, Trainer(tells_digest=False, received={1: "sha256:pushed-flipped"}), on_failure=NO_RETRY)
    assert world.run(200, lambda: world.ended(1) and world.all_serve(0))
    assert "sha256:pushed-flipped" in failed(world, 1, "DigestDisagrees")


def test_a_transfer_that_breaks_is_tried_again_with_the_same_trainer() -> None:
    world = make_world()
    pod = world.pods[world.uid_of(1)]
    sender = Trainer()
    push(world, 1, sender)
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    assert pod.process is not None
    assert world.run(10, lambda: world.lease.trainer is not None and world.lease.trainer.touched == 3)
    pod.temper.fails[OperationName.TRANSFER] = fault(FailureReason.TRANSFER_FAILED, "connection closed by peer")
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert world.status().attempt == 2


MISFIT = fault(FailureReason.COVERAGE_FAILED, "the model has no tensor 'model.nrom.weight'")


def break_off(world: World, faults: dict[int, Any]) -> None:
    """These engines end the running push so."""
    for ordinal, each in faults.items():
        world.pods[world.uid_of(ordinal)].temper.fails[OperationName.TRANSFER] = each


@pytest.mark.parametrize("others", [MISFIT, fault(FailureReason.TRANSFER_FAILED, "the trainer gave up: ...")])
def test_names_that_the_model_does_not_have_are_not_sent_again(others: Any) -> None:
    """Whoever was first to say so, the others may only have heard that the trainer gave up."""
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    sender = push(world, 2, Trainer(holder=f"{ACCOUNT}/2"))
    assert world.run(60, lambda: sender.touched == 3)
    break_off(world, {0: others, 1: MISFIT, 2: others})
    assert world.run(60, lambda: world.ended(2))
    message = failed(world, 2, "WeightsLost")
    assert "CoverageFailed" in message
    assert "no tensor 'model.nrom.weight'; it is not tried again: the same weights would end alike; " in message
    assert message.endswith("version 1 is stored nowhere: the fleet stays closed until it is given another one")
    assert world.status().attempt == 1


def test_an_engine_that_alone_cannot_take_them_is_left_out_as_ever() -> None:
    world = make_world()
    sender = push(world, 1)
    assert world.run(60, lambda: sender.touched == 3)
    break_off(world, {1: MISFIT})
    assert world.run(60, lambda: world.ended(1))
    assert (world.status().phase, world.status().attempt) == (Phase.ACTIVE, 1)
    assert MISFIT.message in world.status().history[-1].message


def test_what_one_engine_took_and_too_few_others_did_is_tried_again() -> None:
    world = make_world(replicas=2)
    sender = push(world, 1, min_serving=2)
    assert world.run(60, lambda: sender.touched == 2)
    break_off(world, {1: MISFIT})
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert (world.status().phase, world.status().attempt) == (Phase.ACTIVE, 2)


# --- whoever dies


@pytest.mark.parametrize(
    "phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING]
)
def test_an_operator_that_comes_back_goes_on(phase: Phase) -> None:
    world = make_world()
    sender = push(world, 1, Trainer(send_s=5.0))
    if phase is Phase.PREPARING:
        sender.offers = ""
    assert world.run(60, lambda: world.in_phase(phase))
    world.restart_operator(3.0)
    sender.offer(world, 1)
    assert world.run(90, lambda: world.ended(1) and world.all_serve(1))


def _delete_one(world: World) -> None:
    for uid in list(world.pods)[:1]:
        world.delete_pod(uid)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_to_trainers_and_operators_every_update_ends_and_nothing_stale_is_served(seed: int) -> None:
    """Trainers die, stall, give up and are replaced at random times; so do operators, engines and words."""
    rng = random.Random(seed)
    world = make_world(seed=seed)
    world.faults.lose_answer, world.faults.lose_command, world.faults.skip_poll = 0.05, 0.05, 0.1
    world.faults.conflict = 0.05
    longest = 3 * (sum((DEADLINES.prepare_seconds, DEADLINES.quiesce_seconds, DEADLINES.transfer_seconds, 20)) + 10)
    for version in range(1, 5):
        sender = push(world, version, Trainer(holder=f"{ACCOUNT}/{version}", send_s=rng.uniform(0.1, 6.0)))
        sender.stalls, sender.tells_digest = rng.random() < 0.2, rng.random() < 0.7
        fate = rng.random()
        if fate < 0.4:
            world.later(rng.uniform(0.0, 8.0), lambda sender=sender: setattr(sender, "alive", False))
        elif fate < 0.6:
            world.later(rng.uniform(0.0, 8.0), lambda sender=sender: setattr(sender, "offers", ""))
        if rng.random() < 0.3:
            world.later(rng.uniform(0.0, 8.0), lambda: world.restart_operator(rng.uniform(0.0, 4.0)))
        if rng.random() < 0.3:
            world.later(rng.uniform(0.0, 8.0), lambda: _delete_one(world))
        ended = world.run(longest, lambda version=version: world.ended(version))
        assert ended, (version, world.status().phase, condition(world, "Active"))
    assert still_old(world) or all(
        pod.process is None or pod.process.state.weights.state is not WeightsState.UPDATING
        for pod in world.pods.values()
    )


def test_the_record_of_a_push_reads_as_it_was_written() -> None:
    world = make_world()
    push(world, 1)
    assert world.run(60, lambda: world.ended(1))
    assert WeightVersionStatus.model_validate(world.status().dump()) == world.status()
    assert make_settings().operator_subject
