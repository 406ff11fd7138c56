"""The way to the real API server, which a test can cut, refuse or make deaf for one operator alone."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

import aiohttp
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

HOP_BY_HOP = {"host", "connection", "transfer-encoding", "content-length"}
MAX_BODY = 64 << 20


class Way(Enum):
    """What becomes of requests, and of what open watches have to tell."""

    OPEN = "open"
    DEAD = "dead"  # a network that takes everything and answers nothing
    REFUSED = "refused"  # nobody listens
    DEAF = "deaf"  # watches go on, and tell of no object


class ApiProxy:
    """Plain HTTP on loopback in front of the API server, with the credentials of the given configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self._server = configuration.host
        self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        self._tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._way = Way.OPEN
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self.port = 0
        self.watches = 0  # open now

    def set(self, way: Way) -> None:
        """From now on."""
        self._way = way
        self._changed.set()
        self._changed = asyncio.Event()

    def kubeconfig(self, path: Path) -> Path:
        """One that leads here."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}],
            "current-context": "proxy",
        }
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ApiProxy"]:
        """Serve while the block runs."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        await self._admit(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        # No body must stay no body: an empty one gets a media type, which the API server refuses.
        url, body = self._server + request.path_qs, await request.read() or None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with self._session.request(request.method, url, data=body, headers=headers, timeout=timeout) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            if request.query.get("watch") == "true":
                self.watches += 1
                try:
                    return await self._watch(request, answer, kept)
                finally:
                    self.watches -= 1
            content = await answer.read()
            await self._admit(request)  # a network that died meanwhile
            return web.Response(status=answer.status, headers=kept, body=content)

    async def _watch(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        rest = b""
        while True:
            chunk = await self._next(request, answer)
            if not chunk:
                return response
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                await self._admit(request)
                if self._way is not Way.DEAF or b'"type":"BOOKMARK"' in line:
                    await response.write(line + b"\n")

    async def _next(self, request: web.Request, answer: aiohttp.ClientResponse) -> bytes:
        """What comes next; empty at the end."""
        reading = asyncio.ensure_future(answer.content.readany())
        try:
            while not reading.done():
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((reading, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if self._way is Way.REFUSED:
                    self._abort(request)
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _admit(self, request: web.Request) -> None:
        """Wait for better times, or end the connection."""
        while self._way is Way.DEAD:
            await self._changed.wait()
        if self._way is Way.REFUSED:
            self._abort(request)

    def _abort(self, request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
        raise asyncio.CancelledError
