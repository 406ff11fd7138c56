"""Several workers: each holds a part of every layer, and each is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm_engine import CallError, VllmEngine
from tests.vllm.conftest import assert_serves, update
from tests.vllm.test_failures import fail, recover_with

WORKERS = 2
# Without it vLLM wants a NUMA node per worker: one core for each instead.
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_workers_take_an_update_fail_and_recover_together(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with VllmEngine(models / "base", log, ONE_CORE_EACH, tensor_parallel_size=WORKERS) as engine:
        assert engine.call("facts")["world_size"] == WORKERS
        done = update(engine, models / "step-1", 1)
        assert done["layers"] == WORKERS * (2 * 8 + 3)
        assert_serves(engine, models / "step-1")
        error = fail(engine, models / "step-2", fault="omit", tensor="model.layers.1.self_attn.k_proj.weight")
        assert error.reason == "CoverageFailed"
        assert "worker 0: layer model.layers.1.self_attn.qkv_proj" in error.message
        assert [report["rank"] for report in engine.call("reports")] == [0, 1]
        recover_with(engine, models / "step-3")


def test_c17_a_push_reaches_every_worker_under_its_own_rank(models: Path, tmp_path: Path) -> None:
    """Two workers are ranks 1 and 2 of a group of three; what one lacks is told with its number."""
    log = tmp_path / "vllm.log"
    with VllmEngine(models / "base", log, ONE_CORE_EACH, tensor_parallel_size=WORKERS) as engine:
        for backend, version in (("gloo", 1), ("shm", 2)):
            engine.call("pause")
            done = engine.call("push", backend=backend, path=str(models / f"step-{version}"), version=version)
            assert done["layers"] == WORKERS * (2 * 8 + 3)
            engine.call("reset_caches")
            engine.call("resume")
            assert_serves(engine, models / f"step-{version}")
        engine.call("pause")
        with pytest.raises(CallError) as raised:
            engine.call(
                "push",
                backend="gloo",
                path=str(models / "step-3"),
                version=3,
                omit=["model.layers.1.mlp.up_proj.weight"],
            )
        assert "CoverageFailed: worker 0: tensor model.layers.1.mlp.up_proj.weight" in raised.value.message
        recover_with(engine, models / "step-3")
        engine.call("pause")
        engine.call("sleep", level=1)
        engine.call("wake", tags=["weights"])
        engine.call("wake", tags=["kv_cache"])
        assert engine.call("is_paused"), "waking resumes nothing"
        engine.call("resume")
        assert_serves(engine, models / "step-3")
