"""Pause modes wait and keep: what becomes of requests that run when the gate closes."""

import asyncio
import json
from typing import Any

import pytest

from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.state import EngineState, FailureReason, Gate, OperationStatus, WeightsState
from tests.support.guards import SILENCE_S, Guarded, eventually, failure_of
from tests.support.memory_engine import engine_error

pytestmark = pytest.mark.looptime
PATH = "/v1/completions"


class Asking:
    """One request, and what came of it so far."""

    def __init__(self, guarded: Guarded, *headers: tuple[bytes, bytes]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._guarded = guarded
        self._headers = headers
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": list(self._headers), "root_path": ""}
        await self._guarded.serving(scope, receive, send)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


async def ask(guarded: Guarded, *headers: tuple[bytes, bytes]) -> Asking:
    before = guarded.state.in_flight
    asking = Asking(guarded, *headers)
    await eventually(lambda: guarded.state.in_flight == before + 1)
    return asking


async def serve(guarded: Guarded) -> None:
    """Version 1; every request runs until it is ended."""
    await guarded.serve_initial()
    await guarded.update(2, 1)
    guarded.app.generates = True


def end(guarded: Guarded) -> None:
    guarded.engine.frozen[PATH].set()


async def keep(guarded: Guarded, epoch: int = 3, version: int = 2, **changes: Any) -> EngineState:
    await guarded.prepare(epoch, version)
    return await guarded.close(epoch, version, mode=PauseMode.KEEP, **changes)


async def change(guarded: Guarded, epoch: int = 3, version: int = 2) -> EngineState:
    await guarded.arm(epoch)
    await guarded.transfer(epoch, version)
    if guarded.state.weights.state is not WeightsState.LOADED:
        return guarded.state
    return await guarded.verify(epoch, version)


# --- wait


async def test_wait_lets_requests_end_by_themselves_before_it_pauses(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    closing = asyncio.create_task(guarded.close(3, 2, mode=PauseMode.WAIT, drain_timeout_seconds=8))
    await asyncio.sleep(5)
    assert (guarded.state.gate, guarded.state.paused, guarded.state.in_flight) == (Gate.CLOSED, False, 1)
    end(guarded)
    state = await closing
    assert (state.paused, state.in_flight, state.kept) == (True, 0, 0)
    assert (asking.status, asking.body, asking.headers["x-weight-version"]) == (200, b"step-1", "1")


async def test_wait_aborts_what_is_left_after_the_drain_timeout(guarded: Guarded) -> None:
    await serve(guarded)
    guarded.app.generates, guarded.app.hold = False, True
    asking = await ask(guarded)
    began = asyncio.get_running_loop().time()
    state = await guarded.close(3, 2, mode=PauseMode.WAIT, drain_timeout_seconds=4)
    assert state.in_flight == 0
    assert 4 <= asyncio.get_running_loop().time() - began < 5
    await asking.task
    assert asking.status == 200


async def test_wait_leaves_time_before_the_deadline_to_abort(guarded: Guarded) -> None:
    await serve(guarded)
    guarded.app.generates, guarded.app.hold, guarded.app.deaf = False, True, True
    asking = await ask(guarded)
    state = await guarded.close(3, 2, deadline_s=20, mode=PauseMode.WAIT, drain_timeout_seconds=600)
    assert state.operation is not None
    assert state.operation.status is OperationStatus.SUCCEEDED
    await asking.task
    assert asking.status == 503


async def test_a_silent_operator_reopens_while_requests_are_waited_for(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    command = guarded.close_command(3, 2, deadline_s=300, mode=PauseMode.WAIT, drain_timeout_seconds=200)
    await guarded.service.command(command)
    await eventually(lambda: guarded.state.gate is Gate.OPEN, 2 * SILENCE_S, every_s=0.5)
    assert guarded.engine.calls["pause"] == 1  # of the update before
    end(guarded)
    await asking.task
    assert (asking.status, asking.body) == (200, b"step-1")


# --- keep


async def test_keep_freezes_requests_over_the_update_and_tells_the_spans(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    state = await keep(guarded)
    assert (state.in_flight, state.kept, state.paused, state.gate) == (0, 1, True, Gate.CLOSED)
    await change(guarded)
    assert guarded.engine.kept[-1] is True
    assert guarded.engine.calls["abort_all"] == 1  # of the update before
    await guarded.open(3, 2)
    assert (guarded.state.in_flight, guarded.state.kept) == (1, 0)
    end(guarded)
    await asking.task
    assert (asking.status, asking.body, asking.headers["x-weight-version"]) == (200, b"step-2", "1")
    assert json.loads(asking.headers["x-weight-version-spans"]) == [
        {"version": 1, "fromToken": [0]},
        {"version": 2, "fromToken": [3]},
    ]


async def test_nothing_is_said_between_closing_and_opening(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await change(guarded)
    assert not guarded.state.paused
    end(guarded)
    await asyncio.sleep(5)
    assert asking.sent == []
    assert guarded.state.kept == 1
    await guarded.open(3, 2)
    await asking.task
    assert asking.body == b"step-2"


async def test_a_stream_tells_its_spans_before_the_end(guarded: Guarded) -> None:
    await serve(guarded)
    guarded.app.stream = True
    asking = await ask(guarded)
    await keep(guarded)
    await change(guarded)
    await guarded.open(3, 2)
    end(guarded)
    await asking.task
    spans = b'[{"version": 1, "fromToken": [0]}, {"version": 2, "fromToken": [3]}]'
    assert asking.body == b"data: one\n\ndata: step-2\n\n: x-weight-version-spans " + spans + b"\n\ndata: [DONE]\n\n"
    assert "x-weight-version-spans" not in asking.headers


async def test_spans_add_up_over_several_updates(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    for epoch, version in ((3, 2), (4, 3)):
        await keep(guarded, epoch, version)
        await change(guarded, epoch, version)
        await guarded.open(epoch, version)
    end(guarded)
    await asking.task
    assert [span["version"] for span in json.loads(asking.headers["x-weight-version-spans"])] == [1, 2, 3]


async def test_what_generated_nothing_before_is_of_the_new_version(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    monkeypatch.setattr(guarded.engine, "tokens", lambda: {PATH: 0})
    await keep(guarded)
    await change(guarded)
    await guarded.open(3, 2)
    end(guarded)
    await asking.task
    assert asking.headers["x-weight-version"] == "2"
    assert "x-weight-version-spans" not in asking.headers


async def test_what_demands_one_version_is_aborted_instead(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded, (b"x-weight-version-required", b"1"))
    state = await keep(guarded)
    assert (state.in_flight, state.kept) == (0, 0)
    await asking.task
    assert (asking.status, asking.body) == (200, b"step-1")
    assert guarded.engine.calls["abort"] == 1


async def test_a_cancelled_keep_goes_on_under_the_same_version(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await guarded.cancel(3)
    end(guarded)
    await asking.task
    assert (asking.status, asking.body, asking.headers["x-weight-version"]) == (200, b"step-1", "1")
    assert "x-weight-version-spans" not in asking.headers


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("fails", ["apply", "probe"])
async def test_kept_requests_are_refused_when_the_weights_are_lost(
    guarded: Guarded, fails: str, *, swallows: bool
) -> None:
    await serve(guarded)
    guarded.app.swallows = swallows
    asking = await ask(guarded)
    await keep(guarded)
    guarded.engine.failures[fails] = engine_error(FailureReason.TRANSFER_FAILED, touched=True)
    await change(guarded)
    assert guarded.state.weights.state is WeightsState.UNCERTAIN
    await asking.task
    assert (asking.status, guarded.state.kept, guarded.state.in_flight) == (503, 0, 0)
    assert json.loads(asking.body)["error"]["type"] == "rollfleet"


async def test_a_failure_before_touch_keeps_them(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await guarded.arm(3)
    guarded.engine.failures["apply"] = engine_error(FailureReason.TRANSFER_FAILED)
    assert failure_of(await guarded.transfer(3, 2)) is FailureReason.TRANSFER_FAILED
    assert guarded.state.kept == 1
    await guarded.cancel(3)
    end(guarded)
    await asking.task
    assert asking.body == b"step-1"


async def test_a_stream_that_loses_its_weights_stays_incomplete(guarded: Guarded) -> None:
    await serve(guarded)
    guarded.app.stream = True
    asking = await ask(guarded)
    await keep(guarded)
    guarded.engine.failures["apply"] = engine_error(FailureReason.TRANSFER_FAILED, touched=True)
    await change(guarded)
    await asking.task
    assert asking.body == b"data: one\n\n"
    assert asking.sent[-1]["more_body"]


async def test_a_later_close_that_aborts_ends_what_an_earlier_one_kept(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    guarded.engine.running.add(guarded.engine.frozen[PATH])
    state = await guarded.close(4, 3)
    assert (state.in_flight, state.kept) == (0, 0)
    await asking.task
    assert (asking.status, asking.body) == (200, b"step-1")


async def test_what_ran_under_weights_that_never_opened_is_cut_by_a_later_close(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await change(guarded)
    end(guarded)
    state = await guarded.close(4, 3)
    assert (state.in_flight, state.kept) == (0, 0)
    await asking.task
    assert asking.status == 503


async def test_what_got_tokens_of_weights_that_never_opened_is_not_kept_again(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await change(guarded)
    guarded.engine.made += 1
    state = await keep(guarded, 4, 3)
    assert (state.in_flight, state.kept) == (0, 0)
    await asking.task
    assert asking.status == 503


async def test_a_later_close_may_keep_them_again(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    await change(guarded)
    assert (await keep(guarded, 4, 3)).kept == 1
    await change(guarded, 4, 3)
    await guarded.open(4, 3)
    end(guarded)
    await asking.task
    assert asking.body == b"step-3"
    assert [span["version"] for span in json.loads(asking.headers["x-weight-version-spans"])] == [1, 3]


async def test_requests_are_kept_no_longer_than_told(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded, keep_seconds=50)
    await guarded.arm(3)
    await asyncio.sleep(49)
    assert guarded.state.kept == 1
    await asyncio.sleep(2)
    await asking.task
    assert (asking.status, guarded.state.kept) == (503, 0)
    assert guarded.lines("kept.expired")[0]["count"] == 1


async def test_a_client_that_goes_away_is_not_kept(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    asking.task.cancel()
    await eventually(lambda: guarded.state.kept == 0)
    await change(guarded)
    assert guarded.engine.kept[-1] is False


async def test_draining_ends_what_is_kept(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    guarded.engine.running.add(guarded.engine.frozen[PATH])
    assert await guarded.service.drain(30) == 0
    await asking.task
    assert (asking.status, asking.body) == (200, b"step-1")


async def test_a_close_that_keeps_keeps_nobody_of_an_engine_that_is_shut_down(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    guarded.engine.running.add(guarded.engine.frozen[PATH])
    guarded.engine.slow_s = 3
    closing = asyncio.create_task(guarded.close(3, 2, mode=PauseMode.KEEP))
    await eventually(lambda: guarded.engine.calls["pause"] == 2)
    assert await guarded.service.drain(20) == 0
    await closing
    await asking.task
    assert (asking.status, asking.body, guarded.state.kept) == (200, b"step-1", 0)


async def test_a_dead_engine_refuses_what_it_kept(guarded: Guarded) -> None:
    await serve(guarded)
    asking = await ask(guarded)
    await keep(guarded)
    guarded.engine.is_alive = False
    await eventually(lambda: not guarded.state.alive)
    await asking.task
    assert (asking.status, guarded.state.kept) == (503, 0)
