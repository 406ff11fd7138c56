"""The carrier of calls: what an engine repeats of a token is not carried back."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from rollfleet_cli.conformance.checks.wire import Identity, Port, get
from rollfleet_cli.conformance.transport import Address, Transport
from rollfleet_operator.clients.certificates import make_authority
from tests.support.guard_server import FLEET, Server

SECRET = "eyJh.eyJz.c2ln"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(make_authority(datetime.now(UTC)), tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_a_token_that_an_engine_repeats_is_not_in_what_is_told(server: Server) -> None:
    async def repeat(request: web.Request) -> web.Response:
        told = request.headers["Authorization"]
        return web.Response(status=500, text=f"no such thing for {told}", headers={"X-Asked-By": told})

    server.handler = repeat
    address = Address("127.0.0.1", server.port, server.port, FLEET.control_server_name)
    transport = Transport(address, server.authority.pem, {Identity.OPERATOR: SECRET})
    try:
        answer = await transport.carry(get("/", port=Port.CONTROL, identity=Identity.OPERATOR))
        transport.bearers = {Identity.OPERATOR: "a later one"}
        again = await transport.carry(get("/", port=Port.CONTROL, identity=Identity.OPERATOR))
    finally:
        await transport.close()
    assert server.requests[0][2] == f"Bearer {SECRET}"
    assert answer.told == "HTTP 500: no such thing for Bearer (the token that was sent)"
    assert answer.all("X-Asked-By") == ("Bearer (the token that was sent)",)
    assert "a later one" not in again.text
