"""The same engine calls as an update makes, bare: two vLLM servers without guard, pod or operator, called at once.

Uses vLLM's own development routes. The benchmark holds the checkpoint's files open, as the guard does in the product.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from examples.demo.environment import ROOT
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_engine.weights.transfer import CheckpointUpdate

START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
PROBE_TOKENS = (1, 2, 3, 5, 7, 11)
MODEL = "bare"


@dataclass(frozen=True)
class Engine:
    """A running server."""

    url: str
    process: asyncio.subprocess.Process


def _command(venv: Path, model: Path, port: int) -> list[str]:
    return [
        str(venv / "bin/python"),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"),
        *("--worker-extension-cls", "rollfleet_engine.vllm.worker.RollfleetWorkerExtension"),
        *("--weight-transfer-config", '{"backend": "rollfleet"}'),
    ]


@asynccontextmanager
async def engines(venv: Path, model: Path, count: int, first_port: int = 18100) -> AsyncIterator[list[Engine]]:
    """So many bare servers on this machine, healthy; ended afterwards."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}/engine:{ROOT}/kernels",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    running = []
    try:
        for port in range(first_port, first_port + count):
            process = await asyncio.create_subprocess_exec(
                *_command(venv, model, port),
                env=environment,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            running.append(Engine(f"http://127.0.0.1:{port}", process))
        await asyncio.gather(*(_healthy(engine) for engine in running))
        yield running
    finally:
        for engine in running:
            if engine.process.returncode is None:
                os.killpg(engine.process.pid, 9)
            await engine.process.wait()


async def _healthy(engine: Engine) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if engine.process.returncode is not None:
                raise RuntimeError(f"a bare vLLM ended with exit status {engine.process.returncode}")
            try:
                async with session.get(f"{engine.url}/health") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.25)
    raise TimeoutError(f"a bare vLLM was not healthy within {START_TIMEOUT_S} s")


async def _call(session: aiohttp.ClientSession, engine: Engine, path: str, body: Any = None) -> None:
    async with session.post(f"{engine.url}{path}", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {(await answer.text())[:500]}")


async def _update(session: aiohttp.ClientSession, engine: Engine, update: dict[str, Any], *, first: bool) -> None:
    report = {"method": "rollfleet_report"}
    await _call(session, engine, "/pause?mode=abort")
    if first:
        await _call(session, engine, "/init_weight_transfer_engine", {"init_info": {"type": "Checkpoint"}})
    await _call(session, engine, "/start_weight_update", {})
    await _call(session, engine, "/collective_rpc", report)
    await _call(session, engine, "/update_weights", {"update_info": update})
    await _call(session, engine, "/collective_rpc", report)
    await _call(session, engine, "/finish_weight_update", {})
    await _call(session, engine, "/collective_rpc", report)
    await _call(session, engine, "/reset_prefix_cache")
    await _call(session, engine, "/reset_mm_cache")
    await _call(session, engine, "/reset_encoder_cache")
    await _call(session, engine, "/resume")
    probe = {"model": MODEL, "prompt": list(PROBE_TOKENS), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    await _call(session, engine, "/v1/completions", probe)


async def update(running: list[Engine], staged: StagedCheckpoint, *, first: bool) -> float:
    """Seconds that all calls take, on all engines at once."""
    wire = CheckpointUpdate.of(staged).to_wire()
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        started = time.monotonic()
        await asyncio.gather(*(_update(session, engine, wire, first=first) for engine in running))
        return time.monotonic() - started
