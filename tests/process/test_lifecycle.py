"""Both ports of one process, for real: uvicorn, TLS, tokens, a certificate that changes, and the end."""

import asyncio
import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from rollfleet_engine.guard import lifecycle
from rollfleet_engine.guard.lifecycle import Certificate
from rollfleet_engine.weights.backends.registry import GROUP
from rollfleet_protocol.commands import STATE_PATH
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import EngineState
from tests.support.certificates import write_certificate
from tests.support.guard_process import Process, process_config
from tests.support.guards import FLEET, TOKENS, eventually


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return process_config(tmp_path)


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


async def test_a_broken_pair_is_told_once_and_the_one_before_serves_on(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lifecycle, "RELOAD_EVERY_S", 0.01)
    sni = {"extensions": {"sni_hostname": FLEET.control_server_name}}
    log = ""

    def told(event: str) -> int:
        nonlocal log
        log += capfd.readouterr().out
        return log.count(f'"event": "{event}"')

    async with Process(config).running() as process, process.control() as standing:
        assert (await standing.get(STATE_PATH, **sni)).status_code == 200
        trusting = process.control()
        good = {name: (Path(config.tls_dir) / name).read_bytes() for name in ("tls.crt", "tls.key")}
        (Path(config.tls_dir) / "tls.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\nhalf a")
        await eventually(lambda: told("certificate.reload_failed") > 0)
        async with trusting:  # a new handshake, by the chain before
            assert (await trusting.get(STATE_PATH, **sni)).status_code == 200
        assert told("certificate.reload_failed") == 1, "looked at again and again meanwhile"
        for name, content in good.items():
            (Path(config.tls_dir) / name).write_bytes(content)
        await eventually(lambda: told("certificate.reloaded") > 0)
        assert (await standing.get(STATE_PATH, **sni)).status_code == 200
        write_certificate(Path(config.tls_dir), FLEET.control_server_name)
        await eventually(lambda: told("certificate.reloaded") > 1)
        assert (await standing.get(STATE_PATH, **sni)).status_code == 200  # greeted by the one before, and stays
        assert len(standing._transport._pool.connections) == 1  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("fault", ["no certificate", "port taken", "unforeseen"])
async def test_an_engine_whose_guard_cannot_start_does_not_start(config: EngineConfig, fault: str) -> None:
    taken = socket.socket()
    if fault == "no certificate":
        (Path(config.tls_dir) / "tls.crt").unlink()
    elif fault == "port taken":
        taken.bind(("127.0.0.1", config.control_port))
        taken.listen()
    process = Process(config)
    if fault == "unforeseen":
        process.engine.failures["look"] = ZeroDivisionError("of an engine's own")
    with taken:
        async with process.running():
            assert process.exited
    with pytest.raises(OSError, match=r"."):
        await asyncio.open_connection("127.0.0.1", config.serving_port)


async def test_a_backend_of_others_that_cannot_run_is_told_and_stops_no_engine(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "plugin" / "plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    lines = f"[{GROUP}]\nshm = evil:Backend\ntheirs = rollfleet_test_no_driver:Backend\n"
    (metadata / "entry_points.txt").write_text(lines)
    (tmp_path / "plugin" / "rollfleet_test_no_driver.py").write_text("raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    async with Process(config).running() as process:
        assert (await process.state()).alive
    lines_told = [json.loads(line) for line in capfd.readouterr().out.splitlines() if "backend.left_out" in line]
    told = {line["backend"]: line["why"] for line in lines_told}
    assert "theirs" not in told  # nobody can name it: it is not imported
    assert "evil:Backend does not replace" in told["shm of plugin"]


async def test_what_an_engine_lacks_is_told_at_its_start_and_to_the_operator(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    process = Process(config)
    process.engine.lacking = {"pause/keep": "EngineCore.pause_scheduler has the modes abort, not keep"}
    async with process.running():
        capabilities = (await process.state()).facts.capabilities
    assert "pause/abort" in capabilities
    assert "pause/keep" not in capabilities
    assert '"event": "engine.lacks"' in (told := capfd.readouterr().out)
    assert "has the modes abort, not keep" in told


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


async def test_an_engine_whose_server_is_not_found_does_not_start(config: EngineConfig) -> None:
    """Nothing would bound what strangers send; no port is left open."""
    process = Process(config)
    del process.inner.state.server
    async with process.running():
        await eventually(lambda: process.exited)
    for port in (config.serving_port, config.control_port):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_without_lifespan_the_first_request_starts_the_guard(config: EngineConfig) -> None:
    process = Process(config)
    process.server.config.load()
    transport = httpx.ASGITransport(process.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answers = await asyncio.gather(*(client.post("/v1/completions") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {503}
    assert (await process.state()).closed_reason == "Starting"
    await process.app.stop()
