"""An update in a simulated cluster: the good path, the failures of each phase, and what is recorded."""

from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import Deadlines, Phase, Probe, VerifySpec
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.conditions import find
from rollfleet_protocol.commands import Open
from rollfleet_protocol.state import Failure, FailureReason, OperationName
from tests.support.builders import make_fleet, make_weight_version
from tests.support.simulated_engine import fault
from tests.support.simulated_world import World, slow

DEADLINES = Deadlines(prepare_seconds=60, quiesce_seconds=30, transfer_seconds=40, verify_seconds=20)
SLACK_S = 5.0


def make_world(replicas: int = 3, version: int = 0, **options: Any) -> World:
    """A fleet that serves the version."""
    world = World(make_fleet(replicas=replicas), **options)
    assert world.run(60, lambda: world.all_serve(0))
    if version:
        bump(world, version)
        assert world.run(60, lambda: world.ended(version) and world.all_serve(version))
    return world


def bump(world: World, version: int, **spec: Any) -> None:
    """Ask for a version."""
    world.apply_weight_version(make_weight_version(version, **({"deadlines": DEADLINES} | spec)))


def condition(world: World, kind: str) -> tuple[str, str, str]:
    """(status, reason, message) of the WeightVersion's condition."""
    found = find(world.status().conditions, kind)
    assert found is not None
    return found.status.value, found.reason, found.message


def failed(world: World, version: int, reason: str) -> str:
    """The update failed for this reason, and everybody was told; the message."""
    status, told, message = condition(world, "Active")
    assert (status, told) == ("False", reason), message
    last = world.fleet.status.last_finished
    assert last is not None
    assert (last.version, last.outcome, last.reason) == (version, Outcome.FAILED, reason)
    assert world.status().history[-1].outcome is Outcome.FAILED
    assert world.status().history[-1].message == last.message
    return message


def phases(world: World) -> list[Phase]:
    """Phases in the order in which they were recorded."""
    seen: list[Phase] = []
    for decision in world.decisions:
        for write in decision.weight_version_statuses:
            if not seen or seen[-1] is not write.status.phase:
                seen.append(write.status.phase)
    return seen


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
    assert world.status().attempt in (5, 6)
    assert world.status().progress.failed[0].message == BAD_CHECKPOINTS[case].message


def test_c11_a_checkpoint_that_becomes_whole_in_time_is_taken() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    bump(world, 2)
    world.run(20)
    assert world.in_phase(Phase.PREPARING)
    world.store.faults.clear()
    assert world.run(20, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().attempt > 3


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


def test_a_close_that_fails_reopens_the_version_before() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.fails[OperationName.CLOSE] = fault(FailureReason.PAUSE_FAILED, "rank 3 hangs")
    bump(world, 2)
    assert world.run(30, lambda: world.ended(2))
    assert "rank 3 hangs" in failed(world, 2, "PauseFailed")
    assert world.run(10, lambda: world.all_serve(1))
    assert world.fleet.status.epoch == world.status().epoch, "nothing was touched: no epoch is burnt"


def test_an_engine_that_drains_too_long_ends_it_at_the_deadline_and_all_reopen() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 1000.0)().seconds
    bump(world, 2)
    assert world.run(DEADLINES.quiesce_seconds + SLACK_S, lambda: world.ended(2))
    assert "qwen-1-0-" in failed(world, 2, "DeadlineExceeded")
    assert world.run(10, lambda: world.all_serve(1))


@pytest.mark.parametrize("step", [OperationName.TRANSFER, OperationName.VERIFY])
def test_a_failure_after_the_first_touch_burns_the_epoch_and_restores_the_version(step: OperationName) -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.fails[step] = fault(
        FailureReason.COVERAGE_FAILED, "layers.3.mlp: 12 of 16 loaded"
    )
    bump(world, 2)
    assert world.run(30, lambda: world.ended(2))
    assert "layers.3.mlp" in failed(world, 2, "CoverageFailed")
    assert world.fleet.status.epoch > world.status().epoch
    assert world.run(30, lambda: world.all_serve(1))
    assert world.committed_versions == [0, 1]


def test_version_zero_is_restored_from_the_model_itself() -> None:
    world = make_world()
    world.pods[world.uid_of(0)].temper.fails[OperationName.VERIFY] = fault(FailureReason.CACHE_RESET_FAILED, "mm cache")
    bump(world, 1)
    assert world.run(30, lambda: world.ended(1))
    failed(world, 1, "CacheResetFailed")
    assert world.run(30, lambda: world.all_serve(0))
    assert {pod.process.state.weights.source for pod in world.pods.values() if pod.process} == {"model"}


def test_a_transfer_that_hangs_ends_at_its_deadline() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 60.0)().seconds
    bump(world, 2)
    assert world.run(DEADLINES.transfer_seconds + SLACK_S, lambda: world.ended(2))
    assert "Transferring did not end within 40 s" in failed(world, 2, "DeadlineExceeded")
    assert world.run(150, lambda: world.all_serve(1))


def test_probes_that_disagree_fail_it_and_name_the_engines() -> None:
    world = make_world(version=1)
    bump(world, 2, verify=VerifySpec(probe=Probe(tokens=(4, 5, 6), max_abs_logprob_diff="0.01")))
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.pods[world.uid_of(2)].temper.skew = 0.5
    assert world.run(30, lambda: world.ended(2))
    message = failed(world, 2, "ProbesDisagree")
    assert "qwen-2-0-" in message
    assert "allowed is 0.01" in message
    world.pods[world.uid_of(2)].temper.skew = 0.0
    assert world.run(30, lambda: world.all_serve(1))


@pytest.mark.parametrize("phase", [Phase.TRANSFERRING, Phase.VERIFYING])
def test_an_engine_that_dies_is_out_and_the_others_commit(phase: Phase) -> None:
    world = make_world(version=1, load_s=2.0)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(phase))
    world.crash(world.uid_of(1))
    assert world.run(30, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.status().history[-1].message == "1 engines of the update join later"
    assert world.run(30, lambda: world.all_serve(2))


def test_where_every_engine_dies_it_fails_and_the_version_is_restored() -> None:
    world = make_world(version=1, load_s=2.0)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    for uid in list(world.pods):
        world.crash(uid)
    assert world.run(30, lambda: world.ended(2))
    failed(world, 2, "EnginesLost")
    assert world.run(30, lambda: world.all_serve(1))


def test_an_open_that_is_still_on_its_way_opens_nobody_later() -> None:
    """A late joiner's Open of the old version arrives after everybody was quiesced for the new one."""
    world = make_world(version=1, load_s=2.0)
    world.crash(world.uid_of(2))
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(30, lambda: bool(world.held))
    bump(world, 2)
    assert world.run(30, lambda: world.in_phase(Phase.VERIFYING))
    assert world.release() > 0
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))


def test_a_joiner_opens_under_the_epoch_before_while_others_stage() -> None:
    """It joins while the update prepares, and what it was told then counts no more once the update goes on."""
    world = make_world(version=1, load_s=1.0)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.PREPARE, 8.0)().seconds
    world.crash(world.uid_of(2))
    bump(world, 2)
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(8, lambda: bool(world.held))
    assert world.in_phase(Phase.PREPARING)
    (call,) = {call.command for call in world.held}
    assert call.epoch < world.fleet.status.epoch
    assert world.run(30, lambda: world.in_phase(Phase.VERIFYING))
    assert world.release() > 0
    assert world.run(30, lambda: world.ended(2) and world.all_serve(2))


def test_bumped_before_the_touch_it_reopens_and_starts_anew() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 5.0)().seconds
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING) and world.open_versions() != [1, 1, 1])
    bump(world, 3)
    assert world.run(5, lambda: world.open_versions() == [1, 1, 1])
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))
    assert [(entry.version, entry.outcome) for entry in world.status().history] == [
        (1, Outcome.ACTIVE),
        (2, Outcome.SUPERSEDED),
        (3, Outcome.ACTIVE),
    ]
    assert world.committed_versions == [0, 1, 3]


def test_bumped_after_the_touch_it_goes_straight_on() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(0.05)
    bump(world, 3)
    begun = world.time
    while not world.ended(3):
        world.step()
        assert set(world.open_versions()) <= {3}, "the version before reopens no more"
        assert world.time < begun + 30
    assert world.status().history[-2].outcome is Outcome.SUPERSEDED
    assert world.run(10, lambda: world.all_serve(3))
    assert world.committed_versions == [0, 1, 3]


def test_bumped_while_opening_the_committed_one_counts_as_active() -> None:
    world = make_world(version=1)
    world.hold = lambda command: isinstance(command, Open) and command.version == 2
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.OPENING))
    bump(world, 3)
    world.run(0.1)
    world.release()
    assert world.run(30, lambda: world.ended(3) and world.all_serve(3))
    assert [entry.outcome for entry in world.status().history] == [Outcome.ACTIVE] * 3


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING])
def test_deleted_in_mid_update_the_fleet_returns_to_what_is_committed(phase: Phase) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(phase))
    world.run(0.2)
    del world.weight_versions["qwen-policy"]
    assert world.run(30, lambda: world.all_serve(1))
    assert world.committed_versions == [0, 1]
    assert all(pod.process is None or pod.process.state.staged is None for pod in world.pods.values())


def test_deleted_after_the_commit_the_fleet_opens_and_stays() -> None:
    world = make_world(version=1)
    world.hold = lambda command: isinstance(command, Open)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.OPENING))
    del world.weight_versions["qwen-policy"]
    world.release()
    assert world.run(30, lambda: world.all_serve(2))


def test_one_engine_that_does_not_open_does_not_keep_it_from_being_active() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.VERIFYING))
    world.hold = lambda command: isinstance(command, Open)
    assert world.run(5, lambda: world.in_phase(Phase.OPENING))
    world.cut_off(world.uid_of(0), 100)
    world.hold = lambda _: False
    assert world.run(70, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(100, lambda: world.all_serve(2))


@pytest.mark.parametrize(
    "phase", [Phase.PENDING, Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING]
)
def test_an_operator_that_comes_back_goes_on_where_the_one_before_was(phase: Phase) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.4
    bump(world, 2)
    if phase is not Phase.PENDING:
        assert world.run(10, lambda: world.in_phase(phase))
    world.restart_operator(down_s=90.0)
    assert world.run(200, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().phase is Phase.ACTIVE


def test_an_operator_without_any_memory_between_passes_finishes_all_the_same() -> None:
    world = make_world(version=1)
    world.forget_everything = True
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert world.status().phase is Phase.ACTIVE


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


def test_pods_stay_as_they_are_while_an_update_runs() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.seconds = slow(OperationName.TRANSFER, 5.0)().seconds
    bump(world, 2)
    assert world.run(10, lambda: world.in_phase(Phase.TRANSFERRING))
    spec = world.fleet.spec.model_copy(update={"replicas": 1, "image": "registry.example/engine:2"})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    pods = set(world.pods)
    while not world.ended(2):
        assert set(world.pods) == pods
        world.step()
    assert world.run(30, lambda: len(world.pods) == 1 and world.all_serve(2) and set(world.pods).isdisjoint(pods))


def test_an_active_update_of_a_fleet_that_was_deleted_is_made_again_on_the_new_one() -> None:
    world = make_world(version=1)
    old = world.weight_versions["qwen-policy"]
    again = World(make_fleet(replicas=2))
    meta = again.fleet.metadata.model_copy(update={"creation_timestamp": world.now + timedelta(seconds=1)})
    again.time = world.time + 1
    again.fleet = again.fleet.model_copy(update={"metadata": meta, "status": RolloutEngineStatus()})
    again.weight_versions["qwen-policy"] = old
    assert again.run(30, lambda: again.all_serve(1))
    assert again.committed_versions == [0, 1]


def test_fails_are_told_once_as_a_warning() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.fails[OperationName.TRANSFER] = fault(FailureReason.TRANSFER_FAILED, "boom")
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(1))
    told = [event for event in world.events if event.kind == "WeightVersion" and event.type == "Warning"]
    assert [(event.reason, "boom" in event.message) for event in told] == [("TransferFailed", True)]
