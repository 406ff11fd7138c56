"""Updates from checkpoints: exact outputs, digests, coverage, caches, probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.staging import stage_checkpoint
from tests.support.tiny import expected, tiny_model
from tests.support.vllm_engine import VllmEngine
from tests.vllm.conftest import assert_serves, update

# Two programs sum float32 in different orders; seen: 4e-6. Between versions the difference is above 0.1.
PROBE_TOLERANCE = 1e-4


def test_starts_with_the_model_s_own_weights(engine: VllmEngine, models: Path) -> None:
    assert_serves(engine, models / "base")


def test_each_checkpoint_gives_exactly_its_own_output(engine: VllmEngine, models: Path) -> None:
    for version in (1, 2, 3, 1):
        update(engine, models / f"step-{version}", version)
        assert_serves(engine, models / f"step-{version}")
        assert engine.call("weight_version") in (str(version), "none kept")


def test_workers_report_the_staged_digest_and_every_layer(engine: VllmEngine, models: Path) -> None:
    done = update(engine, models / "step-1", 1)
    staged = stage_checkpoint(models, "step-1", read_model_tensors(models / "base"))
    staged.close()
    [report] = engine.call("reports")
    assert report["digest"] == done["digest"] == staged.digest
    assert done["tensors"] == len(staged.tensors)
    assert done["bytes"] == staged.nbytes
    # Per transformer layer qkv, o, gate_up, down and 4 norms; embedding, last norm, head.
    assert done["layers"] == 2 * 8 + 3
    assert set(done["phase_seconds"]) == {"init", "start", "update", "finish"}  # type: ignore[call-overload]


def test_first_request_after_an_update_finds_nothing_cached(engine: VllmEngine, models: Path) -> None:
    """C03: prompt prefixes are never answered from the old weights' cache."""
    long = max(expected(models / "base")["prompts"], key=lambda each: len(each["promptTokenIds"]))
    for _ in range(2):
        before = engine.call("generate", prompt=long["promptTokenIds"], count=4)
    assert before["cached"] > 0
    update(engine, models / "step-2", 2)
    after = engine.call("generate", prompt=long["promptTokenIds"], count=4)
    assert after["cached"] == 0
    again = next(
        each for each in expected(models / "step-2")["prompts"] if each["promptTokenIds"] == long["promptTokenIds"]
    )
    assert after["tokens"] == again["tokenIds"][:4]


@pytest.mark.parametrize("folder", ["base", "step-3"])
def test_probe_agrees_with_another_implementation(engine: VllmEngine, models: Path, folder: str) -> None:
    if folder != "base":
        update(engine, models / folder, 3)
    probe = expected(models / folder)["probe"]
    found = engine.call("probe", tokens=probe["tokens"])
    assert found == pytest.approx(probe["logprobs"], abs=PROBE_TOLERANCE)
    assert len(found) == len(probe["tokens"]) - 1
    assert engine.call("probe", tokens=probe["tokens"]) == found


def test_tied_heads_are_covered_without_false_alarm(tmp_path: Path) -> None:
    models = tiny_model("--checkpoints", "1", "--tied")
    with VllmEngine(models / "base", tmp_path / "vllm.log") as engine:
        assert_serves(engine, models / "base")
        done = update(engine, models / "step-1", 1)
        assert_serves(engine, models / "step-1")
    assert done["layers"] == 2 * 8 + 2
