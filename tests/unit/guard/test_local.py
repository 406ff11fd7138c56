"""The preStop hook and the socket that it speaks to."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollfleet_engine import prestop
from rollfleet_engine.guard.local import LONGEST_LINE, SOCKET_NAME, DrainSocket
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig
from tests.support.guards import Guarded, make_config


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return make_config(run_dir=str(tmp_path / "run"), drain_timeout_seconds=1)


@pytest.fixture
async def socket_path(guarded: Guarded, config: EngineConfig) -> AsyncIterator[Path]:
    server = DrainSocket(guarded.service, config)
    await server.start()
    yield Path(config.run_dir) / SOCKET_NAME
    await server.stop()


async def ask(path: Path, line: bytes) -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(line)
    writer.write_eof()
    answer = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return answer


async def test_only_the_containers_user_may_speak_to_it(socket_path: Path) -> None:
    assert stat.S_IMODE((await asyncio.to_thread(socket_path.stat)).st_mode) == 0o600


async def test_the_hook_drains(
    guarded: Guarded,
    socket_path: Path,
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await guarded.serve_initial()
    monkeypatch.setenv(ENGINE_CONFIG_ENV, config.model_dump_json(by_alias=True))
    assert socket_path.name == SOCKET_NAME
    assert await asyncio.to_thread(prestop.main) == 0
    assert capsys.readouterr().out == "drained; 0 requests did not end by themselves\n"
    assert guarded.state.closed_reason == "Draining"


@pytest.mark.parametrize("line", [b"", b"\n", b"drain\n", b"[]\n", b'{"command": "open"}\n', b"x" * (2 * LONGEST_LINE)])
async def test_anything_else_is_refused(guarded: Guarded, socket_path: Path, line: bytes) -> None:
    await guarded.serve_initial()
    assert "error" in await ask(socket_path, line)
    assert guarded.state.gate == "Open"


async def test_a_socket_left_behind_is_replaced(guarded: Guarded, config: EngineConfig) -> None:
    path = Path(config.run_dir) / SOCKET_NAME
    path.parent.mkdir()
    path.write_text("left behind")
    server = DrainSocket(guarded.service, config)
    await server.start()
    assert await ask(path, b'{"command": "drain"}\n') == {"cut": 0}
    await server.stop()
    assert not path.exists()


def test_without_a_guard_there_is_nothing_to_drain(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_CONFIG_ENV, config.model_dump_json(by_alias=True))
    assert prestop.main() == 0


def test_a_guard_that_is_gone_is_told(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENGINE_CONFIG_ENV, config.model_dump_json(by_alias=True))
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / SOCKET_NAME).write_text("no socket")
    assert prestop.main() == 1
    assert "stopped without draining" in capsys.readouterr().err


def test_a_guard_that_hangs_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(TimeoutError):
            prestop.drain(tmp_path / "s", 0.05)


async def test_two_hooks_at_once_both_get_their_answer(guarded: Guarded, socket_path: Path) -> None:
    await guarded.serve_initial()
    line = b'{"command": "drain"}\n'
    assert await asyncio.gather(ask(socket_path, line), ask(socket_path, line)) == [{"cut": 0}, {"cut": 0}]
