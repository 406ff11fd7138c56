"""Rollouts over real sockets: nothing of a sample rests on a connection that another one has left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from rollfleet_trainer import NotServedError
from rollfleet_trainer.rollouts import Rollouts
from tests.support.ports import free_port
from tests.support.scripted_fleet import ScriptedFleet

SAMPLES = 20


@asynccontextmanager
async def engine_of_one_answer(fleet: ScriptedFleet) -> AsyncIterator[str]:
    """Its URL. Each connection is answered once and kept; a second request on it is lost, as on one just closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(": ") for line in head.split("\r\n")[1:] if line]
        headers = {name.lower(): value for name, _, value in lines}
        body = await reader.readexactly(int(headers["content-length"]))
        url = f"http://engine{head.split()[1]}"
        answer = await fleet.handle_async_request(httpx.Request("POST", url, headers=headers, content=body))
        told = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        writer.write(f"HTTP/1.1 {answer.status_code} OK\r\n{told}\r\n".encode() + await answer.aread())
        await writer.drain()
        if await reader.read(1):
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_sample_is_not_asked_for_on_a_connection_that_the_engine_may_close_at_that_moment() -> None:
    fleet = ScriptedFleet()
    async with engine_of_one_answer(fleet) as url, Rollouts(url, model="policy") as rollouts:
        for _ in range(SAMPLES):
            await rollouts.complete("What is the answer?", 3)
    assert len(fleet.log) == SAMPLES


async def test_a_name_that_only_the_cluster_knows_is_told_with_what_to_give():
    async with Rollouts("http://qwen.rl.svc.invalid:8000", model="policy", hold_s=0) as r:
        with pytest.raises(NotServedError, match=r"known within its cluster only: elsewhere give endpoints"):
            await r.complete("hello", 1)
    async with Rollouts(f"http://127.0.0.1:{free_port()}", model="policy", hold_s=0) as r:
        with pytest.raises(NotServedError) as told:
            await r.complete("hello", 1)
    assert "endpoints" not in str(told.value)
