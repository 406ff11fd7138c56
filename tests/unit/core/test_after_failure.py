"""After any failed update: no engine paused without an owner, nothing mixed, and everybody is told why.

What tells of the failure itself is checked by `failed`: `kubectl get`, `describe` and `rollfleet diagnose`.
"""

from collections.abc import Callable

import pytest

from rollfleet_operator.api.rolloutengine import Aftermath
from rollfleet_operator.api.weightversion import FailureType, OnFailure, Phase
from rollfleet_protocol.commands import Transfer
from rollfleet_protocol.state import FailureReason, Gate, OperationName, WeightsState
from tests.support.builders import digest_of
from tests.support.simulated_engine import fault
from tests.support.simulated_updates import (
    BROKEN,
    DEADLINES,
    HOLD,
    ROLLBACK,
    SLACK_S,
    aftermath,
    bump,
    diagnosed,
    failed,
    make_world,
)
from tests.support.simulated_world import World, slow

ONCE = OnFailure(type=FailureType.RETRY, max_attempts=1)
LONGEST_S = DEADLINES.prepare_seconds + DEADLINES.quiesce_seconds + DEADLINES.transfer_seconds + SLACK_S


def all_fail(world: World, step: OperationName, reason: FailureReason) -> None:
    for pod in world.pods.values():
        pod.temper.fails[step] = fault(reason, "its own words")


def a_checkpoint_that_is_not_there(world: World) -> None:
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_NOT_FOUND, "step-2: no such directory")


def engines_that_read_different_bytes(world: World) -> None:
    path, reads = "step-2", iter(range(9))
    world.store.read = lambda root, wanted: (  # type: ignore[method-assign]
        digest_of(f"{wanted}-{next(reads)}") if wanted == path else digest_of(wanted)
    )


def an_engine_that_cannot_pause(world: World) -> None:
    world.pods[world.uid_of(1)].temper.fails[OperationName.CLOSE] = fault(FailureReason.PAUSE_FAILED, "refused")


def an_engine_that_does_not_answer(world: World) -> None:
    world.cut_off(world.uid_of(1), LONGEST_S)


def an_engine_that_closes_too_slowly(world: World) -> None:
    world.pods[world.uid_of(1)].temper.seconds = slow(OperationName.CLOSE, 1000.0)().seconds


def an_engine_whose_transfer_breaks(world: World) -> None:
    world.pods[world.uid_of(1)].temper.fails[OperationName.TRANSFER] = BROKEN


def engines_none_of_which_is_covered(world: World) -> None:
    all_fail(world, OperationName.TRANSFER, FailureReason.COVERAGE_FAILED)


def engines_none_of_which_answers_the_probe(world: World) -> None:
    all_fail(world, OperationName.VERIFY, FailureReason.PROBE_FAILED)


def engines_that_answer_three_ways(world: World) -> None:
    for place, pod in enumerate(world.pods.values()):
        pod.temper.skew = float(place)


def one_that_never_gets_the_command(world: World) -> None:
    late = world.uid_of(2)
    world.hold = lambda command: isinstance(command, Transfer) and command.incarnation.startswith(late)


WAYS: dict[str, tuple[Callable[[World], None], str]] = {
    "preparing": (a_checkpoint_that_is_not_there, "CheckpointNotFound"),
    "preparing, different bytes": (engines_that_read_different_bytes, "DigestDisagrees"),
    "quiescing": (an_engine_that_cannot_pause, "PauseFailed"),
    "quiescing, silent": (an_engine_that_does_not_answer, "EngineUnreachable"),
    "quiescing, slow": (an_engine_that_closes_too_slowly, "DeadlineExceeded"),
    "transferring": (an_engine_whose_transfer_breaks, "TransferFailed"),
    "transferring, all": (engines_none_of_which_is_covered, "CoverageFailed"),
    "transferring, deadline": (one_that_never_gets_the_command, "DeadlineExceeded"),
    "verifying": (engines_none_of_which_answers_the_probe, "ProbeFailed"),
    "verifying, apart": (engines_that_answer_three_ways, "ProbesDisagree"),
}


@pytest.mark.parametrize("policy", [ONCE, ROLLBACK, HOLD], ids=lambda policy: policy.type.value)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_failed_update_everything_is_owned_and_explained(way: str, policy: OnFailure) -> None:
    world = make_world(version=1)
    break_it, reason = WAYS[way]
    break_it(world)
    bump(world, 2, on_failure=policy)
    assert world.run(LONGEST_S, lambda: world.ended(2))
    failed(world, 2, reason)
    assert_owned(world)
    world.release()
    cure(world)
    world.run(120)
    assert_owned(world)
    if aftermath(world) is Aftermath.HELD:
        assert "Held" in {finding.reason for finding in diagnosed(world)} or world.open_versions()
    else:
        assert world.all_serve(1)
        told = {finding.reason for finding in diagnosed(world)}
        assert told <= {failure.reason for failure in world.status().progress.failed} | {reason}, "and nothing else"


def cure(world: World) -> None:
    """What was odd passes."""
    for pod in world.pods.values():
        pod.temper.skew = 0.0
        pod.temper.seconds = lambda _: 0.1
        pod.temper.fails.clear()


def assert_owned(world: World) -> None:
    """Whoever does not serve the committed version is named with what it does; nobody is paused and forgotten."""
    named = {detail.name: detail for detail in world.fleet.status.engines.details}
    for pod in world.pods.values():
        process = pod.process
        assert process is not None
        state = process.state
        if state.gate is Gate.OPEN:
            assert (state.weights.version, state.weights.state) == (1, WeightsState.VERIFIED)
            assert not state.paused
            continue
        awaited = world.wake_at is not None or world.news  # somebody comes back to it
        assert pod.view.name in named or awaited, f"{pod.view.name} is closed and nobody says why"
        assert awaited or named[pod.view.name].state == "Uncertain", "held as it is, by its WeightVersion's word"
    assert world.status().phase is Phase.FAILED
