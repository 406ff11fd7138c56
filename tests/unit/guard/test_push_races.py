"""Commands that come in the same turn of the loop as a trainer's call, or between two turns of one act."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollfleet_engine.guard.native import NativeRoutes
from rollfleet_engine.guard.pushing import OutOfOrderError, PushSession, SupersededError
from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.commands import Cancel, Command, Probe, Transfer
from rollfleet_protocol.state import Gate, OperationName, WeightsState
from tests.support.guards import DEADLINE_S, TOKENS, Guarded
from tests.unit.guard.test_pushing import GRPO, PUSH, UPDATE, order

pytestmark = pytest.mark.looptime


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    one = Guarded(backend="gloo")
    await one.serve_initial()
    await one.close(2, 2)
    await one.arm(2)
    yield one
    await one.service.stop()


def cancel(guarded: Guarded) -> Command:
    return Cancel(incarnation=guarded.service.incarnation, epoch=2)


def newer_close(guarded: Guarded) -> Command:
    return guarded.close_command(3, 2)


async def settled(guarded: Guarded, calling: "asyncio.Task[None]", commanding: "asyncio.Task[Any]") -> None:
    await asyncio.gather(calling, commanding, return_exceptions=True)
    await guarded.ended()


def whole_or_closed(guarded: Guarded) -> bool:
    """Layers that were given away are never behind an open gate, and count as touched."""
    if not guarded.engine.calls["push_start"]:
        return True
    return guarded.state.gate is Gate.CLOSED and guarded.state.weights.state is not WeightsState.VERIFIED


@pytest.mark.parametrize("command", [cancel, newer_close])
@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("first", ["call", "command"])
async def test_a_command_beside_the_first_update_opens_nothing_over_layers_that_were_given_away(
    guarded: Guarded, command: Callable[[Guarded], Command], turns: int, first: str
) -> None:
    """From any turn of the one to any turn of the other."""
    session = await order(guarded)
    await session.start()
    tasks: dict[str, asyncio.Task[Any]] = {}
    for which in (first, "command" if first == "call" else "call"):
        work = session.update(UPDATE) if which == "call" else guarded.service.command(command(guarded))
        tasks[which] = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
    await settled(guarded, tasks["call"], tasks["command"])
    assert whole_or_closed(guarded), guarded.engine.order
    if guarded.state.weights.state is WeightsState.VERIFIED:
        with pytest.raises(OutOfOrderError, match="has ended"):
            await tasks["call"]
        await guarded.cancel(guarded.state.epoch)
        assert guarded.state.gate is Gate.OPEN


@pytest.mark.parametrize("turns", range(6))
async def test_a_call_before_the_transfer_has_begun_is_early_and_not_out_of_order(guarded: Guarded, turns: int) -> None:
    """A trainer calls again after the one, and gives up after the other: it was told that the engines are ready."""
    await guarded.service.command(
        Transfer(incarnation=guarded.service.incarnation, epoch=2, version=2, push=PUSH, deadline_seconds=DEADLINE_S)
    )
    native = NativeRoutes(guarded.service)
    for _ in range(turns):
        assert native.takes(GRPO, "/start_weight_update") is (guarded.service.push is not None)
        await asyncio.sleep(0)
    if turns == 0:
        assert not native.takes(GRPO, "/start_weight_update"), "it was taken in this turn of the loop"
    await asyncio.sleep(0.01)
    assert native.takes(GRPO, "/start_weight_update")


async def test_start_in_the_turn_after_cancel_is_refused(guarded: Guarded) -> None:
    session = await order(guarded)
    cancelling = asyncio.create_task(guarded.service.command(cancel(guarded)))
    starting = asyncio.create_task(session.start())
    assert (await cancelling).gate is Gate.OPEN
    with pytest.raises(OutOfOrderError, match="has ended"):
        await starting
    assert guarded.engine.calls["push_start"] == 0


@pytest.mark.parametrize("phase", ["init", "update", "finish"])
async def test_no_phase_begins_in_the_engine_once_the_transfer_is_given_up(guarded: Guarded, phase: str) -> None:
    session = await order(guarded)
    if phase != "init":
        await session.start()
    if phase == "finish":
        await session.update(UPDATE)
    calls: dict[str, Callable[[PushSession], Any]] = {
        "init": lambda session: session.init({}),
        "update": lambda session: session.update(UPDATE),
        "finish": lambda session: session.finish(None, None),
    }
    calling = asyncio.create_task(calls[phase](session))
    commanding = asyncio.create_task(guarded.service.command(newer_close(guarded)))
    await settled(guarded, calling, commanding)
    with pytest.raises(OutOfOrderError, match="has ended"):
        await calling
    assert guarded.engine.calls[f"push_{phase}"] == 0
    assert guarded.state.weights.state is (WeightsState.UNCERTAIN if phase == "finish" else WeightsState.VERIFIED)


@pytest.mark.parametrize("command", [cancel, newer_close])
@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("slow_s", [0, 1])
async def test_a_finish_is_a_success_only_where_the_state_has_taken_the_weights(
    guarded: Guarded, command: Callable[[Guarded], Command], turns: int, slow_s: float
) -> None:
    """From any turn of the finish on: a trainer that hears a success may throw its copy away."""
    session = await order(guarded)
    await session.start()
    await session.update(UPDATE)
    guarded.engine.slow_s = slow_s
    finishing = asyncio.create_task(session.finish("2", None))
    for _ in range(turns):
        await asyncio.sleep(0)
    taken = guarded.state.weights.state is WeightsState.LOADED
    refused: BaseException | None = None
    try:
        await guarded.service.command(command(guarded))
    except RejectedError as error:
        refused = error
    await asyncio.wait({finishing}, timeout=10)
    await guarded.ended()
    loaded = guarded.state.weights.state is WeightsState.LOADED and guarded.state.weights.version == 2
    assert loaded is (finishing.exception() is None), (taken, refused)
    if command is newer_close and not taken:
        assert isinstance(finishing.exception(), SupersededError)
        assert "has ended: a newer epoch began" in str(finishing.exception())


async def test_who_waits_for_the_recovery_of_an_update_before_is_told_that_it_ended(guarded: Guarded) -> None:
    session = await order(guarded)
    await session.start()
    await session.update(UPDATE)
    with pytest.raises(RejectedError):
        await guarded.arm(3)  # half-way: the workers must be put back
    await guarded.ended()
    await guarded.close(4, 2)
    await guarded.arm(4)
    guarded.engine.slow_s = 2
    session = await order(guarded, 4)
    calling = asyncio.create_task(session.init({}))
    await asyncio.sleep(0.1)
    session.abandon("a newer epoch began")
    with pytest.raises(OutOfOrderError, match="has ended"):
        await calling
    assert guarded.engine.calls["push_init"] == 0


async def test_who_was_given_up_twice_over_is_still_waited_for(guarded: Guarded) -> None:
    """Close of epoch 3 gives up the Reopen that waited for the trainer's call: the call is still in the engine."""
    session = await order(guarded)
    guarded.engine.slow_s = 3
    calling = asyncio.create_task(session.init({}))
    await asyncio.sleep(0.1)
    cancelling = asyncio.create_task(guarded.service.command(cancel(guarded)))
    await asyncio.sleep(0.1)
    assert guarded.state.operation is not None
    assert guarded.state.operation.name is OperationName.REOPEN
    await guarded.service.command(newer_close(guarded))
    await asyncio.sleep(0.1)
    assert guarded.engine.order[-1] == "push_init", "the pause waits for its end"
    await guarded.ended()
    assert calling.done()
    assert guarded.engine.order[-3:] == ["push_init", "pause", "abort_all"]
    await cancelling
    guarded.engine.slow_s = 0
    await guarded.arm(3)
    session = await order(guarded, 3)
    assert guarded.service.push is session


async def test_a_probe_whose_asker_is_gone_has_left_the_engine_before_an_update_begins() -> None:
    guarded = Guarded()
    await guarded.serve_initial()
    leaving = asyncio.Event()

    async def slow_to_leave(tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        guarded.engine.order.append("probe")
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            await leaving.wait()
            guarded.engine.order.append("left")

    guarded.engine.probe = slow_to_leave  # type: ignore[method-assign]
    probe = Probe(incarnation=guarded.service.incarnation, tokens=TOKENS, deadline_seconds=DEADLINE_S)
    asking = asyncio.create_task(guarded.service.probe(probe))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.sleep(0.1)
    await guarded.service.command(guarded.close_command(2, 2))
    await asyncio.sleep(0.1)
    assert guarded.engine.order[-1] == "probe"
    leaving.set()
    await guarded.ended()
    assert guarded.engine.order[-3:] == ["left", "pause", "abort_all"]
    await guarded.service.stop()
