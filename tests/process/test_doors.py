"""Strangers at the control port: real sockets that send nothing, or never enough."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rollfleet_engine.guard import doors
from rollfleet_engine.guard.control import ControlApp
from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.keys import IdentityError
from rollfleet_engine.guard.lifecycle import ControlServer
from rollfleet_protocol.commands import STATE_PATH, Push, Sender, Transfer
from rollfleet_protocol.engine_config import EngineConfig
from tests.support.certificates import write_certificate
from tests.support.guards import DEADLINE_S, FLEET, OPERATOR, Guarded, eventually, make_config
from tests.support.ports import free_port

GRPO = Sender(subject="system:serviceaccount:rl:grpo", uid="grpo-uid")
KNOWN = {"operator": Caller(OPERATOR.subject, OPERATOR.uid), "trainer": Caller(GRPO.subject, GRPO.uid)}
ROOM = 6
SOON_S = 0.2
HEAD = f"GET {STATE_PATH} HTTP/1.1\r\nhost: engine\r\n".encode()


class KnownToken:
    """Verifies by one word."""

    async def verify(self, token: str) -> Caller:
        if token not in KNOWN:
            raise IdentityError("not the word")
        return KNOWN[token]

    async def close(self) -> None:
        """Nothing to end."""


class Port:
    """A control port with little room."""

    def __init__(self, config: EngineConfig, died: list[str]) -> None:
        self.config = config
        self.died = died

    async def stranger(self, *, tls: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not tls:
            return await asyncio.open_connection("127.0.0.1", self.config.control_port)
        context = self.context()
        name = FLEET.control_server_name
        return await asyncio.open_connection("127.0.0.1", self.config.control_port, ssl=context, server_hostname=name)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(Path(self.config.tls_dir) / "tls.crt"))

    def operator(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.config.control_port}",
            verify=self.context(),
            headers={"Authorization": "Bearer operator"},
            trust_env=False,
        )


async def ask(client: httpx.AsyncClient) -> int:
    answer = await client.get(STATE_PATH, extensions={"sni_hostname": FLEET.control_server_name})
    return answer.status_code


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection without a word."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return await reader.read() == b""
    return True


@pytest.fixture
async def port(tmp_path: Path, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    monkeypatch.setattr(doors, "MOST_CONNECTIONS", ROOM)
    write_certificate(tmp_path, FLEET.control_server_name)
    config = make_config(tls_dir=str(tmp_path), bind_address="127.0.0.1", control_port=free_port())
    died: list[str] = []
    server = ControlServer(
        ControlApp(guarded.service, KnownToken(), OPERATOR, guarded.log), config, guarded.log, died.append
    )
    await server.start()
    yield Port(config, died)
    await server.stop()
    assert died == []


@pytest.mark.parametrize("tls", [True, False])
async def test_who_says_nothing_has_to_go(port: Port, monkeypatch: pytest.MonkeyPatch, *, tls: bool) -> None:
    monkeypatch.setattr(doors, "HEAD_S", SOON_S)
    monkeypatch.setattr(doors, "HANDSHAKE_S", SOON_S if not tls else 10.0)
    reader, writer = await port.stranger(tls=tls)
    assert await is_cut(reader)
    writer.close()


async def test_a_head_that_never_ends_is_not_waited_for(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HEAD_S", SOON_S)
    reader, writer = await port.stranger()
    cut = asyncio.create_task(is_cut(reader))
    writer.write(HEAD)

    async def still_talks() -> bool:
        with contextlib.suppress(OSError):
            writer.write(b"x: y\r\n")
        return cut.done()

    await eventually(still_talks)
    assert cut.result()
    writer.close()


async def test_nor_that_of_a_further_request(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "HEAD_S", SOON_S)
    reader, writer = await port.stranger()
    writer.write(HEAD + b"authorization: Bearer operator\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readline()).split()[1] == b"200"
    writer.write(HEAD)
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert (await reader.read()).count(b"HTTP/1.1") == 0  # the rest of the first answer, then the end
    writer.close()


async def test_the_operator_always_finds_room(port: Port) -> None:
    """Also while more strangers keep coming than there is room; who is known stays connected all along."""
    strangers = [await port.stranger(tls=number % 2 == 0) for number in range(ROOM)]
    async with port.operator() as operator:
        assert await ask(operator) == 200
        strangers += [await port.stranger(tls=number % 2 == 0) for number in range(2 * ROOM)]
        pool = operator._transport._pool  # type: ignore[attr-defined]
        assert await ask(operator) == 200
        assert len(pool.connections) == 1
        assert await is_cut(strangers[0][0])
        async with port.operator() as another:
            assert await ask(another) == 200
    for _, writer in strangers:
        writer.close()


async def test_room_that_known_callers_take_is_not_taken_from_them(port: Port) -> None:
    async with contextlib.AsyncExitStack() as stack:
        operators = [await stack.enter_async_context(port.operator()) for _ in range(ROOM)]
        for operator in operators:
            assert await ask(operator) == 200
        reader, writer = await port.stranger(tls=False)
        assert await is_cut(reader)
        writer.close()
        for operator in operators:
            assert await ask(operator) == 200


async def awaits_a_push(guarded: Guarded) -> None:
    """From now on the trainer may call."""
    await guarded.serve_initial()
    await guarded.close(2, 2)
    await guarded.arm(2)
    push = Push(sender=GRPO, backend="gloo", rank_offset=1, world_size=2, workers=1)
    transfer = Transfer(
        incarnation=guarded.service.incarnation, epoch=2, version=2, push=push, deadline_seconds=DEADLINE_S
    )
    await guarded.service.command(transfer)
    await eventually(lambda: guarded.service.push is not None)


async def call(port: Port, body: bytes, *, whole: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The trainer's, on a connection of its own that stays."""
    reader, writer = await port.stranger()
    length = len(body) + (0 if whole else 1)
    head = f"POST /pause HTTP/1.1\r\nhost: engine\r\nauthorization: Bearer trainer\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> bytes:
    """Of the next answer; nothing where the connection is cut without one."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return b"".join((await reader.readline()).split()[1:2])
    return b""


async def until_full(port: Port) -> list[asyncio.StreamWriter]:
    """Until calls run on as many of the trainer's connections as it may have."""
    writers: list[asyncio.StreamWriter] = []

    async def is_full() -> bool:
        reader, writer = await call(port, b"")
        writers.append(writer)
        return await status_of(reader) == b"429"

    await eventually(is_full)
    return writers


async def test_a_trainer_cannot_lock_the_operator_out(port: Port, guarded: Guarded) -> None:
    """Neither by connections that it leaves open, nor by calls that it does not end."""
    await awaits_a_push(guarded)
    writers = []
    first, writer = await call(port, b"")
    writers.append(writer)
    assert await status_of(first) == b"200"
    for _ in range(2 * ROOM):
        reader, writer = await call(port, b"")
        writers.append(writer)
        assert await status_of(reader) == b"200"
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await asyncio.wait_for(first.read(), 10)  # the rest of its answer, and the end: the oldest had to go
    for _ in range(ROOM // 2):
        _, writer = await call(port, b"x", whole=False)
        writers.append(writer)
    writers += await until_full(port)
    async with port.operator() as operator:
        assert await ask(operator) == 200
    for writer in writers:
        writer.close()


async def test_a_call_that_runs_is_not_cut_for_another(port: Port, guarded: Guarded) -> None:
    await awaits_a_push(guarded)
    running = [await call(port, b"x", whole=False) for _ in range(ROOM // 2)]
    refused = await until_full(port)
    for reader, writer in running:
        writer.write(b"x")
        assert await status_of(reader) == b"200"
    reader, writer = await call(port, b"")
    assert await status_of(reader) == b"200", "there is room again"
    for each in (*refused, writer, *(writer for _, writer in running)):
        each.close()
