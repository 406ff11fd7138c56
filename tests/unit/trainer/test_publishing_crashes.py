"""Whatever dies at whatever step, and whatever the disk has not kept then: readers refuse it, or it is complete."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_trainer.checkpoints import manifest_of, published
from rollfleet_trainer.publishing import publish
from tests.support.publishing import Arrays, CountedFiles, CrashError, LosingFiles, read_as_engines_do

SHARD_BYTES = 1500  # a few shards


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory, where a sync takes no time."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "checkpoints"


def steps_of(root: Path, weights: Arrays, base: Path) -> int:
    """How many there are."""
    counted = CountedFiles()
    publish(root, weights, step=7, assets=base, shard_bytes=SHARD_BYTES, files=counted)
    shutil.rmtree(root)
    return counted.steps


def require_all_or_nothing(root: Path, model: ModelTensors, digest: str) -> None:
    """Of every folder that is left, the hidden ones too, and by every reader."""
    for folder in root.iterdir() if root.exists() else ():
        found = read_as_engines_do(root, folder.name, model)
        manifest = manifest_of(folder)
        assert found in ("", digest)
        assert (manifest.digest if manifest is not None else "") == found
    assert {each.digest for each in published(root)} <= {digest}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_power_lost_at_any_step(
    data: st.DataObject, root: Path, model: ModelTensors, weights: Arrays, base: Path
) -> None:
    digest = publish(root, weights, step=7).digest
    shutil.rmtree(root)
    files = LosingFiles(data.draw(st.integers(1, 60), label="step"))
    try:
        publish(root, weights, step=7, assets=base, shard_bytes=SHARD_BYTES, files=files)
    except CrashError:
        assert files.stopped
    files.lose(lambda below: data.draw(st.integers(0, below - 1)))
    if not files.stopped:  # it returned, so it is there for good
        assert read_as_engines_do(root, "step-7", model) == digest
    require_all_or_nothing(root, model, digest)
    # Who comes after the crash is not hindered by what it left.
    again = publish(root, weights, step=7)
    assert again.digest == read_as_engines_do(root, "step-7", model) == digest
    shutil.rmtree(root)


def test_the_search_reaches_every_step(root: Path, weights: Arrays, base: Path) -> None:
    assert 30 < steps_of(root, weights, base) <= 60


def test_killed_at_every_step(root: Path, model: ModelTensors, weights: Arrays, base: Path) -> None:
    digest = publish(root, weights, step=7).digest
    shutil.rmtree(root)
    complete = 0
    steps = steps_of(root, weights, base)
    for step in range(1, steps + 1):
        child = os.fork()
        if child == 0:
            kill = CountedFiles(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
            publish(root, weights, step=7, assets=base, shard_bytes=SHARD_BYTES, files=kill)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        require_all_or_nothing(root, model, digest)
        complete += bool(published(root))
        shutil.rmtree(root, ignore_errors=True)
    assert 0 < complete < steps // 2


@pytest.mark.parametrize("step", [3, 15, 35])
def test_interrupted_by_hand_it_cleans_up(root: Path, weights: Arrays, base: Path, step: int) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(root, weights, step=7, assets=base, shard_bytes=SHARD_BYTES, files=CountedFiles(step, interrupt))
    assert not list(root.iterdir())
