"""An engine's process in memory behind its real ports: uvicorn, TLS, tokens, a certificate."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import uvicorn

from rollfleet_engine.guard.identity import ServiceAccountVerifier
from rollfleet_engine.guard.keys import ApiServerKeys, KeyRing
from rollfleet_engine.guard.middleware import GuardedApp
from rollfleet_protocol.commands import STATE_PATH
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import EngineState
from tests.support.certificates import write_certificate
from tests.support.guards import FLEET, eventually, make_config
from tests.support.memory_engine import MemoryApp, MemoryEngine, MemoryStager
from tests.support.ports import free_port
from tests.support.tokens import ISSUER, ApiServer, rsa_key, sign

KEY = rsa_key()


def process_config(folder: Path) -> EngineConfig:
    """With a certificate and free ports."""
    write_certificate(folder / "tls", FLEET.control_server_name)
    return make_config(
        tls_dir=str(folder / "tls"),
        run_dir=str(folder / "run"),
        bind_address="127.0.0.1",
        serving_port=free_port(),
        control_port=free_port(),
    )


class Lifespan(MemoryApp):
    """An engine's application with a lifespan, as FastAPI's."""

    def __init__(self, engine: MemoryEngine) -> None:
        super().__init__(engine)
        self.state = SimpleNamespace()  # as Starlette's; vLLM leaves its server in it
        self.ended = False

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] != "lifespan":
            await super().__call__(scope, receive, send)
            return
        while not self.ended:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            self.ended = message["type"] == "lifespan.shutdown"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Process:
    """What runs in one engine process."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.exited = False
        self.engine = MemoryEngine()
        self.inner = Lifespan(self.engine)
        tokens = config.tokens.model_copy(update={"issuer": ISSUER, "ca_file": "", "token_file": ""})
        self.keys = ApiServer(first=KEY)
        source = ApiServerKeys(tokens, self.keys.transport())
        source._read_files = lambda: ("pod-token", ssl.create_default_context())  # type: ignore[method-assign]
        self.app = GuardedApp(
            self.inner,
            config=config,
            adapter_of=lambda _: self.engine,
            stager=MemoryStager(),
            verifier=ServiceAccountVerifier(config.audience, tokens, KeyRing(source)),
        )
        settings = uvicorn.Config(
            self.app, host="127.0.0.1", port=config.serving_port, log_config=None, timeout_graceful_shutdown=1
        )
        self.server = _Server(settings)
        self.inner.state.server = self.server

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Process"]:
        """From start to end."""
        serving = asyncio.create_task(self._serve())
        await eventually(lambda: self.server.started or serving.done())
        yield self
        self.server.should_exit = True
        await serving

    async def _serve(self) -> None:
        try:
            await self.server.serve()
        except SystemExit:  # how uvicorn tells that the application did not start
            self.exited = True

    def control(self) -> httpx.AsyncClient:
        """As the operator calls: by address, demanding the fleet's name and CA."""
        context = ssl.create_default_context(cafile=str(Path(self.config.tls_dir) / "tls.crt"))
        return httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.config.control_port}",
            verify=context,
            headers={"Authorization": f"Bearer {sign(KEY)}"},
            trust_env=False,
        )

    async def state(self) -> EngineState:
        """As the operator is told."""
        async with self.control() as client:
            answer = await client.get(STATE_PATH, extensions={"sni_hostname": FLEET.control_server_name})
            assert answer.status_code == 200, answer.text
            return EngineState.model_validate_json(answer.content)
