"""Backend ipc without NPUs, over a stand-in of torch_npu: real vLLM's layers, and trainers of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path
from tests.support.stand_in import stand_in
from tests.support.vllm_engine import CallError, VllmEngine
from tests.vllm.conftest import assert_serves

STAND_IN = ":".join((source_path(), *map(str, stand_in())))


def test_real_layers_take_what_came_by_ipc(models: Path, tmp_path: Path) -> None:
    """In many calls, so that a layer waits for tensors of a later one; and what is left out is told by name."""
    with VllmEngine(models / "base", tmp_path / "vllm.log", {"PYTHONPATH": STAND_IN}) as engine:
        for version in (1, 2):
            engine.call("pause")
            done = engine.call("push", backend="ipc", path=str(models / f"step-{version}"), version=version)
            assert done["layers"] == 2 * 8 + 3
            engine.call("reset_caches")
            engine.call("resume")
            assert_serves(engine, models / f"step-{version}")
        engine.call("pause")
        missing = ["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(CallError, match=r"CoverageFailed: .*up_proj"):
            engine.call("push", backend="ipc", path=str(models / "step-3"), version=3, omit=missing)


def told_by(module: str) -> list[Any]:
    """The lines of JSON that it prints."""
    command = [str(vllm_venv.ensure() / "bin" / "python"), "-m", module]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{STAND_IN}", "VLLM_CONFIGURE_LOGGING": "0"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith(("[", "{"))]


def test_each_worker_reads_from_the_rank_on_its_own_npu_and_a_failure_is_everybody_s() -> None:
    whole, elsewhere, broken, unlike = told_by("tests.vllm.ipc_ranks")
    digests = {each["digest"] for each in whole} | set(whole[0]["workers"])
    assert len(digests) == 1
    assert len(whole[0]["workers"]) == 3
    for each in elsewhere:
        assert "worker 1: ipc: this worker is on NPU 127.0.0.1-1" in each["error"]
        assert "handles are for 127.0.0.1-0, 127.0.0.1-5" in each["error"]
    assert broken[0]["error"].startswith("TransferError: rank 1 of the trainer: NotImplementedError: ")
    assert broken[1]["error"].startswith("NotImplementedError: ")
    assert all("ranks disagree about names" in each["error"] for each in unlike)
    for each in (elsewhere, broken, unlike):
        assert each[0]["aborted"], "the engine is told"


@pytest.mark.skipif("VLLM_ASCEND" not in os.environ, reason="needs a checkout: make check-ascend VLLM_ASCEND=PATH")
def test_vllm_ascend_s_own_trainer_needs_no_pickle() -> None:
    [found] = told_by("tests.vllm.their_trainer")
    assert found["each"] == {"calls": 1, "digest": found["sent"]}
    assert found["packed"] == {"calls": 2, "digest": found["sent"]}
