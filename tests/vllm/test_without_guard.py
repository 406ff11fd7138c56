"""What vLLM's own control routes leave unproved, shown on a server without a guard: docs/loops.md says so.

The server takes weights as vLLM's engine for NCCL does, by gloo (tests/bench/plain_transfer.py); the trainer is vLLM's
own HTTP client in the order of vLLM's examples. Tests are ordered: the last one ends the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from devtools import vllm_venv
from devtools.tiny_models import ROOT
from examples.demo.manifests import SERVED_NAME
from tests.bench.gaps import SAME
from tests.bench.plain_words import BACKEND
from tests.bench.probing import QUESTION, first_logprob
from tests.support.ports import free_port
from tests.support.tiny import source_path
from tests.vllm.plain_words import DIED

pytestmark = pytest.mark.skipif(
    vllm_venv.chosen_release() != vllm_venv.RELEASES[0], reason="the page is about 0.27.1; 0.23.0 has no such client"
)
START_S = 240.0
CALL_S = 60.0
UNANSWERED_S = 3.0  # an answer takes a tenth of it on a busy machine
PATHS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{source_path()}", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}


def python(*arguments: str) -> list[str]:
    return [str(vllm_venv.ensure() / "bin" / "python"), *arguments]


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "vllm.log"
    words = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(models / "base"),
        "--served-model-name",
        SERVED_NAME,
    ]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024"]
    words += ["--dtype", "float32", "--worker-extension-cls", "tests.bench.plain_transfer.PlainExtension"]
    words += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    environment = (
        os.environ | PATHS | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    )
    with log.open("w") as file:
        process = subprocess.Popen(python(*words), env=environment, stdout=file, stderr=file)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=CALL_S) as client:
            wait_healthy(client, process, log)
            yield client
    finally:
        process.terminate()
        process.wait(CALL_S)


def wait_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.25)
    raise AssertionError(f"not healthy within {START_S} s: {log.read_text()[-3000:]}")


def answer(server: httpx.Client, timeout_s: float = CALL_S) -> float:
    """The log-probability that tells by which weights."""
    found = first_logprob(server.post("/v1/completions", json=QUESTION, timeout=timeout_s).raise_for_status().json())
    assert found is not None
    return found


def push(server: httpx.Client, checkpoint: Path, *options: str) -> int:
    """The trainer's exit status: 0 where every call was answered by 200."""
    command = python("-m", "tests.vllm.plain_trainer", str(server.base_url), str(checkpoint), *options)
    return subprocess.run(command, env=os.environ | PATHS, check=False, timeout=2 * CALL_S).returncode


def test_a_started_engine_serves_its_folder_whatever_the_others_hold(server: httpx.Client, models: Path):
    """And an engine that has started again is one that has started."""
    started = answer(server)
    assert push(server, models / "step-1") == 0
    assert abs(answer(server) - started) > SAME
    assert push(server, models / "base") == 0
    assert answer(server) == pytest.approx(started, abs=SAME), "these were base's weights"


def test_a_push_that_leaves_tensors_out_is_a_success_and_is_served(server: httpx.Client, models: Path):
    assert push(server, models / "step-1") == 0
    whole = answer(server)
    assert push(server, models / "step-2") == 0
    assert push(server, models / "step-1", "--omit", "layers.0.mlp") == 0, "every call was answered by 200"
    assert abs(answer(server) - whole) > SAME, "served, and not the weights that the trainer has"


def test_anybody_pauses_a_server_and_nothing_ends_the_pause(server: httpx.Client):
    server.post("/pause").raise_for_status()
    with pytest.raises(httpx.ReadTimeout):
        answer(server, UNANSWERED_S)
    assert server.get("/is_paused").json() == {"is_paused": True}
    server.post("/resume").raise_for_status()
    answer(server)


def test_a_trainer_that_dies_leaves_a_paused_server_which_a_resume_ends(server: httpx.Client, models: Path):
    """Half of the tensors have come. Whoever resumes it is answered by 200, and its core does not live on."""
    assert push(server, models / "step-2", "--die") == DIED
    assert server.get("/is_paused").json() == {"is_paused": True}
    with pytest.raises(httpx.ReadTimeout):
        answer(server, UNANSWERED_S)
    server.post("/resume").raise_for_status()
    with pytest.raises((httpx.HTTPStatusError, httpx.TransportError)):
        answer(server)
