"""Failures of an update, phase by phase: how it ends, and what the fleet serves afterwards."""

import re

import pytest

from rollfleet_engine.guard.states import EngineDied
from rollfleet_operator.api.weightversion import Phase, Probe, VerifySpec
from rollfleet_operator.core.fitness import NEEDED
from rollfleet_protocol.state import EngineState, FailureReason, OperationName
from tests.support.builders import digest_of
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import DEADLINES, ROLLBACK, SLACK_S, bump, fail_once, failed, make_world
from tests.support.simulated_world import World, slow


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
    world.pods[world.uid_of(1)].temper.fails[step] = fault(FailureReason.TRANSFER_FAILED, "rank 3: out of memory")
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(2))
    assert failed(world, 2, "TransferFailed").endswith("rank 3: out of memory; version 1 is restored from 'step-1'")
    assert world.fleet.status.epoch > world.status().epoch
    assert world.run(30, lambda: world.all_serve(1))
    assert world.committed_versions == [0, 1]


def _pause(world: World, version: int) -> float:
    """What history says of it."""
    entry = next(each for each in world.status().history if each.version == version)
    assert entry.paused_seconds, "a fleet that was closed has paused"
    return float(entry.paused_seconds)


def test_history_tells_how_long_an_update_that_failed_has_closed_the_fleet() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 1000.0)().seconds
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(20, lambda: world.open_versions() == [])
    closed = world.time
    assert world.run(DEADLINES.transfer_seconds + SLACK_S, lambda: world.ended(2))
    assert _pause(world, 2) == pytest.approx(world.time - closed, abs=1)
    assert world.status().paused_seconds == world.status().history[-1].paused_seconds, "the column Paused"


def test_of_all_its_attempts_together_and_of_one_that_failed_before_it_touched_anything() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 1000.0)().seconds
    bump(world, 2)
    assert world.run(DEADLINES.quiesce_seconds + SLACK_S, lambda: world.ended(2))
    assert _pause(world, 2) == pytest.approx(DEADLINES.quiesce_seconds, abs=1)
    assert world.run(30, lambda: world.all_serve(1))
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 1000.0)().seconds
    bump(world, 3)
    assert world.run(20, lambda: world.open_versions() == [])
    closed = world.time
    assert world.run(4 * DEADLINES.transfer_seconds, lambda: world.ended(3))
    assert world.status().attempt == 3
    assert _pause(world, 3) == pytest.approx(world.time - closed, abs=1)
    assert _pause(world, 3) > 3 * DEADLINES.transfer_seconds


def test_of_one_that_failed_while_the_fleet_served_nothing_is_told() -> None:
    world = make_world(version=1)
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    bump(world, 2)
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    assert [each.paused_seconds for each in world.status().history if each.version == 2] == [""]


def test_version_zero_is_restored_from_the_model_itself() -> None:
    world = make_world()
    for pod in world.pods.values():
        pod.temper.fails[OperationName.VERIFY] = fault(FailureReason.CACHE_RESET_FAILED, "mm cache")
    bump(world, 1, on_failure=ROLLBACK)
    assert world.run(30, lambda: world.ended(1))
    assert failed(world, 1, "CacheResetFailed").endswith("version 0 is restored from model.path")
    assert world.run(30, lambda: world.all_serve(0))
    assert {pod.process.state.weights.source for pod in world.pods.values() if pod.process} == {"model"}


def test_a_transfer_that_hangs_ends_at_its_deadline() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 60.0)().seconds
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(DEADLINES.transfer_seconds + SLACK_S, lambda: world.ended(2))
    assert "Transferring did not end within 40 s" in failed(world, 2, "DeadlineExceeded")
    assert world.run(150, lambda: world.all_serve(1))


def test_a_probe_that_the_model_cannot_answer_does_not_keep_the_version_from_coming_back() -> None:
    world = make_world(version=1)
    bump(world, 2, verify=VerifySpec(probe=Probe(tokens=(1, 10**6))))
    assert world.run(60, lambda: world.ended(2))
    assert "no token 1000000" in failed(world, 2, "ProbeFailed")
    assert world.run(30, lambda: world.all_serve(1))


def test_a_probe_that_the_model_cannot_answer_is_found_before_any_pause_where_its_vocabulary_is_known() -> None:
    world = make_world(version=1)
    for ordinal in range(3):
        know(world, ordinal, vocabulary=1000)
    begun = world.time
    bump(world, 2, verify=VerifySpec(probe=Probe(tokens=(1, 1000))))
    while not world.ended(2):
        world.step()
        assert world.open_versions() == [1, 1, 1]
    message = failed(world, 2, "ProbeFailed")
    assert "spec.verify.probe.tokens names token 1000, its model has 1000, from 0 on" in message
    assert message.endswith("no weights were touched, version 1 stays")
    assert world.time < begun + SLACK_S, "it can't change, so nothing is waited for"
    assert len(world.status().progress.failed) == 3
    bump(world, 3, verify=VerifySpec(probe=Probe(tokens=(1, 999))))
    assert world.run(60, lambda: world.ended(3) and world.all_serve(3))


def know(world: World, ordinal: int, **facts: object) -> None:
    """From now on this engine's guard tells so of itself."""
    process = world.process_of(ordinal)
    truth = process.wire

    def told(now: float) -> EngineState:
        state = truth(now)
        return state.model_copy(update={"facts": state.facts.model_copy(update=facts)})

    process.wire = told  # type: ignore[method-assign]


def test_nor_does_a_deadline_that_is_too_short_for_any_transfer() -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.TRANSFER, 5.0)().seconds
    bump(world, 2, deadlines=DEADLINES.model_copy(update={"transfer_seconds": 1}))
    assert world.run(60, lambda: world.ended(2))
    failed(world, 2, "DeadlineExceeded")
    assert world.run(30, lambda: world.all_serve(1))


def test_probes_that_disagree_fail_it_and_name_the_engines() -> None:
    world = make_world(version=1)
    probe = Probe(tokens=(4, 5, 6), max_abs_logprob_diff="0.01")
    bump(world, 2, verify=VerifySpec(probe=probe), on_failure=ROLLBACK)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.pods[world.uid_of(1)].temper.skew = -0.5
    world.pods[world.uid_of(2)].temper.skew = 0.5
    assert world.run(30, lambda: world.ended(2))
    message = failed(world, 2, "ProbesDisagree")
    assert "qwen-2-0-" in message
    assert "allowed is 0.01" in message
    for ordinal in (1, 2):
        world.pods[world.uid_of(ordinal)].temper.skew = 0.0
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
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    for uid in list(world.pods):
        world.crash(uid)
    assert world.run(30, lambda: world.ended(2))
    assert "every engine of the update restarted or vanished: qwen-0-0-" in failed(world, 2, "EnginesLost")
    assert world.run(30, lambda: world.all_serve(1))


def test_fails_are_told_once_as_a_warning() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.fails[OperationName.TRANSFER] = fault(FailureReason.TRANSFER_FAILED, "boom")
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(1))
    told = [event for event in world.events if event.kind == "WeightVersion" and event.type == "Warning"]
    assert [(event.reason, "boom" in event.message) for event in told] == [("TransferFailed", True)]


@pytest.mark.parametrize("how", ["its container is down", "its pod is gone"])
def test_an_engine_that_does_not_answer_while_quiescing_is_fenced_by_the_api_servers_word(how: str) -> None:
    world = make_world(version=1)
    world.load_s = 50.0
    uid = world.uid_of(1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    world.cut_off(uid, 1000)
    world.run(3)
    assert world.in_phase(Phase.QUIESCING)
    if how == "its pod is gone":
        world.delete_pod(uid)
    else:
        world.crash(uid)
    assert world.run(5, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.open_versions() == [2, 2]


def test_an_engine_that_does_not_answer_while_quiescing_ends_it_at_the_deadline() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.QUIESCING))
    world.cut_off(world.uid_of(1), DEADLINES.quiesce_seconds + 30)
    assert world.run(DEADLINES.quiesce_seconds + SLACK_S, lambda: world.ended(2))
    assert "may be open and does not answer" in failed(world, 2, "EngineUnreachable")
    assert world.run(60, lambda: world.all_serve(1))


def test_an_armed_engine_that_falls_silent_is_waited_for_and_then_fails_the_update() -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.5
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.cut_off(world.uid_of(1), DEADLINES.transfer_seconds + 10)
    begun = world.time
    while not world.ended(2):
        world.step()
        assert world.open_versions() == []
        assert world.time < begun + DEADLINES.transfer_seconds + SLACK_S
    failed(world, 2, "EngineUnreachable")
    assert world.run(60, lambda: world.all_serve(1))


def test_an_engine_whose_core_dies_is_out() -> None:
    world = make_world(version=1)
    bump(world, 2)
    assert world.run(5, lambda: world.in_phase(Phase.TRANSFERRING))
    world.process_of(1).apply(EngineDied(), world.time)
    assert world.run(10, lambda: world.ended(2))
    assert world.open_versions() == [2, 2]
    world.crash(world.uid_of(1))
    assert world.run(30, lambda: world.all_serve(2))


def lie(world: World, ordinal: int, **weights: object) -> None:
    """From now on this engine's guard says so of its weights, whatever it did, once it holds a new version."""
    process = world.process_of(ordinal)
    truth = process.wire

    def told(now: float) -> EngineState:
        state = truth(now)
        changed = state.weights.version is not None and state.weights.version > 1
        return state.model_copy(update={"weights": state.weights.model_copy(update=weights)}) if changed else state

    process.wire = told  # type: ignore[method-assign]


LIES: dict[str, dict[str, object]] = {
    "the digest of before": {"digest": digest_of("step-1")},
    "no digest": {"digest": None},
    "an empty digest": {"digest": ""},
}


@pytest.mark.parametrize("words", LIES)
def test_c28_success_without_new_weights_is_never_a_match(words: str) -> None:
    """An engine that accepts everything and keeps its checksums, or has none, is out; nobody else is held up."""
    world = make_world(version=1)
    lie(world, 1, **LIES[words])
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert "qwen-1-0-" in world.status().history[-1].message
    assert f"staged was {digest_of('step-2')}" in world.status().history[-1].message
    world.run(60)
    assert world.open_versions() == [2, 2]


def test_c28_where_all_keep_their_checksums_the_update_fails() -> None:
    world = make_world(version=1)
    for ordinal in range(3):
        lie(world, ordinal, digest=digest_of("step-1"))
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(60, lambda: world.ended(2))
    assert f"holds {digest_of('step-1')}, staged was {digest_of('step-2')}" in failed(world, 2, "DigestDisagrees")
    assert world.run(60, lambda: world.all_serve(1))


def test_c28_a_version_without_a_number_is_not_the_one_that_was_asked_for() -> None:
    world = make_world(version=1)
    lie(world, 1, version=None)
    bump(world, 2, on_failure=ROLLBACK)
    assert world.run(DEADLINES.transfer_seconds + SLACK_S, lambda: world.ended(2))
    failed(world, 2, "DeadlineExceeded")


@pytest.mark.parametrize("lacking", ["source/Checkpoint", *NEEDED, "pause/abort", "workers"])
def test_c23_an_engine_that_lacks_what_is_needed_is_named_before_any_pause(lacking: str) -> None:
    """Of a mixed fleet: the others have it."""
    world = make_world(version=1)
    facts = world.process_of(1).wire(world.time).facts
    has = {"capabilities": tuple(each for each in facts.capabilities if each != lacking)}
    know(world, 1, **({"world_size": 0} if lacking == "workers" else has))
    bump(world, 2, deadlines=DEADLINES.model_copy(update={"prepare_seconds": 5}))
    while not world.ended(2):
        world.step()
        assert world.open_versions() == [1, 1, 1]
    told = r"1 workers \(spec.parallelism: .*\): it reports 0" if lacking == "workers" else lacking
    text = f"qwen-1-0-\\w+: guard {facts.guard_version} on {facts.engine} {facts.engine_version} lacks {told};"
    assert re.search(text, failed(world, 2, "Unsupported"))


def test_what_an_earlier_attempt_read_before_the_checkpoint_was_written_anew_is_read_again() -> None:
    """An engine that loaded the bytes of before is not at fault, and takes part in the commit."""
    world = make_world(version=1)
    fail_once(world, 1)
    bump(world, 2)
    assert world.run(10, lambda: world.status().attempt == 2)
    loaded = [pod.process.state.weights.version for pod in world.pods.values() if pod.process is not None]
    assert 2 in loaded
    anew = digest_of("step-2, written anew")
    world.store.digests["step-2"] = anew
    assert world.run(30, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.status().progress.failed == ()
    assert (world.status().attempt, world.status().digest) == (2, anew)
    assert world.open_versions() == [2, 2, 2], "nobody is left to catch up"
