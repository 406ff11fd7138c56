"""What is no HTTP, or too much of it, on both ports: refused in the guard's words, and all goes on."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rollfleet_engine.guard import doors, middleware
from rollfleet_engine.guard.connections import LARGEST_HEAD
from rollfleet_protocol.commands import STATE_PATH
from rollfleet_protocol.refusals import Refusal, RefusalReason
from tests.support.guard_process import Process, process_config
from tests.support.guards import FLEET, eventually

SERVING, CONTROL = "serving", "control"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
COMMAND = b"POST /rollfleet/v1/open HTTP/1.1\r\nhost: engine\r\n"
SOON_S = 0.3

MALFORMED = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "no version": b"GET /livez\r\n\r\n",
    "a version that is none": b"GET /livez HTTP/9.9.9\r\nhost: engine\r\n\r\n",
    "a header without a name": POST + b": x\r\n\r\n",
    "a name with a space": POST + b"content length: 3\r\n\r\nabc",
    "a line feed in a value": POST + b"x: a\nb\r\n\r\n",
    "a null": POST + b"x: a\x00b\r\n\r\n",
    "two lengths": POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "a negative length": POST + b"content-length: -1\r\n\r\n",
    "a length that is no number": POST + b"content-length: 0x10\r\n\r\n",
    "a chunk of no size": CHUNKED + b"zz\r\nabc\r\n",
    "a chunk whose size has no end": CHUNKED + b"f" * 200,
    "a chunk that is longer than it says": CHUNKED + b"1\r\nabcdef\r\n",
    "an encoding that is none": POST + b"transfer-encoding: rot13\r\n\r\n",
}


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    async with Process(process_config(tmp_path)).running() as process:
        yield process


async def connect(process: Process, port: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    config = process.config
    if port == SERVING:
        return await asyncio.open_connection("127.0.0.1", config.serving_port)
    context = ssl.create_default_context(cafile=str(Path(config.tls_dir) / "tls.crt"))
    name = FLEET.control_server_name
    return await asyncio.open_connection("127.0.0.1", config.control_port, ssl=context, server_hostname=name)


async def say(process: Process, port: str, *parts: bytes) -> bytes:
    """What comes back until the other side ends, or has said one whole answer."""
    reader, writer = await connect(process, port)
    answer = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        for part in parts:
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout(5):
            while piece := await reader.read(1 << 16):
                answer += piece
                head, _, body = answer.partition(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    break
    writer.close()
    return answer


def refusal(answer: bytes) -> tuple[int, RefusalReason]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = Refusal.model_validate_json(body).error
    assert int(head.split()[1]) == error.code
    return error.code, error.reason


async def is_well(process: Process) -> None:
    """It lives, and nobody has moved it."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.config.serving_port}", trust_env=False) as http:
        assert (await http.get("/livez")).status_code == 200
    state = await process.state()
    assert (state.epoch, state.gate, state.closed_reason, state.in_flight) == (0, "Closed", "Starting", 0)


@pytest.mark.parametrize("port", [SERVING, CONTROL])
async def test_malformed_requests(process: Process, port: str) -> None:
    for name, text in MALFORMED.items():
        answer = await say(process, port, text)
        status, reason = refusal(answer)
        closed = (503, RefusalReason.CLOSED) if port == SERVING else (401, RefusalReason.UNAUTHENTICATED)
        assert (status, reason) in ((400, RefusalReason.INVALID_REQUEST), closed), name
    await is_well(process)


@pytest.mark.parametrize("port", [SERVING, CONTROL])
async def test_requests_with_random_damage(process: Process, port: str) -> None:
    """Nothing but refusals, whatever byte is changed, left out or doubled; and no unbounded wait."""
    random_ = random.Random(20261130)
    wholes = [COMMAND + b"content-length: 2\r\n\r\n{}", CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", *MALFORMED.values()]

    async def one() -> None:
        text = bytearray(random_.choice(wholes))
        for _ in range(random_.randint(1, 6)):
            place = random_.randrange(len(text))
            match random_.randrange(3):
                case 0:
                    text[place] = random_.randrange(256)
                case 1:
                    del text[place : place + random_.randint(1, 9)]
                case _:
                    text[place:place] = text[place : place + 40]
            text = text or bytearray(b"x")
        text += b"\r\n\r\n"
        reader, writer = await connect(process, port)
        writer.write(bytes(text))
        writer.write_eof() if writer.can_write_eof() else None
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            async with asyncio.timeout(0.5):
                first = await reader.readline()
                assert not first or first.split()[1] in (b"400", b"401", b"404", b"405", b"503"), bytes(text)
        writer.close()

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(12)))
    await is_well(process)


@pytest.mark.parametrize("port", [SERVING, CONTROL])
@pytest.mark.parametrize("line", [b"x: y\r\n", b"x: " + b"y" * 8192 + b"\r\n", b"y" * 8192])
async def test_a_head_without_end_is_refused(process: Process, port: str, line: bytes) -> None:
    many = 3 * LARGEST_HEAD // len(line)
    status, reason = refusal(await say(process, port, POST + b"x: ", *[line * 64] * (many // 64 + 1)))
    assert (status, reason) in ((400, RefusalReason.INVALID_REQUEST), (431, RefusalReason.TOO_LARGE))
    await is_well(process)


async def test_a_head_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HEAD_S", SOON_S)
    async with Process(process_config(tmp_path)).running() as process:
        assert refusal(await say(process, SERVING, POST)) == (408, RefusalReason.TOO_SLOW)
        assert refusal(await say(process, SERVING)) == (408, RefusalReason.TOO_SLOW)
        async with httpx.AsyncClient(trust_env=False) as http:  # who has said all is answered as ever

            async def both_are_counted() -> bool:
                answer = await http.get(f"http://127.0.0.1:{process.config.serving_port}/metrics")
                return 'rollfleet_guard_requests_refused_total{reason="TooSlow"} 2.0' in answer.text

            await eventually(both_are_counted)


@pytest.mark.parametrize("port", [SERVING, CONTROL])
async def test_who_sends_on_after_the_answer_is_cut(tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request's body is not read to its end: it may have none."""
    monkeypatch.setattr(middleware, "HEAD_S", SOON_S)
    monkeypatch.setattr(doors, "HEAD_S", SOON_S)
    async with Process(process_config(tmp_path)).running() as process:
        reader, writer = await connect(process, port)
        writer.write(CHUNKED)
        ended = asyncio.create_task(reader.read())

        async def goes_on() -> bool:
            with contextlib.suppress(OSError):
                writer.write(b"1\r\nx\r\n")
            return ended.done()

        await eventually(goes_on, every_s=0.02)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert ended.result().split()[1] in (b"401", b"503")
        writer.close()


async def test_a_body_that_is_too_large_for_the_control_port(process: Process) -> None:
    async with process.control() as client:
        sni = {"extensions": {"sni_hostname": FLEET.control_server_name}}

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield b" " * (1 << 17)

        answer = await client.post("/rollfleet/v1/open", content=endless(), **sni)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "TooLarge")
        assert (await client.get(STATE_PATH, **sni)).status_code == 200
    await is_well(process)


async def test_strangers_do_not_fill_the_log(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    for port in (SERVING, CONTROL):
        for _ in range(20):
            await say(process, port, MALFORMED["not HTTP"])
    lines = [record for record in caplog.records if "Invalid HTTP" in record.getMessage()]
    assert 1 <= len(lines) < 30, "of 40 refusals"


async def test_two_requests_in_one_are_two(process: Process) -> None:
    """Length and chunks together are the old way to hide a request: refused, or the hidden one is one of its own."""
    hidden = b"POST /pause HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n"
    text = POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + hidden
    answer = await say(process, SERVING, text)
    assert answer.split()[1] in (b"400", b"503")
    assert not process.engine.calls.get("pause")
    await is_well(process)
