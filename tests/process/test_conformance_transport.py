"""The way from the command line to an engine that does not read what it is sent."""

import asyncio
import socket

from rollfleet_cli.conformance.checks.wire import Call, Port
from rollfleet_cli.conformance.transport import Address, Transport
from tests.support.issuer import CertificateAuthority

BODY = bytes(1000 << 10)  # more than the buffers of two sockets that nobody reads take at once


async def test_nothing_is_left_open_where_an_engine_takes_no_more_of_a_body() -> None:
    refused = asyncio.Event()

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        await refused.wait()  # and reads nothing
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1)
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    port = server.sockets[0].getsockname()[1]
    transport = Transport(Address("127.0.0.1", port, port, "engine"), CertificateAuthority("test").pem.decode(), {})
    exchange = await transport.carry(Call(Port.SERVING, "POST", "/v1/completions", body=BODY))
    assert exchange.status == 413
    assert transport.open_sockets, "the engine has not read the body"
    await transport.close()
    assert transport.open_sockets == []
    refused.set()
    server.close()
