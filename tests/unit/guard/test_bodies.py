"""Bodies that are too large or too slow, whatever the application makes of it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollfleet_engine.guard.answers import Receive, Scope, Send
from rollfleet_engine.guard.bodies import BodyError, GoneError, read_body
from rollfleet_engine.guard.serving import BODY_TIMEOUT_S, LARGEST_INFERENCE, LARGEST_PROBE, Serving
from rollfleet_protocol.engine_config import Hold
from rollfleet_protocol.refusals import Refusal, RefusalReason
from tests.support.guards import Guarded

COMPLETIONS = "/v1/completions"
Messages = list[dict[str, Any]]


def pieces(*sizes: int, end: bool = True) -> Receive:
    """A sender; without end, it sends nothing more after them."""
    waiting = list(sizes)

    async def receive() -> dict[str, Any]:
        if not waiting and not end:
            await asyncio.Event().wait()
        size = waiting.pop(0) if waiting else 0
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(waiting) or not end}

    return receive


class Reader:
    """An application that reads all, and answers as frameworks do when a body breaks."""

    def __init__(self, on_error: str = "raise") -> None:
        self.on_error = on_error
        self.read = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        if self.on_error == "answer first":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while (message := await receive()).get("more_body"):
                self.read += len(message["body"])
        except BodyError:
            if self.on_error == "raise":
                raise
            status = 400
        if self.on_error != "answer first":
            await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"the application's"})


async def ask(
    guarded: Guarded, app: Reader, receive: Receive, path: str = COMPLETIONS, headers: tuple[Any, ...] = ()
) -> Messages:
    sent: Messages = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    serving = Serving(app, guarded.turnstile, guarded.service, guarded.waiting, tallies=guarded.service.tallies)
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "root_path": ""}
    await serving(scope, receive, send)
    return sent


def refused(sent: Messages) -> tuple[int, RefusalReason]:
    head, body = sent
    return head["status"], Refusal.model_validate_json(body["body"]).error.reason


TOO_LARGE, TOO_SLOW = (413, RefusalReason.TOO_LARGE), (408, RefusalReason.TOO_SLOW)


@pytest.mark.parametrize(("path", "largest"), [(COMPLETIONS, LARGEST_INFERENCE), ("/tokenize", LARGEST_PROBE)])
@pytest.mark.parametrize("on_error", ["raise", "answer"])
async def test_a_body_without_end_is_refused_once_it_is_too_large(path: str, largest: int, on_error: str) -> None:
    guarded, app = Guarded(), Reader(on_error)
    await guarded.serve_initial()
    mebibytes = [1 << 20] * (largest >> 20)
    assert (await ask(guarded, app, pieces(*mebibytes[:-1], (1 << 20) - 1, 0), path))[0]["status"] == 200
    assert refused(await ask(guarded, app, pieces(*mebibytes, 1, 1), path)) == TOO_LARGE
    assert guarded.state.in_flight == 0
    assert guarded.service.tallies.refused == {"TooLarge": 1}
    await guarded.service.stop()


@pytest.mark.parametrize("length", [str(LARGEST_INFERENCE + 1), "9" * 400])
async def test_a_length_that_is_too_large_is_refused_before_the_engine_hears_of_it(length: str) -> None:
    guarded, app = Guarded(), Reader()
    await guarded.serve_initial()
    sent = await ask(guarded, app, pieces(end=False), headers=((b"content-length", length.encode()),))
    assert refused(sent) == TOO_LARGE
    assert guarded.turnstile.admitted == 0
    await guarded.service.stop()


@pytest.mark.looptime
@pytest.mark.parametrize("hold", [None, Hold(seconds=300, max_requests=8)])
async def test_a_body_that_does_not_come_is_not_waited_for(hold: Hold | None) -> None:
    guarded, app = Guarded(hold), Reader()
    await guarded.serve_initial()
    began = asyncio.get_running_loop().time()
    assert refused(await ask(guarded, app, pieces(10, end=False))) == TOO_SLOW
    assert BODY_TIMEOUT_S <= asyncio.get_running_loop().time() - began < BODY_TIMEOUT_S + 1
    assert guarded.state.in_flight == 0
    await guarded.service.stop()


@pytest.mark.looptime
async def test_only_the_sender_s_time_counts() -> None:
    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(3 * BODY_TIMEOUT_S)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        assert (await receive())["type"] == "http.request"  # and after the end of the body nothing is counted at all

    guarded = Guarded()
    await guarded.serve_initial()
    slow_at_the_end = pieces(1, 1)
    calls = 0

    async def receive() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(2 * BODY_TIMEOUT_S if calls == 3 else 1)
        return dict(await slow_at_the_end())

    assert (await ask(guarded, patient, receive))[0]["status"] == 200  # type: ignore[arg-type]
    await guarded.service.stop()


@pytest.mark.looptime
async def test_an_answer_that_has_begun_is_cut_and_not_written_into() -> None:
    guarded = Guarded()
    await guarded.serve_initial()
    sent = await ask(guarded, Reader("answer first"), pieces(10, end=False))
    assert [message["type"] for message in sent] == ["http.response.start"]
    await guarded.service.stop()


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("receive", "error"),
    [
        (lambda: pieces(5, 6), BodyError),
        (lambda: pieces(5, end=False), BodyError),
        (lambda: _disconnects, GoneError),
    ],
)
async def test_reading_a_whole_body(receive: Callable[[], Receive], error: type[Exception]) -> None:
    assert await read_body(pieces(4, 6), 10, 1.0) == b"x" * 10
    with pytest.raises(error):
        await read_body(receive(), 10, 1.0)


async def test_a_cancellation_reaches_who_waits_for_the_body() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    reading = asyncio.create_task(read_body(receive, 10, 60.0))
    await waiting.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended.is_set()


@pytest.mark.parametrize("pauses", [0, 1, 3])
async def test_what_the_server_raises_is_heard_however_late(pauses: int) -> None:
    async def receive() -> dict[str, Any]:
        for _ in range(pauses):
            await asyncio.sleep(0)
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        await read_body(receive, 10, 60.0)


async def test_a_body_in_parts_that_each_come_later_is_whole() -> None:
    parts = [b"a", b"b", b"c"]

    async def receive() -> dict[str, Any]:
        for _ in range(len(parts)):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    assert await read_body(receive, 10, 60.0) == b"abc"


async def _disconnects() -> dict[str, Any]:
    return {"type": "http.disconnect"}
