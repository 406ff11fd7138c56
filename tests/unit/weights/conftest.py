"""A good checkpoint in two shards and the model that it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfleet_engine.tools.tiny_model import make_simulated
from rollfleet_engine.weights.coverage import ModelTensors, read_model_tensors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder with base and step-1."""
    make_simulated(tmp_path / "root", checkpoints=1, seed=0, shards=2)
    return tmp_path / "root"


@pytest.fixture
def checkpoint(root: Path) -> Path:
    return root / "step-1"


@pytest.fixture
def model(root: Path) -> ModelTensors:
    return read_model_tensors(root / "base")
