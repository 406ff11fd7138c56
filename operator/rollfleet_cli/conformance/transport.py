"""Carries calls to an engine's two ports as they are: no redirect, no retry, no header of its own that matters."""

import asyncio
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from aiohttp.connector import AddrInfoType
from yarl import URL

from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port

TOKEN_SHOWN = b"(the token that was sent)"
MOST_BYTES = 8 << 20  # of an answer; /metrics of a large engine is the longest
CONNECT_S = 10.0
CLOSE_S = 1.0
LOOK_S = 0.01


@dataclass(frozen=True)
class Address:
    """Where an engine's ports are, as seen from here."""

    host: str
    serving_port: int
    control_port: int
    server_name: str  # in the fleet's certificate


class Transport:
    """Keeps running.Carrier, with a session of its own."""

    def __init__(
        self,
        address: Address,
        authority_pem: str,
        bearers: Mapping[Identity, str],
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self._address = address
        self.bearers = bearers  # tokens by whose they are; renewed by who made them
        self._sent: set[bytes] = set()  # tokens that the engine has seen; of a few minutes each
        self._explain = explain  # what the way there says of a connection that came to nothing
        self._tls = ssl.create_default_context(cadata=authority_pem)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._session = aiohttp.ClientSession(
            # No answer depends on an earlier one.
            connector=aiohttp.TCPConnector(limit=64, force_close=True, socket_factory=self._socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )

    def _socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol = address[:3]
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        self._sockets.add(made)
        return made

    @property
    def open_sockets(self) -> list[socket.socket]:
        """Of connections that have not ended."""
        return [each for each in self._sockets if each.fileno() >= 0]

    async def close(self) -> None:
        """Close the connections. One whose engine took no more of a body would stay until it is all written."""
        await self._session.close()
        ends = time.monotonic() + CLOSE_S
        while self.open_sockets:
            for each in self.open_sockets:
                with suppress(OSError):  # it is not connected any more
                    each.shutdown(socket.SHUT_RDWR)
            if time.monotonic() > ends:
                return
            await asyncio.sleep(LOOK_S)

    async def carry(self, call: Call) -> Exchange:
        """The exchange; an answer that does not come is told in it."""
        began = time.monotonic()
        try:
            async with self._session.request(
                call.method,
                URL(self._origin(call.port) + call.path, encoded=True),
                data=call.body,
                headers=self._headers(call),
                ssl=self._tls if call.port is Port.CONTROL else True,
                server_hostname=self._address.server_name if call.port is Port.CONTROL else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=call.within_s, sock_connect=CONNECT_S),
            ) as answer:
                body = self._without_tokens(await _bounded(answer))
                headers = tuple((name, self._shown(value)) for name, value in answer.headers.items())
                return Exchange(call, answer.status, headers, body, began=began, ended=time.monotonic())
        except TimeoutError:
            words = f"no answer within {call.within_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            words = self._explain() or self._shown(f"{type(error).__name__}: {error}")
        return Exchange(call, error=words, began=began, ended=time.monotonic())

    def _origin(self, port: Port) -> str:
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        if port is Port.CONTROL:
            return f"https://{host}:{self._address.control_port}"
        return f"http://{host}:{self._address.serving_port}"

    def _headers(self, call: Call) -> list[tuple[str, str]]:
        headers = list(call.headers)
        if call.port is Port.CONTROL:
            headers.append(("Host", self._address.server_name))
            if call.identity is not Identity.NOBODY:
                token = self.bearers[call.identity]
                if call.identity is not Identity.GARBAGE:
                    self._sent.add(token.encode())
                headers.append(("Authorization", f"Bearer {token}"))
        return headers

    def _without_tokens(self, content: bytes) -> bytes:
        """What an engine, or what stands before it, repeats of a request must not get into a report to be passed on."""
        for token in self._sent:
            content = content.replace(token, TOKEN_SHOWN)
        return content

    def _shown(self, text: str) -> str:
        return self._without_tokens(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > MOST_BYTES:
            raise ValueError(f"the answer is longer than {MOST_BYTES} bytes")
    return bytes(content)
