"""router.whenClosed Hold in the guard: who waits, how long, and what becomes of them."""

import asyncio
import json
from typing import Any

import pytest

from rollfleet_engine.guard.waiting import LONGEST_BODY_AHEAD
from rollfleet_protocol.engine_config import Hold
from rollfleet_protocol.state import FailureReason, Gate
from tests.support.guards import Guarded, eventually
from tests.support.memory_engine import engine_error

pytestmark = pytest.mark.looptime
SECONDS = 10


class Caller:
    """A client whose body comes in pieces and who may go away."""

    def __init__(self, guarded: Guarded, *headers: tuple[bytes, bytes], body: tuple[bytes, ...] = (b"{}",)) -> None:
        self.sent: list[dict[str, Any]] = []
        self.received = 0
        self.left = asyncio.Event()
        self._body = list(body)
        self._guarded = guarded
        self._headers = list(headers)
        self.began = asyncio.get_running_loop().time()
        self.task = asyncio.create_task(self._call())

    async def _call(self) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": self._headers}
        await self._guarded.serving(scope | {"root_path": ""}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._body:
            await self.left.wait()
            return {"type": "http.disconnect"}
        self.received += 1
        piece = self._body.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._body)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def status(self) -> int:
        await self.task
        return int(self.sent[0]["status"])

    @property
    def waited_s(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.sent[1]["body"])["error"])


async def updating(seconds: int = SECONDS, max_requests: int = 4) -> Guarded:
    """Version 1 was served; an update has closed the gate."""
    guarded = Guarded(Hold(seconds=seconds, max_requests=max_requests))
    await guarded.serve_initial()
    await guarded.update(2, 1)
    await guarded.prepare(3, 2)
    await guarded.close(3, 2)
    return guarded


async def call(guarded: Guarded, *headers: tuple[bytes, bytes], **fields: Any) -> Caller:
    """One that waits."""
    before = guarded.state.held
    caller = Caller(guarded, *headers, **fields)
    await eventually(lambda: guarded.state.held == before + 1)
    return caller


async def finish(guarded: Guarded) -> None:
    await guarded.arm(3)
    await guarded.transfer(3, 2)
    await guarded.verify(3, 2)
    await guarded.open(3, 2)


async def test_a_held_request_is_answered_by_the_version_at_its_admission() -> None:
    guarded = await updating()
    callers = [await call(guarded) for _ in range(3)]
    assert (guarded.state.held, guarded.state.in_flight) == (3, 0)
    await finish(guarded)
    for caller in callers:
        assert await caller.status() == 200
        assert caller.headers[b"x-weight-version"] == b"2"
        assert caller.sent[1]["body"] == b"step-2"
    assert guarded.state.held == 0
    await guarded.service.stop()


async def test_the_application_gets_the_whole_body(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = await updating()
    got: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        got.append(message["body"])
        while message["more_body"]:
            message = await receive()
            got.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(guarded.serving, "_app", app)
    big = b"x" * (LONGEST_BODY_AHEAD + 1)
    caller = await call(guarded, body=(b"first", big, b"last"))
    await asyncio.sleep(1)
    assert caller.received == 2  # what is longer stays with its sender
    await finish(guarded)
    assert await caller.status() == 200
    assert got == [b"first", big, b"last"]
    await guarded.service.stop()


async def test_who_waits_for_too_long_gets_the_503() -> None:
    guarded = await updating()
    caller = await call(guarded)
    assert await caller.status() == 503
    assert SECONDS <= caller.waited_s < SECONDS + 0.5
    assert caller.headers[b"retry-after"] == b"1"
    assert caller.error["closedReason"] == "Updating"
    assert guarded.state.held == 0
    await guarded.service.stop()


async def test_more_than_may_wait_are_refused_at_once() -> None:
    guarded = await updating(max_requests=2)
    waiting = [await call(guarded) for _ in range(2)]
    over = Caller(guarded)
    assert await over.status() == 503
    assert over.waited_s == 0
    waiting[0].left.set()
    await waiting[0].task
    third = await call(guarded)
    await finish(guarded)
    assert [await caller.status() for caller in (waiting[1], third)] == [200, 200]
    await guarded.service.stop()


async def test_a_client_that_goes_away_while_held_is_forgotten() -> None:
    guarded = await updating()
    seen = len(guarded.app.seen)
    caller = await call(guarded)
    caller.left.set()
    await caller.task
    assert caller.sent == []
    assert guarded.state.held == 0
    await finish(guarded)
    assert len(guarded.app.seen) == seen
    await guarded.service.stop()


async def test_a_cancelled_task_is_forgotten_too() -> None:
    guarded = await updating()
    caller = await call(guarded)
    caller.task.cancel()
    await eventually(lambda: guarded.state.held == 0)
    await guarded.service.stop()


async def test_shutting_down_refuses_who_waits_at_once() -> None:
    guarded = await updating(seconds=600)
    caller = await call(guarded)
    assert await guarded.service.drain(5) == 0
    assert await caller.status() == 503
    assert caller.error["closedReason"] == "Draining"
    assert caller.waited_s < 1
    await guarded.service.stop()


@pytest.mark.parametrize("end", ["dead", "uncertain"])
async def test_nobody_waits_for_weights_that_will_not_come(end: str) -> None:
    guarded = await updating(seconds=600)
    caller = await call(guarded)
    if end == "dead":
        guarded.engine.is_alive = False
    else:
        await guarded.arm(3)
        guarded.engine.failures["apply"] = engine_error(FailureReason.TRANSFER_FAILED, touched=True)
        await guarded.transfer(3, 2)
    assert await caller.status() == 503
    assert caller.error["closedReason"] == {"dead": "EngineDead", "uncertain": "Uncertain"}[end]
    assert caller.waited_s < 2
    await guarded.service.stop()


async def test_an_engine_that_never_served_holds_nobody() -> None:
    guarded = Guarded(Hold(seconds=600, max_requests=4))
    caller = Caller(guarded)
    assert await caller.status() == 503
    assert caller.error["closedReason"] == "Starting"


async def test_a_version_that_is_demanded_is_judged_at_admission() -> None:
    guarded = await updating()
    new = await call(guarded, (b"x-weight-version-required", b"2"))
    old = await call(guarded, (b"x-weight-version-required", b"1"))
    least = await call(guarded, (b"x-weight-version-min", b"2"))
    wrong = Caller(guarded, (b"x-weight-version-required", b"two"))
    assert await wrong.status() == 400
    assert wrong.waited_s == 0
    await finish(guarded)
    assert [await caller.status() for caller in (new, old, least)] == [200, 409, 200]
    await guarded.service.stop()


async def test_an_update_that_is_given_up_answers_from_the_old_version() -> None:
    guarded = await updating()
    caller = await call(guarded)
    await guarded.cancel(3)
    assert guarded.state.gate is Gate.OPEN
    assert await caller.status() == 200
    assert caller.headers[b"x-weight-version"] == b"1"
    await guarded.service.stop()
