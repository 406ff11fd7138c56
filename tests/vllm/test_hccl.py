"""Backend hccl without NPUs, over the stand-in of tests/support/ascend: by itself, and in real workers of vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path
from tests.support.stand_in import stand_in
from tests.support.vllm_engine import CallError, VllmEngine
from tests.vllm.conftest import assert_serves
from tests.vllm.test_failures import recover_with
from tests.vllm.test_workers import ONE_CORE_EACH, WORKERS

STAND_IN = ":".join((source_path(), *map(str, stand_in())))
DEADLINE_S = 2.0  # as in hccl_scenes.py
LATE_S = 10.0  # of a machine that has other work: who waits without a deadline waits 20 s and more


def scene(name: str, folder: Path) -> list[str]:
    """What it printed."""
    command = [str(vllm_venv.ensure() / "bin" / "python"), "-m", "tests.vllm.hccl_scenes", name]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{STAND_IN}",
        "ROLLFLEET_TEST_HCCL_LOG": str(folder / "log"),
    }
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


def test_every_tensor_comes_bit_for_bit_in_buffers_of_every_size(tmp_path: Path) -> None:
    assert scene("every-form", tmp_path) == ["the same bytes"]
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("init") for line in lines) == 9, "trainer and two engines, three groups"


def test_a_trainer_that_does_not_join_holds_no_worker_and_what_joins_too_late_is_given_back(tmp_path: Path) -> None:
    first, last = scene("nobody-joins", tmp_path)
    seconds, _, words = first.partition(" ")
    assert DEADLINE_S <= float(seconds) < DEADLINE_S + LATE_S
    assert words == "hccl: rank 1 of 2 cannot join: no answer within 2 s"
    assert last == "given back"


def test_engines_that_do_not_join_are_told_of_and_told(tmp_path: Path) -> None:
    refused, told, silent, told_too = scene("no-engine-joins", tmp_path)
    assert float(refused.split()[0]) < LATE_S
    assert "engine-0: not today" in refused
    assert told.startswith('"the group did not form: an engine takes no more: engine-0: ')
    assert "not today" in told
    assert "the group of 2 ranks did not form: not done within 2 s" in silent
    assert told_too == '"the group did not form: not done within 2 s"'


def test_a_trainer_that_sends_nothing_holds_no_worker(tmp_path: Path) -> None:
    first, again, afterwards = scene("silent-trainer", tmp_path)
    seconds, _, words = first.partition(" ")
    assert float(seconds) < DEADLINE_S + LATE_S
    assert words.startswith("hccl: after 0 of 1048576 bytes: the trainer sent nothing for 1.8 s, up to the deadline")
    assert "init_weight_transfer_engine comes first" in again
    assert afterwards == "True"


def test_a_group_that_cannot_be_left_holds_no_worker_beyond_its_deadline(tmp_path: Path) -> None:
    joined, received = scene("hanging-destroy", tmp_path)
    seconds, _, words = joined.partition(" ")
    assert DEADLINE_S <= float(seconds) < DEADLINE_S + LATE_S
    assert "cannot join: no answer within 1 s" in words
    assert float(received) < DEADLINE_S + LATE_S


def test_ranks_beyond_the_group_and_a_library_that_is_not_there_are_told(tmp_path: Path) -> None:
    [ranks] = scene("wrong-ranks", tmp_path)
    assert "hccl: this engine's ranks are 2 to 3, the group has 3" in ranks
    engine, trainer = scene("no-library", tmp_path)
    assert "hccl: rank 1 of 2 cannot join: libhccl.so: cannot open shared object file" in engine
    assert "HCCL gives no id for a group: libhccl.so: cannot open shared object file" in trainer


def test_c17_a_push_reaches_every_worker_under_its_own_rank(models: Path, tmp_path: Path) -> None:
    """Two workers are ranks 1 and 2 of a group of three; what one lacks is told with its number."""
    log = tmp_path / "hccl"
    environment = ONE_CORE_EACH | {"PYTHONPATH": STAND_IN, "ROLLFLEET_TEST_HCCL_LOG": str(log)}
    with VllmEngine(models / "base", tmp_path / "vllm.log", environment, tensor_parallel_size=WORKERS) as engine:
        for version in (1, 2):
            engine.call("pause")
            done = engine.call("push", backend="hccl", path=str(models / f"step-{version}"), version=version)
            assert done["layers"] == WORKERS * (2 * 8 + 3)
            engine.call("reset_caches")
            engine.call("resume")
            assert_serves(engine, models / f"step-{version}")
        ranks = [line.split()[2] for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("init")]
        assert sorted(ranks) == sorted(["0", "1", "2"] * 2)
        engine.call("pause")
        with pytest.raises(CallError) as raised:
            engine.call(
                "push",
                backend="hccl",
                path=str(models / "step-3"),
                version=3,
                omit=["model.layers.1.mlp.up_proj.weight"],
            )
        assert "CoverageFailed: worker 0: tensor model.layers.1.mlp.up_proj.weight" in raised.value.message
        recover_with(engine, models / "step-3")
        assert_serves(engine, models / "step-3")
    lines = log.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("init") for line in lines) == sum(line.startswith("destroy") for line in lines) == 9
