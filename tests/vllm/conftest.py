"""One engine for all tests of this folder: each leaves it serving version 0 with its weights whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny import expected, tiny_model
from tests.support.vllm_engine import VllmEngine

# An engine starts in 17 s on two idle cores.
TEST_TIMEOUT_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model in two shards, so that nothing a test does reaches the cache."""
    target = tmp_path_factory.mktemp("tiny") / "models"
    shutil.copytree(tiny_model("--checkpoints", "3", "--shards", "2"), target)
    return target


@pytest.fixture(scope="session")
def shared_engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with VllmEngine(models / "base", tmp_path_factory.mktemp("engine") / "vllm.log") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: VllmEngine, models: Path) -> Iterator[VllmEngine]:
    yield shared_engine
    shared_engine.call("recover")
    update(shared_engine, models / "base", 0)


@pytest.fixture
def broken(models: Path, tmp_path: Path) -> Path:
    """A copy of step-1 to damage."""
    return Path(shutil.copytree(models / "step-1", tmp_path / "step-1"))


def update(engine: VllmEngine, checkpoint: Path, version: int) -> dict[str, object]:
    """Pause, transfer, drop caches, resume: what the guard does."""
    engine.call("pause")
    done: dict[str, object] = engine.call("update", path=str(checkpoint), version=version)
    engine.call("reset_caches")
    engine.call("resume")
    return done


def assert_serves(engine: VllmEngine, checkpoint: Path) -> None:
    """Every known prompt gets the answer that this checkpoint gives, to the last token."""
    for each in expected(checkpoint)["prompts"]:
        answer = engine.call("generate", prompt=each["promptTokenIds"], count=len(each["tokenIds"]))
        assert answer["tokens"] == each["tokenIds"]
        assert answer["finish"] == "length"
