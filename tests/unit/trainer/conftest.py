"""A model, its tensors in new versions, and a volume for checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollfleet_engine.tools.tiny_model import make_simulated
from rollfleet_engine.weights.coverage import ModelTensors, read_model_tensors
from tests.support import damage
from tests.support.publishing import Arrays


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engines were started from."""
    out = tmp_path_factory.mktemp("model")
    make_simulated(out, checkpoints=0, seed=3)
    return out / "base"


@pytest.fixture(scope="session")
def model(base: Path) -> ModelTensors:
    """Which tensors a checkpoint must have."""
    return read_model_tensors(base)


@pytest.fixture(scope="session")
def weights(base: Path) -> Arrays:
    """A version of them."""
    numbers = np.random.default_rng(1)
    shapes = {name: each.shape for name, each in damage.read_tensors(base).items()}
    return {name: numbers.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The checkpoints volume."""
    return tmp_path / "checkpoints"
