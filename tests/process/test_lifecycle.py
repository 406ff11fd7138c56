"""Both ports of one process, for real: uvicorn, TLS, tokens, a certificate that changes, and the end."""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from rollfleet_engine.guard import lifecycle
from rollfleet_engine.guard.identity import ApiServerKeys, KeyRing, ServiceAccountVerifier
from rollfleet_engine.guard.lifecycle import Certificate
from rollfleet_engine.guard.middleware import GuardedApp
from rollfleet_protocol.commands import STATE_PATH
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import EngineState
from tests.support.certificates import write_certificate
from tests.support.guards import FLEET, TOKENS, eventually, make_config
from tests.support.memory_engine import MemoryApp, MemoryEngine, MemoryStager
from tests.support.ports import free_port
from tests.support.tokens import ISSUER, ApiServer, rsa_key, sign

KEY = rsa_key()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_certificate(tmp_path / "tls", FLEET.control_server_name)
    return make_config(
        tls_dir=str(tmp_path / "tls"),
        run_dir=str(tmp_path / "run"),
        bind_address="127.0.0.1",
        serving_port=free_port(),
        control_port=free_port(),
    )


class Lifespan(MemoryApp):
    """An engine's application with a lifespan, as FastAPI's."""

    def __init__(self, engine: MemoryEngine) -> None:
        super().__init__(engine)
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
            verifier=ServiceAccountVerifier(FLEET, tokens, KeyRing(source)),
        )
        settings = uvicorn.Config(
            self.app, host="127.0.0.1", port=config.serving_port, log_config=None, timeout_graceful_shutdown=1
        )
        self.server = _Server(settings)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Process"]:
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
        async with self.control() as client:
            answer = await client.get(STATE_PATH, extensions={"sni_hostname": FLEET.control_server_name})
            assert answer.status_code == 200, answer.text
            return EngineState.model_validate_json(answer.content)


async def test_both_ports_from_the_first_to_the_last(config: EngineConfig) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with Process(config).running() as process:
        serving = httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.serving_port}", trust_env=False)
        async with serving, process.control() as control:
            sni = {"extensions": {"sni_hostname": FLEET.control_server_name}}
            assert (await serving.get("/livez")).status_code == 200
            assert (await serving.post("/v1/completions")).status_code == 503
            assert (await control.get(STATE_PATH, headers={"Authorization": "Bearer x"}, **sni)).status_code == 401
            state = EngineState.model_validate_json((await control.get(STATE_PATH, **sni)).content)
            command = {"incarnation": state.incarnation, "epoch": 1, "version": 0}
            verify = command | {"probeTokens": TOKENS, "deadlineSeconds": 5}
            assert (await control.post("/rollfleet/v1/verify", json=verify, **sni)).status_code == 202
            poll = {"after": state.sequence + 1, "waitSeconds": 5}
            assert (await control.get(STATE_PATH, params=poll, **sni)).status_code == 200
            assert (await control.post("/rollfleet/v1/open", json=command, **sni)).status_code == 200
            answer = await serving.post("/v1/completions", json={})
            assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "0")
            assert (await serving.post("/pause")).status_code == 404
            assert (await control.post("/pause", **sni)).status_code == 409
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert process.inner.ended
    with pytest.raises(OSError, match=r"."):
        await asyncio.open_connection("127.0.0.1", config.control_port)
    assert await asyncio.to_thread(lambda: list(Path(config.run_dir).iterdir())) == []


async def test_the_control_port_speaks_tls_only(config: EngineConfig) -> None:
    async with Process(config).running(), httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"http://127.0.0.1:{config.control_port}{STATE_PATH}")


async def test_a_renewed_certificate_is_served_without_a_restart(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RELOAD_EVERY_S", 0.01)
    async with Process(config).running() as process:
        incarnation = (await process.state()).incarnation
        write_certificate(Path(config.tls_dir), FLEET.control_server_name)  # the old one is trusted no more

        async def is_served() -> bool:
            try:
                return (await process.state()).incarnation == incarnation
            except httpx.ConnectError:
                return False

        await eventually(is_served)


def test_a_pair_that_does_not_match_is_not_taken(tmp_path: Path) -> None:
    write_certificate(tmp_path, "one")
    certificate = Certificate(tmp_path)
    assert not certificate.reload()
    write_certificate(tmp_path / "other", "two")
    (tmp_path / "tls.crt").write_bytes((tmp_path / "other" / "tls.crt").read_bytes())
    with pytest.raises(OSError, match=r"."):
        certificate.reload()
    (tmp_path / "tls.key").write_bytes((tmp_path / "other" / "tls.key").read_bytes())
    assert certificate.reload()
    assert not certificate.reload()


@pytest.mark.parametrize("fault", ["no certificate", "port taken"])
async def test_an_engine_whose_guard_cannot_start_does_not_start(config: EngineConfig, fault: str) -> None:
    taken = socket.socket()
    if fault == "no certificate":
        (Path(config.tls_dir) / "tls.crt").unlink()
    else:
        taken.bind(("127.0.0.1", config.control_port))
        taken.listen()
    with taken:
        async with Process(config).running() as process:
            assert process.exited
    with pytest.raises(OSError, match=r"."):
        await asyncio.open_connection("127.0.0.1", config.serving_port)


async def test_a_control_port_that_dies_makes_the_engine_not_live(config: EngineConfig) -> None:
    async with Process(config).running() as process:
        assert process.app._parts is not None
        server = process.app._parts[0]._server
        assert server is not None
        server.should_exit = True
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.serving_port}", trust_env=False) as client:

            async def is_dead() -> bool:
                return (await client.get("/livez")).status_code == 503

            await eventually(is_dead)


async def test_without_lifespan_the_first_request_starts_the_guard(config: EngineConfig) -> None:
    process = Process(config)
    transport = httpx.ASGITransport(process.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answers = await asyncio.gather(*(client.post("/v1/completions") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {503}
    assert (await process.state()).closed_reason == "Starting"
    await process.app.stop()
