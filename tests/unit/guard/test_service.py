"""The guard's service over an engine in memory, with the loop's clock run fast."""

import asyncio

import pytest

from rollfleet_engine.guard.service import MOST_FOLLOWERS, RejectedError
from rollfleet_protocol.commands import Verify
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import FailureReason, Gate, OperationName, OperationStatus, WeightsState
from tests.support.guards import DEADLINE_S, SILENCE_S, TOKENS, Guarded, eventually, failure_of, request, until
from tests.support.memory_engine import digest_of, engine_error

pytestmark = pytest.mark.looptime


async def test_an_update_from_version_0_to_1(guarded: Guarded) -> None:
    assert (await request(guarded))[0] == 503
    await guarded.serve_initial()
    assert await request(guarded) == (200, b"model")

    state = await guarded.update(2, 1)

    assert (state.gate, state.weights.state, state.weights.version) == (Gate.OPEN, WeightsState.VERIFIED, 1)
    assert state.weights.digest == digest_of("step-1")
    assert state.ready
    assert not state.paused
    assert await request(guarded) == (200, b"step-1")
    assert guarded.engine.order == [
        *("reset_caches", "probe"),  # version 0
        *("share", "pause", "abort_all", "apply", "reset_caches", "resume", "probe"),
    ]
    assert guarded.stager.closings == ["step-1"]


async def test_caches_are_reset_before_the_scheduler_runs_again(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.update(2, 1)
    order = guarded.engine.order
    assert order.index("apply") < len(order) - 1 - order[::-1].index("reset_caches") < order.index("resume")


async def test_closing_aborts_what_is_in_flight(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = True
    running = [asyncio.create_task(request(guarded)) for _ in range(3)]
    await eventually(lambda: guarded.state.in_flight == 3)

    state = await guarded.close(2, 1)

    assert state.operation is not None
    assert state.operation.status is OperationStatus.SUCCEEDED
    assert state.in_flight == 0
    assert await asyncio.gather(*running) == [(200, b"model")] * 3


async def test_closing_cuts_clients_that_do_not_read(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = guarded.app.deaf = True
    running = asyncio.create_task(request(guarded))
    await eventually(lambda: guarded.state.in_flight == 1)
    state = await guarded.close(2, 1)
    assert state.in_flight == 0
    assert state.operation is not None
    assert state.operation.status is OperationStatus.SUCCEEDED
    assert (await running)[0] == 503


async def test_a_stream_that_is_cut_stays_incomplete(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = guarded.app.deaf = guarded.app.stream = True
    running = asyncio.create_task(request(guarded))
    await eventually(lambda: guarded.state.in_flight == 1)
    await guarded.close(2, 1)
    assert await running == (0, b"first ")


async def test_a_pause_that_fails_leaves_the_gate_closed_and_cancel_reopens(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.failures["pause"] = engine_error(FailureReason.PAUSE_FAILED)
    state = await guarded.close(2, 1)
    assert failure_of(state) is FailureReason.PAUSE_FAILED
    assert state.gate is Gate.CLOSED
    state = await guarded.cancel(2)
    assert state.gate is Gate.OPEN
    assert guarded.engine.calls["resume"] == 0


async def test_an_adapter_that_never_returns_is_given_up(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.hangs.add("pause")
    state = await guarded.close(2, 1)
    assert failure_of(state) is FailureReason.DEADLINE_EXCEEDED


async def test_silence_before_arming_reopens_the_old_version(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    loop = asyncio.get_running_loop()
    await guarded.close(2, 1)
    closed_at = loop.time()
    await eventually(lambda: guarded.state.gate is Gate.OPEN, 2 * SILENCE_S, every_s=0.1)
    assert SILENCE_S <= loop.time() - closed_at < SILENCE_S + 1
    assert await request(guarded) == (200, b"model")
    assert guarded.engine.calls["resume"] == 1
    assert guarded.state.operation is not None
    assert guarded.state.operation.name is OperationName.REOPEN


async def test_the_operators_long_polls_keep_the_gate_closed(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 1)
    loop = asyncio.get_running_loop()
    end = loop.time() + 5 * SILENCE_S
    while loop.time() < end:
        state = await guarded.service.follow(guarded.state.sequence, 55.0)
        assert state.gate is Gate.CLOSED


async def test_an_armed_guard_stays_closed_however_long_the_silence(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    await asyncio.sleep(10 * SILENCE_S)
    assert guarded.state.gate is Gate.CLOSED
    state = await guarded.cancel(2)
    assert state.gate is Gate.OPEN
    assert await request(guarded) == (200, b"model")


async def test_a_dead_core_closes_the_gate_for_good(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.is_alive = False
    state = await until(guarded.service, lambda state: not state.alive)
    assert state.gate is Gate.CLOSED
    assert state.closed_reason == ClosedReason.ENGINE_DEAD
    assert guarded.service.why_not_live()
    assert (await request(guarded))[0] == 503
    with pytest.raises(RejectedError):
        await guarded.open(1, 0)


async def test_draining_waits_then_aborts_then_cuts(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = True
    polite = asyncio.create_task(request(guarded))
    await eventually(lambda: guarded.state.in_flight == 1)
    guarded.app.deaf = guarded.app.stream = True
    deaf = asyncio.create_task(request(guarded))
    await eventually(lambda: guarded.state.in_flight == 2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await guarded.service.drain(60.0) == 2
    assert 60 <= loop.time() - began < 70
    assert await polite == (200, b"model")
    assert await deaf == (0, b"first ")
    assert guarded.state.closed_reason == ClosedReason.DRAINING
    with pytest.raises(RejectedError):
        await guarded.open(1, 0)


async def test_silence_does_not_reopen_what_is_drained_or_dead(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.close(2, 1)
    await guarded.service.drain(1.0)
    await asyncio.sleep(2 * SILENCE_S)
    assert guarded.state.gate is Gate.CLOSED
    assert (await guarded.cancel(2)).gate is Gate.CLOSED


async def test_draining_an_idle_engine_returns_at_once(guarded: Guarded) -> None:
    await guarded.serve_initial()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await guarded.service.drain(60.0) == 0
    assert loop.time() == began


async def test_a_follower_is_woken_by_a_change_but_not_by_load(guarded: Guarded) -> None:
    await guarded.serve_initial()
    sequence = guarded.state.sequence
    following = asyncio.create_task(guarded.service.follow(sequence, 50.0))
    for _ in range(10):
        await request(guarded)
    await asyncio.sleep(10)
    assert not following.done()
    await guarded.service.command(guarded.close_command(2, 1))
    assert (await following).sequence > sequence


async def test_a_follower_of_an_older_incarnation_is_answered_at_once(guarded: Guarded) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await guarded.service.follow(guarded.state.sequence + 1000, 50.0)
    assert loop.time() == began


async def test_followers_are_bounded(guarded: Guarded) -> None:
    sequence = guarded.state.sequence
    held = [asyncio.create_task(guarded.service.follow(sequence, 50.0)) for _ in range(MOST_FOLLOWERS)]
    await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await guarded.service.follow(sequence, 50.0)
    assert loop.time() == began
    await asyncio.gather(*held)


async def test_the_log_proves_which_version_was_admitted_when(guarded: Guarded) -> None:
    await guarded.serve_initial()
    for _ in range(3):
        await request(guarded)
    await guarded.close(2, 1)
    await request(guarded)
    await guarded.prepare(2, 1)
    await guarded.arm(2)
    await guarded.transfer(2, 1)
    await guarded.verify(2, 1)
    await guarded.open(2, 1)
    await request(guarded)
    opened, closed = guarded.lines("gate.opened"), guarded.lines("gate.closed")
    assert [line["version"] for line in opened] == [0, 1]
    assert [line["version"] for line in closed] == [0]
    assert closed[0]["admitted"] == 3
    times = [opened[0]["timeNs"], closed[0]["firstAdmissionNs"], closed[0]["lastAdmissionNs"], closed[0]["timeNs"]]
    assert times == sorted(times)
    assert closed[0]["lastAdmissionNs"] < opened[1]["timeNs"]
    assert opened[1]["refused"] == 1


async def test_verifying_what_is_verified_again_under_a_newer_epoch_probes_again(guarded: Guarded) -> None:
    await guarded.verify(1, 0)
    await guarded.verify(1, 0)
    assert guarded.engine.calls["probe"] == 1
    await guarded.verify(2, 0)
    assert guarded.engine.calls["probe"] == 2
    assert guarded.state.probe is not None
    assert guarded.state.probe.epoch == 2
    command = Verify(
        incarnation=guarded.service.incarnation, epoch=2, version=3, probe_tokens=TOKENS, deadline_seconds=DEADLINE_S
    )
    with pytest.raises(RejectedError):
        await guarded.service.command(command)


async def test_a_guard_that_loses_its_timer_is_not_live(guarded: Guarded) -> None:
    await guarded.serve_initial()
    assert guarded.service.why_not_live() == ""

    def broken() -> bool:
        raise ZeroDivisionError("in alive")

    sound, guarded.engine.alive = guarded.engine.alive, broken  # type: ignore[method-assign]
    await eventually(lambda: bool(guarded.lines("guard.broken")))
    guarded.engine.alive = sound  # type: ignore[method-assign]
    assert guarded.service.why_not_live() == "rollfleet-guard-timer crashed: ZeroDivisionError: in alive"
