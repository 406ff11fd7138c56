"""Sleep and Wake in the guard, with an engine in memory: what fails half-way, and what waits for it."""

import asyncio
from typing import Literal

import pytest

from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.commands import Sleep, Wake
from rollfleet_protocol.sleep import ALL_TAGS, Tag
from rollfleet_protocol.state import EngineState, FailureReason, Gate, OperationStatus, WeightsState
from tests.support.guards import DEADLINE_S, SILENCE_S, Guarded
from tests.support.memory_engine import digest_of, engine_error

pytestmark = pytest.mark.looptime


async def sleep(guarded: Guarded, epoch: int, level: Literal[1, 2] = 1) -> EngineState:
    """Sleep, and wait for the end of it."""
    command = Sleep(incarnation=guarded.service.incarnation, epoch=epoch, level=level, deadline_seconds=DEADLINE_S)
    await guarded.service.command(command)
    return await guarded.ended()


async def wake(guarded: Guarded, epoch: int, *tags: Tag) -> EngineState:
    """Wake these, or all."""
    command = Wake(
        incarnation=guarded.service.incarnation, epoch=epoch, tags=tags or ALL_TAGS, deadline_seconds=DEADLINE_S
    )
    await guarded.service.command(command)
    return await guarded.ended()


async def test_weights_of_model_path_are_verified_anew_after_level_1(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    state = await sleep(guarded, 2)
    assert (state.weights.state, state.ready) == (WeightsState.INITIAL, False)
    await wake(guarded, 2, Tag.WEIGHTS)
    state = await wake(guarded, 2)
    assert (state.sleep.level, state.paused) == (0, True)
    await guarded.verify(2, 0)
    assert (await guarded.open(2, 0)).gate is Gate.OPEN
    assert guarded.engine.calls["resume"] == 1, "once per pause"
    assert guarded.engine.calls["wake"] == 2


async def test_level_2_leads_to_a_whole_transfer(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    state = await sleep(guarded, 2, 2)
    assert (state.weights.state, state.weights.digest) == (WeightsState.ABSENT, None)
    with pytest.raises(RejectedError, match="Wake with tag weights comes before tag kv_cache"):
        await wake(guarded, 2, Tag.KV_CACHE)
    with pytest.raises(RejectedError, match="then Transfer, come before Wake with tag kv_cache"):
        await wake(guarded, 2)
    await wake(guarded, 2, Tag.WEIGHTS)
    await guarded.prepare(2, 3)
    await guarded.arm(2)
    await guarded.transfer(2, 3)
    await wake(guarded, 2, Tag.KV_CACHE)
    await guarded.verify(2, 3)
    assert (await guarded.open(2, 3)).weights.digest == digest_of("step-3")


async def test_a_sleep_that_fails_untouched_leaves_the_engine_as_it_was(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    guarded.engine.failures["sleep"] = engine_error(FailureReason.SLEEP_FAILED, "spec.sleepMode is Disabled")
    state = await sleep(guarded, 2)
    assert state.operation is not None
    assert state.operation.status is OperationStatus.FAILED
    assert (state.weights.state, state.sleep.level) == (WeightsState.VERIFIED, 0)
    await asyncio.sleep(SILENCE_S + 2)
    assert guarded.state.gate is Gate.OPEN, "nobody said anything more: it reopens by itself"


async def test_half_asleep_counts_as_asleep_and_lost(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    guarded.engine.failures["sleep"] = engine_error(FailureReason.SLEEP_FAILED, "rank 1: no memory", touched=True)
    state = await sleep(guarded, 2)
    assert (state.weights.state, state.sleep.level, state.sleep.awake) == (WeightsState.UNCERTAIN, 1, ())
    with pytest.raises(RejectedError):
        await guarded.open(2, 0)
    await asyncio.sleep(2 * SILENCE_S)
    assert guarded.state.gate is Gate.CLOSED


async def test_a_wake_that_fails_is_tried_again_and_the_weights_count_no_more(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    await sleep(guarded, 2)
    guarded.engine.failures["wake"] = engine_error(FailureReason.SLEEP_FAILED, "no memory", touched=True)
    state = await wake(guarded, 2, Tag.WEIGHTS)
    assert (state.weights.state, state.sleep.awake) == (WeightsState.UNCERTAIN, ())
    guarded.engine.failures.clear()
    assert (await wake(guarded, 2, Tag.WEIGHTS)).sleep.awake == (Tag.WEIGHTS,)


async def test_a_newer_epoch_and_cancel_wait_while_it_falls_asleep(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    guarded.engine.slow_s = 3
    falling = asyncio.create_task(sleep(guarded, 2))
    await asyncio.sleep(1)
    for hasty in (guarded.cancel(2), guarded.arm(3), guarded.close(3, 1)):
        with pytest.raises(RejectedError, match="wait for its end"):
            await hasty
    state = await falling
    assert (state.epoch, state.sleep.level) == (2, 1)
    with pytest.raises(RejectedError, match="verify version 0"):
        await guarded.open(2, 0)
    state = await guarded.cancel(3)
    assert (state.gate, state.paused) == (Gate.CLOSED, True), "who sleeps is not resumed"


async def test_requests_that_are_held_for_an_update_are_not_held_for_a_sleep(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 0)
    await sleep(guarded, 2)
    assert guarded.state.closed_reason == "Asleep"
    assert not guarded.waiting.admits
