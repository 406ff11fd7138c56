"""What fails in an engine, and what is given up: what its guard holds to be true afterwards."""

import asyncio

import pytest

from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.refusals import ClosedReason, RefusalReason
from rollfleet_protocol.state import FailureReason, Gate, WeightsState
from tests.support.guards import MODEL_SOURCE, SILENCE_S, Guarded, eventually, failure_of
from tests.support.memory_engine import engine_error

pytestmark = pytest.mark.looptime


async def test_a_failed_transfer_leaves_the_engine_out_until_it_is_reloaded(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.failures["apply"] = engine_error(FailureReason.COVERAGE_FAILED, "tensor w", touched=True)
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    state = await guarded.transfer(2, 1)
    assert failure_of(state) is FailureReason.COVERAGE_FAILED
    assert state.weights.state is WeightsState.UNCERTAIN
    assert not state.ready
    assert state.closed_reason == ClosedReason.UNCERTAIN
    for refused in (guarded.cancel(2), guarded.open(2, 0), guarded.verify(2, 1)):
        with pytest.raises(RejectedError):
            await refused
    await asyncio.sleep(10 * SILENCE_S)
    assert guarded.state.gate is Gate.CLOSED

    del guarded.engine.failures["apply"]
    await guarded.prepare(3, 1)
    await guarded.close(3, 1)
    await guarded.arm(3)
    await guarded.transfer(3, 1)
    assert guarded.engine.order[-2:] == ["recover", "apply"]
    await guarded.verify(3, 1)
    assert (await guarded.open(3, 1)).ready
    assert guarded.engine.calls["resume"] == 1


async def test_a_transfer_that_failed_before_touching_can_be_cancelled(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.failures["apply"] = engine_error(FailureReason.CHECKPOINT_CHANGED, "w.safetensors")
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    state = await guarded.transfer(2, 1)
    assert failure_of(state) is FailureReason.CHECKPOINT_CHANGED
    assert (state.weights.state, state.weights.version) == (WeightsState.VERIFIED, 0)
    assert (await guarded.cancel(2)).gate is Gate.OPEN


async def test_a_transfer_without_end_is_uncertain(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.hangs.add("apply")
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    state = await guarded.transfer(2, 1)
    assert failure_of(state) is FailureReason.DEADLINE_EXCEEDED
    assert state.weights.state is WeightsState.UNCERTAIN


async def test_an_error_that_no_adapter_foresaw_is_told_and_logged(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.failures["apply"] = ZeroDivisionError("in a kernel")
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    state = await guarded.transfer(2, 1)
    assert failure_of(state) is FailureReason.TRANSFER_FAILED
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.message == "ZeroDivisionError: in a kernel"
    assert "in _call" in guarded.lines("operation.crashed")[0]["trace"]


@pytest.mark.parametrize("name", ["\udcff.tmp", "\ud800"])
async def test_names_that_are_no_utf_8_are_told_and_logged_all_the_same(guarded: Guarded, name: str) -> None:
    """What os.listdir and JSON give for them: a guard that cannot say its state is lost, and its engine with it."""
    await guarded.serve_initial()
    guarded.stager.failures["step-1"] = engine_error(
        FailureReason.CHECKPOINT_INCOMPLETE, f"{name}: marks the checkpoint"
    )
    state = await guarded.prepare(2, 1)
    assert failure_of(state) is FailureReason.CHECKPOINT_INCOMPLETE
    assert "marks the checkpoint" in state.model_dump_json()
    assert guarded.lines("operation")[-1]["message"].endswith("marks the checkpoint")
    assert guarded.service.why_not_live() == ""
    assert state.gate is Gate.OPEN


async def test_a_failure_without_end_is_cut(guarded: Guarded) -> None:
    """An operator reads a bounded answer: with all of a huge header in it the engine would count as unreachable."""
    await guarded.serve_initial()
    guarded.stager.failures["step-1"] = engine_error(FailureReason.COVERAGE_FAILED, "x" * 2_000_000)
    state = await guarded.prepare(2, 1)
    assert len(state.model_dump_json()) < 10_000


async def test_received_bytes_that_differ_from_the_staged_ones_are_never_verified(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.digest = "sha256:other"
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    state = await guarded.transfer(2, 1)
    assert failure_of(state) is FailureReason.DIGEST_MISMATCH
    assert state.weights.state is WeightsState.UNCERTAIN


@pytest.mark.parametrize("step", ["reset_caches", "resume", "probe"])
async def test_what_fails_while_verifying_keeps_the_engine_out(guarded: Guarded, step: str) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    await guarded.transfer(2, 1)
    guarded.engine.failures[step] = engine_error(FailureReason.CACHE_RESET_FAILED)
    state = await guarded.verify(2, 1)
    assert failure_of(state) is FailureReason.CACHE_RESET_FAILED
    assert state.weights.state is WeightsState.UNCERTAIN
    with pytest.raises(RejectedError) as refused:
        await guarded.open(2, 1)
    assert refused.value.rejection.reason is RefusalReason.NOT_VERIFIED


async def test_initial_weights_may_be_verified_again_after_a_failed_probe(guarded: Guarded) -> None:
    guarded.engine.failures["probe"] = engine_error(FailureReason.PROBE_FAILED)
    state = await guarded.verify(1, 0)
    assert failure_of(state) is FailureReason.PROBE_FAILED
    assert state.weights.state is WeightsState.INITIAL
    del guarded.engine.failures["probe"]
    assert (await guarded.serve_initial()).gate is Gate.OPEN


async def test_version_0_comes_back_from_the_models_own_files(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.update(2, 1)
    await guarded.prepare(3, 0, MODEL_SOURCE.path)
    state = guarded.state
    assert state.staged is not None
    assert state.staged.path == "."


async def test_staging_can_be_cancelled_while_it_runs(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.stager.gate = asyncio.Event()
    preparing = asyncio.create_task(guarded.prepare(2, 1))
    await eventually(lambda: guarded.stager.started == 1)
    state = await guarded.cancel(2)
    assert state.gate is Gate.OPEN
    assert failure_of(await preparing) is FailureReason.CANCELLED


async def test_staging_that_takes_too_long_says_how_far_it_came(guarded: Guarded) -> None:
    guarded.stager.gate = asyncio.Event()
    state = await guarded.prepare(2, 1)
    assert failure_of(state) is FailureReason.DEADLINE_EXCEEDED
    assert state.operation is not None
    assert state.operation.failure is not None
    assert "25 %" in state.operation.failure.message


async def test_a_newer_epoch_lets_the_staged_files_go(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    await guarded.prepare(3, 2)
    assert guarded.stager.closings == ["step-1"]
    assert guarded.state.staged is not None
    assert guarded.state.staged.epoch == 3


async def test_a_newer_epoch_waits_for_a_transfer_that_runs(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    guarded.engine.hangs.add("apply")
    transferring = asyncio.create_task(guarded.transfer(2, 1))
    await eventually(lambda: guarded.engine.calls["apply"] == 1)
    with pytest.raises(RejectedError) as refused:
        await guarded.prepare(3, 2)
    assert refused.value.rejection.reason is RefusalReason.ORDER_VIOLATION
    assert guarded.state.weights.state is WeightsState.UNCERTAIN
    assert guarded.stager.closings == []  # the workers may still read them
    await transferring
    assert guarded.state.weights.state is WeightsState.UNCERTAIN
    await eventually(lambda: guarded.stager.closings == ["step-1"])
    guarded.engine.hangs.clear()
    assert (await guarded.prepare(3, 2)).staged is not None


async def test_a_cancel_in_the_middle_of_the_pause_resumes_once(guarded: Guarded) -> None:
    await guarded.serve_initial()
    paused = asyncio.Event()
    really_pause = guarded.engine.pause

    async def slow_pause(mode: object, deadline_s: float) -> None:
        await paused.wait()
        await really_pause(mode, deadline_s)  # type: ignore[arg-type]

    guarded.engine.pause = slow_pause  # type: ignore[method-assign, assignment]
    await guarded.service.command(guarded.close_command(2, 1))
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(guarded.cancel(2))
    await asyncio.sleep(1)
    assert guarded.engine.calls["resume"] == 0
    paused.set()
    assert (await cancelling).gate is Gate.OPEN
    assert guarded.engine.calls["resume"] == 1
    assert not guarded.engine.paused
