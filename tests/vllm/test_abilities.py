"""What the adapter sees of a vLLM not started as ours are; of ours tells tests/contract/test_capabilities.py."""

from __future__ import annotations

from pathlib import Path

from rollfleet_engine.guard.adapting import BY_WORKERS, CAPABILITIES, SLEEPS
from tests.support.vllm_engine import VllmEngine


def test_c23_an_engine_without_our_workers_takes_no_weights(models: Path, tmp_path: Path) -> None:
    """On a CPU it does not sleep either: that is our workers' doing."""
    with VllmEngine(models / "base", tmp_path / "vllm.log", worker_extension_cls="") as plain:
        assert plain.call("facts")["capabilities"] == []
        seen = plain.call("look")
    assert set(seen["lacking"]) == {*BY_WORKERS, *SLEEPS}
    assert all("rollfleet_report" in why for why in seen["lacking"].values())
    assert set(seen["capabilities"]) == set(CAPABILITIES) - {*BY_WORKERS, *SLEEPS}
