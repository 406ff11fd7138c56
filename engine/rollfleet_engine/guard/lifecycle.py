"""The control port's server: a second uvicorn in the engine's loop, with TLS whose certificate may change under it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from rollfleet_engine.guard.answers import AsgiApp
from rollfleet_engine.guard.doors import Doors, Http, Visit
from rollfleet_engine.guard.log import GuardLog
from rollfleet_protocol.engine_config import EngineConfig

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
RELOAD_EVERY_S = 5.0  # the kubelet itself takes up to a minute to bring a changed Secret
BACKLOG = 128
KEEP_ALIVE_S = 75  # longer than the longest poll, so that followers keep their connection
_START_LOOK_S = 0.01


class Certificate:
    """tls.crt and tls.key of a folder, loaded anew when they change. `context` is for the next handshake."""

    def __init__(self, folder: Path) -> None:
        self.certfile = folder / "tls.crt"
        self.keyfile = folder / "tls.key"
        self._seen = self._stamp()
        self.context = self._load()

    def reload(self) -> bool:
        """Whether there was something new. Raises OSError (ssl.SSLError too), and keeps the old pair, if it is bad.

        Connections that stand keep the chain that they were greeted with.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self.context = self._load()
        self._seen = stamp
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certfile, self.keyfile)
        return context

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in (self.certfile.stat(), self.keyfile.stat()))


class _Server(uvicorn.Server):
    """Leaves signals to the engine's own server in the same process, and the listener to the doors."""

    def __init__(self, settings: uvicorn.Config, listener: socket.socket, certificate: Certificate) -> None:
        super().__init__(settings)
        self._doors = Doors(listener, lambda: certificate.context, self._protocol)

    def _protocol(self, visit: Visit, app_state: dict[str, Any]) -> Http:
        return Http(visit, self.config, self.server_state, app_state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._doors.open(self._end)
        self.started = True

    def _end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        await self._doors.close()
        await super().shutdown(sockets)


class ControlServer:
    """Serves the control application until stopped; `on_death` hears of any other end."""

    def __init__(self, app: AsgiApp, config: EngineConfig, log: GuardLog, on_death: Callable[[str], None]) -> None:
        self._app = app
        self._config = config
        self._log = log
        self._on_death = on_death
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen. Raises OSError or RuntimeError."""
        certificate = await asyncio.to_thread(Certificate, Path(self._config.tls_dir))
        settings = uvicorn.Config(
            self._app,
            interface="asgi3",
            http="h11",  # bounds what a stranger may send before the end of the headers
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(settings, self._listen(), certificate)
        serving = asyncio.create_task(self._serve(self._server), name="rollfleet-control")
        self._tasks = [serving, asyncio.create_task(self._renew(certificate), name="rollfleet-certificate")]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if serving.done():
                    raise RuntimeError(f"the control port {self._config.control_port} could not be opened")
                await asyncio.sleep(_START_LOOK_S)

    def _listen(self) -> socket.socket:
        host, port = self._config.bind_address, self._config.control_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)

    async def stop(self) -> None:
        """Close the listener and what is connected."""
        server, tasks = self._server, self._tasks
        self._server, self._tasks = None, []
        if server is None:
            return
        server.should_exit = True
        serving, renewing = tasks
        renewing.cancel()
        _, late = await asyncio.wait({serving}, timeout=STOP_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, server: _Server) -> None:
        try:
            await server.serve()
        finally:
            if self._server is server:
                self._on_death(f"the control port {self._config.control_port} is gone: its server ended")

    async def _renew(self, certificate: Certificate) -> None:
        told = ""
        while True:
            await asyncio.sleep(RELOAD_EVERY_S)
            try:
                if await asyncio.to_thread(certificate.reload):
                    self._log.write("certificate.reloaded")
                told = ""
            except OSError as error:  # tried again at each look, and told once
                words = f"{type(error).__name__}: {error}"
                if words != told:
                    self._log.write("certificate.reload_failed", error=words, goesOn="with the one before")
                told = words
