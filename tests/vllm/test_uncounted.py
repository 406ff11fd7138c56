"""A model whose layers could not be counted at the start: it serves, takes no update, and the attempt costs nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.vllm_engine import VllmEngine
from tests.vllm.conftest import assert_serves
from tests.vllm.test_failures import fail


def test_an_update_is_refused_before_anything_is_touched(models: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(models / "base", tmp_path / "base"))
    unfinished = base / "copy.tmp"
    unfinished.touch()  # somebody copies into the folder while the engine starts
    with VllmEngine(base, tmp_path / "vllm.log") as engine:
        engine.call("look")  # as the guard does at its start, which is when layers are counted on vLLM 0.23
        unfinished.unlink()
        error = fail(engine, models / "step-1")
        assert error.reason == "CoverageFailed"
        assert "copy.tmp" in error.message
        assert not error.touched
        engine.call("resume")
        assert_serves(engine, base)
