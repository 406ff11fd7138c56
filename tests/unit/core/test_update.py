"""An update in the simulated cluster: the good path, how it begins, and what Preparing finds."""

from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import Accelerator, Outcome, Parallelism, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.actions import GuardCall
from rollfleet_protocol.state import Failure, FailureReason, OperationName
from tests.support.builders import make_fleet
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import DEADLINES, SLACK_S, bump, condition, failed, make_world, phases
from tests.support.simulated_world import World, slow


def test_the_good_path_goes_through_every_phase_and_tells_what_it_took() -> None:
    world = make_world()
    bump(world, 1, step="2100")
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    assert phases(world) == [
        Phase.PREPARING,
        Phase.QUIESCING,
        Phase.TRANSFERRING,
        Phase.VERIFYING,
        Phase.OPENING,
        Phase.ACTIVE,
    ]
    status = world.status()
    assert (status.version, status.committed_version, status.epoch, status.engines) == (1, 1, 2, "3/3")
    assert [target.rank_offset for target in status.targets] == [1, 2, 3]
    assert all(target.pod_uid for target in status.targets)
    assert len({target.pod_uid for target in status.targets}) == 3, "a trainer's token is for one of them"
    assert all(float(getattr(status.phase_seconds, name)) > 0 for name in type(status.phase_seconds).model_fields)
    assert 0.1 < float(status.paused_seconds) < 2
    (entry,) = status.history
    assert (entry.version, entry.step, entry.checkpoint, entry.outcome) == (1, "2100", "step-1", Outcome.ACTIVE)
    assert (entry.digest, entry.max_abs_logprob_diff) == ("sha256:step-1", "0")
    for kind in ("Accepted", "Transferred", "Verified", "Active"):
        assert condition(world, kind)[0] == "True"
    assert condition(world, "Quiesced")[:2] == ("False", "Opened")
    committed = world.fleet.status.committed
    assert committed is not None
    assert (committed.version, committed.checkpoint, committed.weight_version_uid) == (1, "step-1", "wv-uid")


def test_one_write_commits_and_a_pass_that_records_commands_nobody() -> None:
    world = make_world(version=1)
    bump(world, 2)
    before = len(world.decisions)
    assert world.run(30, lambda: world.ended(2))
    told = [d.fleet_status.status.committed for d in world.decisions[before:] if d.fleet_status is not None]
    versions = [committed.version for committed in told if committed is not None]
    assert versions == sorted(versions)
    assert world.committed_versions == [0, 1, 2]
    recorded = (0, None)
    for decision in world.decisions:
        if decision.fleet_status is not None:
            status = decision.fleet_status.status
            if recorded != (status.epoch, status.committed):
                assert not [action for action in decision.actions if isinstance(action, GuardCall)]
            recorded = (status.epoch, status.committed)


BAD_CHECKPOINTS: dict[str, Failure] = {
    "a missing path": fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-2: no such directory"),
    "an absent shard": fault(
        FailureReason.CHECKPOINT_INCOMPLETE, "model-00002-of-00002.safetensors is named but absent"
    ),
    "a truncated shard": fault(FailureReason.CHECKPOINT_INCOMPLETE, "model.safetensors is truncated"),
    "a renamed tensor": fault(FailureReason.COVERAGE_FAILED, "model.norm.weight is missing"),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_c11_a_bad_checkpoint_is_found_before_any_pause(case: str) -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = BAD_CHECKPOINTS[case]
    bump(world, 2)
    begun = world.time
    while not world.ended(2):
        world.step()
        assert world.open_versions() == [1, 1, 1]
        assert world.time < begun + DEADLINES.prepare_seconds + SLACK_S
    message = failed(world, 2, BAD_CHECKPOINTS[case].reason.value)
    assert BAD_CHECKPOINTS[case].message in message
    assert "qwen-0-0-" in message
    assert world.status().prepare_attempt in (5, 6)
    assert world.status().progress.failed[0].message == BAD_CHECKPOINTS[case].message


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_c11_why_a_checkpoint_is_read_again_is_told_from_the_first_failure_on(case: str) -> None:
    world = make_world(version=1)
    bad = BAD_CHECKPOINTS[case]
    world.store.faults["step-2"] = bad
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.PREPARE, 0.5)().seconds
    bump(world, 2)
    assert world.run(10, lambda: world.status().prepare_attempt > 1)
    said = set()
    while not world.ended(2):
        status = world.status()
        said.add(next(each.message for each in status.conditions if each.type == "Active"))
        assert {each.reason for each in status.progress.failed} == {bad.reason.value}, "also while it is read again"
        world.step()
    names = ", ".join(each.name for each in world.status().progress.failed)
    words = f"{bad.reason.value}: {names}: {bad.message}; it is tried for up to {DEADLINES.prepare_seconds} s"
    assert said == {f"{words} (spec.deadlines.prepareSeconds)."}, "and it does not flicker"
    failed(world, 2, bad.reason.value)
    told = [event.message for event in world.events if event.reason == bad.reason.value]
    assert len(told) == 2, "when it is tried again, and when it has failed"
    assert told[0] == f"version 2: Preparing is tried again: {names}: {bad.message}"


def test_an_engine_that_answers_again_is_not_said_to_be_silent_while_it_reads() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    one = world.pods[world.uid_of(1)]
    one.temper.seconds = slow(
        OperationName.PREPARE, 20.0
    )().seconds  # the others fail often: that is when it is looked at
    bump(world, 2)
    assert world.run(10, lambda: world.status().prepare_attempt > 1)
    one.cut_off_until = world.time + 3

    def told() -> set[str]:
        return {each.reason for each in world.status().progress.failed if each.name.startswith("qwen-1-")}

    assert world.run(3, lambda: told() == {"EngineUnreachable"})
    assert world.run(10, lambda: told() == {"Preparing"})


def test_c11_a_checkpoint_that_becomes_whole_in_time_is_taken() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    bump(world, 2)
    world.run(20)
    assert world.in_phase(Phase.PREPARING)
    world.store.faults.clear()
    assert world.run(20, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().prepare_attempt > 3


def test_after_failed_only_a_higher_version_starts_work() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    bump(world, 2)
    assert world.run(90, lambda: world.ended(2))
    world.store.faults.clear()
    writes = world.fleet_writes, world.weight_version_writes
    world.run(120)
    assert world.all_serve(1)
    assert (world.fleet_writes, world.weight_version_writes) == writes
    bump(world, 3)
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))


def test_engines_that_read_different_bytes_end_it_before_the_pause() -> None:
    world = make_world(replicas=2, version=1)
    bump(world, 2)
    original = world.store.read
    answers = iter(["sha256:one", "sha256:two"])

    def read(root: Any, path: str) -> Any:
        return original(root, path) if path != "step-2" else next(answers)

    world.store.read = read  # type: ignore[method-assign]
    assert world.run(30, lambda: world.ended(2))
    message = failed(world, 2, "DigestDisagrees")
    assert "qwen-0-0-" in message
    assert "qwen-1-0-" in message
    assert world.open_versions() == [1, 1]


def test_a_fleet_of_no_engines_makes_the_update_wait_and_then_fail() -> None:
    world = make_world(version=1)
    world.fleet = world.fleet.model_copy(update={"spec": world.fleet.spec.model_copy(update={"replicas": 0})})
    world.run(10)
    bump(world, 2)
    world.run(10)
    assert condition(world, "Active")[:2] == ("False", "ScaledToZero")
    assert world.in_phase(Phase.PENDING)
    assert world.run(DEADLINES.prepare_seconds, lambda: world.ended(2))
    assert "spec.replicas" in failed(world, 2, "ScaledToZero")


def test_an_engine_that_cannot_be_reached_ends_it_before_the_pause() -> None:
    world = make_world(version=1)
    world.cut_off(world.uid_of(2), 1000)
    bump(world, 2)
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    assert "does not answer" in failed(world, 2, "EngineUnreachable")
    assert world.open_versions() == [1, 1, 1]


def test_an_engine_whose_container_is_down_does_not_hold_the_others_up() -> None:
    world = make_world(version=1)
    world.load_s = 100.0
    world.crash(world.uid_of(2))
    world.run(0.2)
    bump(world, 2)
    assert world.run(20, lambda: world.ended(2))
    assert world.open_versions() == [2, 2]
    assert world.run(120, lambda: world.all_serve(2))


def test_an_engine_that_restarts_while_preparing_joins_after_the_commit() -> None:
    world = make_world(version=1, load_s=3.0)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.PREPARE, 8.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.PREPARING))
    world.crash(world.uid_of(2))
    assert world.run(30, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(30, lambda: world.all_serve(2))


def test_a_weight_version_that_is_there_at_the_begin_waits_for_version_zero() -> None:
    world = World(make_fleet(replicas=2))
    bump(world, 1)
    assert world.run(30, lambda: world.open_versions() != [])
    assert set(world.open_versions()) == {0}
    assert world.run(30, lambda: world.ended(1) and world.all_serve(1))
    assert world.committed_versions == [0, 1]


def test_engines_that_load_for_long_do_not_use_up_the_time_of_the_update() -> None:
    world = World(make_fleet(replicas=2), load_s=900.0)
    bump(world, 1)
    world.run(800)
    assert world.in_phase(Phase.PENDING)
    assert condition(world, "Active")[1] == "WaitingForFleet"
    assert world.run(300, lambda: world.ended(1) and world.all_serve(1))


def _made_again(world: World, apart: timedelta) -> dict[str, Any]:
    """Metadata of a fleet that was made in the place of this one, by a clock that is so far from the operator's."""
    return {"uid": "fleet-again", "creation_timestamp": world.now + timedelta(seconds=1) + apart}


@pytest.mark.parametrize("apart", [timedelta(0), timedelta(seconds=-10), timedelta(hours=1)])
def test_an_active_update_of_a_fleet_that_was_deleted_is_made_again_on_the_new_one(apart: timedelta) -> None:
    """The uid tells them apart: the API server's clock may be behind the operator's, or far ahead."""
    world = make_world(version=1)
    old = world.weight_versions["qwen-policy"]
    again = World(make_fleet(replicas=2))
    meta = again.fleet.metadata.model_copy(update=_made_again(world, apart))
    again.time = world.time + 1
    again.fleet = again.fleet.model_copy(update={"metadata": meta, "status": RolloutEngineStatus()})
    again.weight_versions["qwen-policy"] = old
    assert again.run(30, lambda: again.all_serve(1))
    assert again.committed_versions == [0, 1]


def test_what_failed_on_a_fleet_that_was_deleted_is_tried_on_the_one_that_was_made_in_its_place() -> None:
    world = make_world(replicas=2, version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "no step-2")
    bump(world, 2)
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    old = world.weight_versions["qwen-policy"]
    again = World(make_fleet(replicas=2))
    meta = again.fleet.metadata.model_copy(update=_made_again(world, timedelta(seconds=-10)))
    again.time = world.time + 1
    again.fleet = again.fleet.model_copy(update={"metadata": meta, "status": RolloutEngineStatus()})
    again.weight_versions["qwen-policy"] = old
    assert again.run(60, lambda: again.all_serve(2))
    assert again.committed_versions == [0, 2]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Parallelism(data=2), "2 data-parallel ranks (spec.parallelism.data): it reports 1"),
        (Parallelism(tensor=2), "2 workers (spec.parallelism: tensor x pipeline x data): it reports 1"),
        (Parallelism(pipeline=2), "2 workers (spec.parallelism: tensor x pipeline x data): it reports 1"),
    ],
)
def test_c17_a_size_that_differs_from_the_spec_is_named_before_any_pause(sizes: Parallelism, words: str) -> None:
    world = World(make_fleet(replicas=2, parallelism=sizes, accelerator=Accelerator(per_pod=2)))
    assert world.run(60, lambda: world.all_serve(0))
    bump(world, 1, deadlines=DEADLINES.model_copy(update={"prepare_seconds": 5}))
    assert world.run(30, lambda: world.ended(1))
    message = failed(world, 1, "Unsupported")
    assert words in message
    assert world.all_serve(0)
