"""Several workers: each holds a part of every layer, and each is asked."""

from __future__ import annotations

from pathlib import Path

from tests.support.vllm_engine import VllmEngine
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
