"""A guard's port on the loopback, with TLS, whose answers a test chooses."""

import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from rollfleet_operator.clients.certificates import Authority, issue
from rollfleet_protocol.engine_config import FleetIdentity
from tests.support.states import make_state

FLEET = FleetIdentity(namespace="rl", name="qwen", uid="f-1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OneToken:
    """Stands for Tokens."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    async def bearer(self, audience: str) -> str:
        return f"token for {audience}"

    def discard(self, audience: str, text: str) -> None:
        self.discarded.append(text)


class Server:
    """A guard's port whose answers a test chooses."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        self.authority, self.folder = authority, folder
        self.requests: list[tuple[str, str, str]] = []
        self.handler: Handler = self.answer_state
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self, name: str = FLEET.control_server_name) -> None:
        issued = issue(self.authority, name, datetime.now(UTC))
        for file, content in (("tls.crt", issued.certificate), ("tls.key", issued.key)):
            (self.folder / file).write_bytes(content)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "tls.crt", self.folder / "tls.key")
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs, request.headers.get("Authorization", "")))
        return await self.handler(request)

    async def answer_state(self, _: web.Request) -> web.Response:
        return web.Response(text=make_state(4).model_dump_json(by_alias=True), content_type="application/json")
