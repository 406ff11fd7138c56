"""Staging as the guard calls it, over real files."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.guard import checkpoints
from rollfleet_engine.guard.checkpoints import MOST_HANGING, CheckpointStager
from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.tools.tiny_model import make_simulated
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from rollfleet_protocol.commands import CheckpointRoot, CheckpointSource
from rollfleet_protocol.engine_config import ModelConfig
from rollfleet_protocol.state import FailureReason
from tests.support import damage
from tests.support.guards import MODEL_SOURCE, eventually, make_config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_simulated(tmp_path / "root", checkpoints=2, seed=0, shards=2)
    return tmp_path / "root"


def stager(root: Path, checkpoints_path: Path | None) -> CheckpointStager:
    model = ModelConfig(path=str(root / "base"), served_name="policy")
    return CheckpointStager(
        make_config(model=model, checkpoints_path=None if checkpoints_path is None else str(checkpoints_path))
    )


def ignore(done: int, total: int) -> None: ...


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_checkpoint_and_the_model_itself_are_staged(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    one = await stager(root, root).stage(CheckpointSource(path="step-1"), lambda *each: seen.append(each))
    model = await stager(root, root).stage(MODEL_SOURCE, ignore)
    assert one.digest != model.digest
    await eventually(lambda: seen[-1:] == [(one.nbytes, one.nbytes)])
    one.close()
    model.close()


@pytest.mark.parametrize(
    ("source", "reason", "text"),
    [
        (CheckpointSource(path="step-9"), FailureReason.CHECKPOINT_NOT_FOUND, "step-9"),
        (CheckpointSource(path="../root/step-1"), FailureReason.CHECKPOINT_INVALID, ".."),
        (CheckpointSource(root=CheckpointRoot.MODEL, path="x"), FailureReason.CHECKPOINT_INVALID, "only"),
    ],
)
async def test_what_cannot_be_staged_is_told(
    root: Path, source: CheckpointSource, reason: FailureReason, text: str
) -> None:
    with pytest.raises(EngineError, match=text) as raised:
        await stager(root, root).stage(source, ignore)
    assert raised.value.reason is reason
    assert not raised.value.touched


async def test_a_renamed_tensor_is_named(root: Path) -> None:
    damage.renamed_tensor(root / "step-1")
    with pytest.raises(EngineError, match=r"model\.norm\.weight") as raised:
        await stager(root, root).stage(CheckpointSource(path="step-1"), ignore)
    assert raised.value.reason is FailureReason.COVERAGE_FAILED


async def test_without_a_volume_the_field_to_set_is_named(root: Path) -> None:
    with pytest.raises(EngineError, match=r"spec\.volumes\.checkpoints"):
        await stager(root, None).stage(CheckpointSource(path="step-1"), ignore)


async def test_cancelled_it_lets_go_of_everything(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, reached, go_on = open_files(), threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> StagedCheckpoint:
        options.pop("cancelled")
        staged = stage_checkpoint(*arguments, **options)
        reached.set()
        assert go_on.wait(10)
        return staged

    monkeypatch.setattr(checkpoints, "stage_checkpoint", slow)
    staging = asyncio.create_task(stager(root, root).stage(CheckpointSource(path="step-1"), ignore))
    assert await asyncio.to_thread(reached.wait, 10)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    assert open_files() > before
    go_on.set()
    await eventually(lambda: open_files() == before)


async def test_a_file_system_that_hangs_is_not_asked_without_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(*arguments: Any, **options: Any) -> StagedCheckpoint:
        answers.wait(30)
        return stage_checkpoint(*arguments, **options)

    monkeypatch.setattr(checkpoints, "stage_checkpoint", hang)
    made, before = stager(root, root), open_files()
    for _ in range(MOST_HANGING):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.stage(CheckpointSource(path="step-1"), ignore), 0.01)
    with pytest.raises(EngineError, match=f"{MOST_HANGING} earlier tries still wait"):
        await made.stage(CheckpointSource(path="step-1"), ignore)
    answers.set()
    await eventually(lambda: not any(thread.is_alive() for thread in made._threads[root]))
    (await made.stage(CheckpointSource(path="step-1"), ignore)).close()
    await eventually(lambda: open_files() == before)


FORMS = {"w": ("F32", (1,))}


async def test_a_volume_that_hangs_holds_up_no_push(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own headers are known by then, and are of another volume where they are not."""
    answers = threading.Event()
    monkeypatch.setattr(checkpoints, "stage_checkpoint", lambda *_, **__: answers.wait(30))
    model = ModelTensors(FORMS, tied=False)
    monkeypatch.setattr(checkpoints, "read_model_tensors", lambda _: model)
    made = stager(tmp_path / "model", root)
    for _ in range(MOST_HANGING):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.stage(CheckpointSource(path="step-1"), ignore), 0.01)
    for _ in range(2):
        await made.judge(FORMS, whole=True)
    with pytest.raises(EngineError, match="tensor v: the model has no such tensor"):
        await made.judge({"v": ("F32", (1,))}, whole=False)
    answers.set()
    await eventually(lambda: not any(thread.is_alive() for thread in made._threads[root]))


async def test_a_model_that_hangs_is_not_asked_without_end_either(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(checkpoints, "read_model_tensors", lambda _: answers.wait(30))
    made = stager(root, None)
    for _ in range(MOST_HANGING):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.judge(FORMS, whole=False), 0.01)
    with pytest.raises(EngineError, match=f"{MOST_HANGING} earlier tries still wait"):
        await made.judge(FORMS, whole=False)
    answers.set()
    await eventually(lambda: not any(thread.is_alive() for thread in made._threads[root / "base"]))


async def test_what_comes_when_the_loop_has_ended_is_let_go_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends: nothing waits, and nothing is said."""
    answers, before = threading.Event(), open_files()

    def hang(*arguments: Any, **options: Any) -> StagedCheckpoint:
        answers.wait(30)
        return stage_checkpoint(*arguments, **options)

    monkeypatch.setattr(checkpoints, "stage_checkpoint", hang)
    made = stager(root, root)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.stage(CheckpointSource(path="step-1"), ignore), 0.01)

    ended = threading.Thread(target=asyncio.run, args=(give_up(),))
    ended.start()
    await asyncio.to_thread(ended.join)
    answers.set()
    await eventually(lambda: not any(thread.is_alive() for thread in made._threads[root]))
    assert open_files() == before
