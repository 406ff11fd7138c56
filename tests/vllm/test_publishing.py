"""Checkpoints published from tensors of torch, read by the guard's own code and by safetensors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from devtools import vllm_venv
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_trainer.checkpoints import manifest_of

ROOT = Path(__file__).resolve().parents[2]


def test_torchs_tensors_are_stored_as_they_are_pushed(tmp_path: Path) -> None:
    told = subprocess.run(
        [str(vllm_venv.venv_path() / "bin" / "python"), "-m", "tests.vllm.publisher", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    found = json.loads(told)
    # A recovery checkpoint must have the digest of the push that it is of, whichever of the two gave the tensors.
    assert found["state"] == found["named"] == found["pushed"]
    assert found["other"] == found["otherPushed"]
    spread, meta, sparse, empty = found["refused"]
    assert "full_tensor()" in spread
    assert "device meta" in meta
    assert "only dense" in sparse
    assert "is empty" in empty
    for step in ("state", "named", "other", "gathered"):
        folder = tmp_path / f"step-{step}"
        manifest = manifest_of(folder)
        assert manifest is not None
        model = ModelTensors({name: (each.dtype, each.shape) for name, each in manifest.tensors.items()}, tied=False)
        staged = stage_checkpoint(tmp_path, f"step-{step}", model)
        staged.close()
        assert staged.digest == found[step]
    state = manifest_of(tmp_path / "step-state")
    assert state is not None
    assert state.tied == {"head.weight": "embed.weight"}
