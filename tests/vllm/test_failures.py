"""Broken transfers: found by the workers, told with the tensor's or layer's name, and cured by the next good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm_engine import CallError, VllmEngine
from tests.vllm.conftest import assert_serves, update

# One tensor of a layer fused of three, one of a layer of its own, one of a layer padded beyond its tensor.
OMITTED = {
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.qkv_proj",
    "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj",
    "lm_head.weight": "lm_head",
}


def fail(engine: VllmEngine, checkpoint: Path, **fault: object) -> CallError:
    engine.call("pause")
    with pytest.raises(CallError) as raised:
        engine.call("update", path=str(checkpoint), version=1, **fault)
    return raised.value


def recover_with(engine: VllmEngine, checkpoint: Path) -> None:
    engine.call("recover")
    update(engine, checkpoint, 2)
    assert_serves(engine, checkpoint)


@pytest.mark.parametrize("tensor", OMITTED)
def test_c28_a_layer_that_got_less_than_at_the_start_fails_by_name(
    engine: VllmEngine, models: Path, tensor: str
) -> None:
    error = fail(engine, models / "step-1", fault="omit", tensor=tensor)
    assert engine.call("weight_version") != "1"
    assert error.reason == "CoverageFailed"
    assert OMITTED[tensor] in error.message
    assert " of " in error.message
    assert error.touched
    recover_with(engine, models / "step-2")


def test_a_file_that_changed_since_staging_is_not_read(engine: VllmEngine, broken: Path, models: Path) -> None:
    error = fail(engine, broken, fault="flip", tensor="model.norm.weight")
    assert error.reason == "CheckpointChanged"
    assert ".safetensors" in error.message
    recover_with(engine, models / "step-2")


def test_a_changed_byte_is_found_by_digest_and_never_applied(engine: VllmEngine, broken: Path, models: Path) -> None:
    """Size and time of modification as before: only the content differs."""
    error = fail(engine, broken, fault="flip-unnoticed", tensor="model.layers.0.mlp.up_proj.weight")
    assert error.reason == "DigestMismatch"
    assert "model.layers.0.mlp.up_proj.weight" in error.message
    assert ".safetensors" in error.message
    recover_with(engine, models / "step-2")


def test_c07_vllm_s_own_flag_does_not_block_the_next_update(engine: VllmEngine, models: Path) -> None:
    """C07: a broken update must not leave "a weight update is already active" behind."""
    fail(engine, models / "step-1", fault="omit", tensor="model.norm.weight")
    assert engine.call("reports")[0]["failure"]["reason"] == "CoverageFailed"
    engine.call("recover")
    [report] = engine.call("reports")
    assert (report["active"], report["failure"]) == (False, None)
    recover_with(engine, models / "step-3")


def test_a_call_that_outlasts_its_deadline_says_so(engine: VllmEngine, models: Path) -> None:
    error = fail(engine, models / "step-1", deadline_s=1e-6)
    assert error.reason == "DeadlineExceeded"
    assert error.touched
    recover_with(engine, models / "step-2")
