"""Strategy Rolling: batch by batch, never fewer serving than asked for, and the end of it."""

from dataclasses import replace

import pytest

from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import Phase, Rolling, Strategy, StrategyType
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.rolling import Roll
from rollfleet_protocol.commands import Close, Open
from rollfleet_protocol.state import EngineState, FailureReason, Gate, OperationName
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import (
    DEADLINES,
    HOLD,
    ROLLBACK,
    SLACK_S,
    bump,
    condition,
    diagnosed,
    failed,
    make_world,
)
from tests.support.simulated_world import World, slow

BATCH_S = DEADLINES.quiesce_seconds + DEADLINES.transfer_seconds + DEADLINES.verify_seconds
BROKEN = fault(FailureReason.TRANSFER_FAILED, "rank 3: out of memory")


def rolling(max_unavailable: int = 1) -> Strategy:
    return Strategy(type=StrategyType.ROLLING, rolling=Rolling(max_unavailable=max_unavailable))


def roll(world: World, version: int, max_unavailable: int = 1, **spec: object) -> None:
    bump(world, version, strategy=rolling(max_unavailable), **spec)


def watch(world: World, version: int, within_s: float = 120.0) -> list[tuple[int, ...]]:
    """What was open, each time that it changed, until the update ended and all serve."""
    begun, seen = world.time, [tuple(world.open_versions())]
    while not (world.ended(version) and world.all_serve(version)):
        world.step()
        if tuple(world.open_versions()) != seen[-1]:
            seen.append(tuple(world.open_versions()))
        assert world.time < begun + within_s, (seen, world.status())
    return seen


def test_who_serves_is_not_put_aside_though_nobody_has_heard_that_it_staged() -> None:
    """An operator that took over may know an older state of it: the first batch is as small as ever."""
    world = make_world(replicas=3, version=1)
    roll(world, 2)
    assert world.run(30, lambda: world.in_phase(Phase.QUIESCING))
    seen = world.observe()
    known = {uid: replace(view, state=_before_the_roll(view.state)) for uid, view in seen.guards.items()}
    one, *others = sorted(known)
    guards = {one: known[one], **{uid: seen.guards[uid] for uid in others}}
    told = plan(replace(seen, guards=guards), world.now).actions
    closed = {call.pod_uid for call in told if isinstance(call, GuardCall) and isinstance(call.command, Close)}
    assert len(closed | {uid for uid in others if _is_closed(seen.guards[uid].state)}) <= 1
    assert one not in closed


def _before_the_roll(state: EngineState | None) -> EngineState:
    assert state is not None
    return state.model_copy(update={"staged": None, "epoch": state.epoch - 1, "gate": Gate.OPEN, "operation": None})


def _is_closed(state: EngineState | None) -> bool:
    return state is not None and state.gate is Gate.CLOSED


@pytest.mark.parametrize(("max_unavailable", "min_serving", "most"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (9, 1, 3)])
def test_batch_by_batch_never_more_at_once_and_never_fewer_serving(
    max_unavailable: int, min_serving: int, most: int
) -> None:
    world = make_world(replicas=4, version=1)
    roll(world, 2, max_unavailable, min_serving=min_serving)
    seen = watch(world, 2)
    assert min(len(versions) for versions in seen) == 4 - most
    assert any(set(versions) == {1, 2} for versions in seen), "both answer meanwhile"
    assert world.committed_versions == [0, 1, 2]
    assert world.fleet.status.committed is not None
    assert world.fleet.status.committed.previous is None
    assert world.status().paused_seconds == "", "it never answered nothing"


def test_mixed_versions_is_told_while_it_rolls_and_not_after() -> None:
    world = make_world(version=1)
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING))
    world.run(0.05)
    status, reason, message = condition(world, "MixedVersions")
    assert (status, reason) == ("True", "Rolling")
    both, _, left = message.partition("; 2 may answer from the older one: ")
    assert both == "engines answer from version 1 and from version 2"
    names = [pod.view.name for pod in world.pods.values() if pod.process and pod.process.state.weights.version == 1]
    assert sorted(left.split(", ")) == sorted(names)
    available = next(each for each in world.fleet.status.conditions if each.type == "Available")
    assert available.message.endswith("version 2 or, until the roll ends, version 1")
    watch(world, 2)
    world.run(2)
    assert condition(world, "MixedVersions")[:2] == ("False", "OneVersion")


def test_the_label_stays_on_whoever_serves_either_version() -> None:
    world = make_world(version=1)
    world.run(2)
    roll(world, 2)
    while not (world.ended(2) and world.all_serve(2)):
        world.step()
        assert all(pod.view.serving_label for pod in world.pods.values())


def test_with_one_engine_it_cannot_roll_and_says_so() -> None:
    world = make_world(replicas=1, version=1)
    roll(world, 2)
    world.run(2)
    assert "one more must roll" in condition(world, "Active")[2]
    assert world.run(DEADLINES.prepare_seconds + SLACK_S, lambda: world.ended(2))
    failed(world, 2, "TooFewEngines")
    assert world.all_serve(1)


def test_where_nobody_serves_all_move_at_once() -> None:
    world = make_world(version=1, load_s=5.0)
    for uid in list(world.pods):
        world.crash(uid)
    world.store.faults["step-1"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-1 was cleaned up")
    world.run(10)
    roll(world, 2)
    watch(world, 2)
    assert len(world.status().targets) == 3


# failures before the commit ------------------------------------------------------------------------------------------


def test_a_first_batch_that_fails_is_tried_again_while_the_others_serve() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.fails[OperationName.TRANSFER] = BROKEN
    roll(world, 2)
    seen = watch(world, 2)
    assert min(len(versions) for versions in seen) >= 1
    assert world.status().attempt == 2


def test_a_first_batch_that_fails_is_restored_while_the_others_serve() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.fails[OperationName.TRANSFER] = BROKEN
    roll(world, 2, on_failure=ROLLBACK)
    while not world.ended(2):
        world.step()
        assert set(world.open_versions()) == {1}
        assert len(world.open_versions()) >= 2
    failed(world, 2, "TransferFailed")
    assert world.run(30, lambda: world.all_serve(1))


def test_a_first_batch_that_is_held_leaves_the_others_serving() -> None:
    world = make_world(version=1)
    world.pods[world.uid_of(0)].temper.fails[OperationName.TRANSFER] = BROKEN
    roll(world, 2, on_failure=HOLD)
    assert world.run(30, lambda: world.ended(2))
    world.run(60)
    assert world.open_versions() == [1, 1]


# failures while it rolls ---------------------------------------------------------------------------------------------


def test_an_engine_that_stumbles_does_not_hold_the_others_up() -> None:
    world = make_world(replicas=4, version=1)
    process = world.process_of(1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 1000.0)().seconds
    roll(world, 2)
    assert world.run(4 * BATCH_S, lambda: world.open_versions() == [2, 2, 2])
    assert world.run(4 * BATCH_S + 100, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert "qwen-1-0-" in world.status().history[-1].message
    assert process.state.gate is Gate.CLOSED
    world.pods[world.uid_of(1)].temper.seconds = lambda _: 0.1
    assert world.run(700, lambda: world.all_serve(2))


def test_an_engine_that_answers_the_probe_unlike_the_others_does_not_hold_them_up() -> None:
    world = make_world(replicas=4, version=1)
    world.pods[world.uid_of(1)].temper.skew = 10.0
    roll(world, 2)
    assert world.run(30, lambda: world.ended(2)), "long before the deadline"
    assert world.status().phase is Phase.ACTIVE
    assert world.open_versions() == [2, 2, 2]
    world.run(2)
    assert "differ by 10" in str(world.fleet.status.engines.details)


def test_where_more_answer_unlike_the_newest_than_like_it_the_others_go_on_serving() -> None:
    """Nobody knows who is odd, the one that came first or those that follow."""
    world = make_world(replicas=5, version=1)
    world.pods[world.uid_of(0)].temper.skew = 10.0
    roll(world, 2)
    world.run(2 * BATCH_S)
    assert not world.ended(2)
    assert sorted(world.open_versions()) == [1, 1, 2]


def test_at_the_deadline_whoever_is_left_is_closed_and_joins() -> None:
    """minServing leaves no room for the engine that stumbles, so nobody else may be closed until then."""
    world = make_world(version=1)
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.TRANSFER, 1000.0)().seconds
    roll(world, 2, min_serving=2)
    assert world.run(BATCH_S, lambda: sorted(world.open_versions()) == [1, 2])
    world.run(2 * BATCH_S)
    assert sorted(world.open_versions()) == [1, 2]
    assert not world.ended(2)
    assert world.run(BATCH_S + 70, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(30, lambda: world.open_versions() == [2, 2])
    assert condition(world, "MixedVersions")[0] == "False"


def test_an_engine_that_does_not_answer_keeps_the_condition_even_after_the_end() -> None:
    world = make_world(version=1)
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING))
    silent = world.pods[world.uid_of(2)].view.name
    world.cut_off(world.uid_of(2), 10 * BATCH_S)
    assert world.run(5 * BATCH_S, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    world.run(10)
    assert sorted(world.open_versions()) == [1, 2, 2], "clients may still reach it"
    status, _, message = condition(world, "MixedVersions")
    assert (status, message.endswith(f"1 may answer from the older one: {silent}")) == ("True", True)
    assert "MixedVersions" in {finding.reason for finding in diagnosed(world)}
    assert world.fleet.status.committed is not None
    assert world.fleet.status.committed.previous is not None
    assert world.run(10 * BATCH_S, lambda: world.all_serve(2))
    world.run(5)
    assert condition(world, "MixedVersions")[0] == "False"


@pytest.mark.parametrize("how", ["crashes", "is deleted", "vanishes"])
def test_an_engine_that_goes_while_it_rolls_comes_back_at_the_new_version(how: str) -> None:
    world = make_world(replicas=4, version=1)
    for pod in world.pods.values():
        pod.temper.seconds = slow(OperationName.TRANSFER, 2.0)().seconds
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING))
    uid = world.uid_of(3)
    if how == "crashes":
        world.crash(uid)
    elif how == "is deleted":
        world.delete_pod(uid)
    else:
        world.vanish(uid)
    assert world.run(200, lambda: world.ended(2))
    assert world.status().phase is Phase.ACTIVE
    assert world.run(600, lambda: sorted(world.open_versions()) == [2, 2, 2, 2])
    assert world.run(600, lambda: condition(world, "MixedVersions")[0] == "False")


@pytest.mark.parametrize(
    "phase", [Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING]
)
@pytest.mark.parametrize("later_s", [0.0, 0.3])
def test_an_operator_that_is_killed_at_any_point_goes_on(phase: Phase, later_s: float) -> None:
    world = make_world(version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.4
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(phase))
    world.run(later_s)
    world.restart_operator(down_s=90.0)
    watch(world, 2, within_s=300)
    assert world.status().phase is Phase.ACTIVE


# bumped, deleted, changed while it rolls -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [StrategyType.ROLLING, StrategyType.ATOMIC])
def test_bumped_while_it_rolls_three_versions_never_answer(strategy: StrategyType) -> None:
    world = make_world(replicas=4, version=1)
    for pod in world.pods.values():
        pod.temper.seconds = lambda _: 0.4
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING) and 2 in world.open_versions())
    bump(world, 3, strategy=Strategy(type=strategy))
    world.run(0.1)
    assert condition(world, "Active")[:2] == ("False", "Rolling")
    assert "may still answer from version 1" in condition(world, "Active")[2]
    seen = watch(world, 3)
    assert all(len(set(versions)) <= 2 for versions in seen)
    assert not any({1, 3} <= set(versions) for versions in seen)
    if strategy is StrategyType.ROLLING:
        assert min(len(versions) for versions in seen) >= 2
    assert [entry.outcome for entry in world.status().history] == [Outcome.ACTIVE] * 3


def test_deleted_while_it_rolls_everybody_comes_to_what_is_committed() -> None:
    world = make_world(version=1)
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING))
    world.weight_versions.clear()
    assert world.run(60, lambda: world.all_serve(2))
    world.run(2)
    assert world.fleet.status.committed is not None
    assert world.fleet.status.committed.previous is None


def test_an_epoch_that_rises_while_it_rolls_makes_them_read_again_before_they_close() -> None:
    world = make_world(replicas=4, version=1)
    world.hold = lambda command: isinstance(command, Open) and command.version == 2
    roll(world, 2)
    assert world.run(20, lambda: world.in_phase(Phase.OPENING))
    status = world.fleet.status.model_copy(update={"epoch": world.fleet.status.epoch + 1})
    world.fleet = world.fleet.model_copy(update={"status": status})
    world.release()
    closed: list[str] = []
    world.hold = lambda command: bool(closed.append(command.incarnation)) if isinstance(command, Close) else False
    seen = watch(world, 2)
    assert min(len(versions) for versions in seen) >= 3
    assert closed


@pytest.mark.parametrize(
    ("max_unavailable", "min_serving", "engines", "batches"), [(1, 1, 4, 4), (2, 1, 4, 2), (3, 2, 4, 2), (1, 9, 4, 4)]
)
def test_how_many_batches_it_takes(max_unavailable: int, min_serving: int, engines: int, batches: int) -> None:
    assert Roll(max_unavailable, min_serving).batches(engines) == batches
