"""RolloutFleet.publish on all ranks of a sharded trainer: shards are gathered on both, and both hear how it ended."""

import json
import subprocess
from pathlib import Path

import pytest

from devtools import vllm_venv
from rollfleet_trainer.checkpoints import published
from tests.contract.process import ROOT
from tests.support.ports import free_port


def test_all_ranks_gather_and_hear_the_same_end(tmp_path: Path) -> None:
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    store = f"tcp://127.0.0.1:{free_port()}"
    path = f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}"
    module = "tests.contract.sharded_copies_process"
    ranks = [
        subprocess.Popen(
            [str(venv / "bin" / "python"), "-m", module, str(rank), store, str(tmp_path)],
            cwd=ROOT,
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = []
    try:
        for process in ranks:
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
            told.append(json.loads(said.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    [copy] = published(tmp_path)
    for rank, (first, failed, again, *_) in enumerate(told):
        assert first == {"path": "step-1", "digest": copy.digest, "tensors": 6, "recovers": None}
        assert "has characters that cannot be shown" in failed["error"]
        assert failed["type"] == ("TrainerError" if rank else "TensorError")
        assert again == first | {"recovers": 7}
    assert told[1][-1] == {"error": "retain is for rank 0"}
