"""Staging: good checkpoints, every known way to be broken, and what it must never do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfleet_engine.weights import staging
from rollfleet_engine.weights.coverage import ModelTensors, read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.layout import INDEX, SINGLE
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_kernels.digest import TensorDigest, lanes_reference, version_digest
from rollfleet_protocol.state import FailureReason
from tests.support import damage


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def failure(root: Path, model: ModelTensors, relative: str = "step-1") -> CheckpointError:
    """Stage in vain; nothing may stay open."""
    before = open_files()
    with pytest.raises(CheckpointError) as raised:
        stage_checkpoint(root, relative, model)
    assert open_files() == before
    return raised.value


def test_every_tensor_is_digested_and_readable_again(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    seen: list[tuple[int, int]] = []
    staged = stage_checkpoint(root, "step-1", model, progress=lambda done, total: seen.append((done, total)))
    tensors = damage.read_tensors(checkpoint)
    try:
        assert {each.name for each in staged.tensors} == set(tensors)
        for each in staged.tensors:
            data = os.pread(staged.files[each.file].fd, each.nbytes, each.offset)
            assert data == tensors[each.name].data
            assert each.lanes == lanes_reference(data)
        lines = (TensorDigest(each.name, each.dtype, each.shape, each.lanes) for each in staged.tensors)
        assert staged.digest == version_digest(lines)
    finally:
        staged.close()
    assert seen[-1] == (staged.nbytes, staged.nbytes)
    assert seen == sorted(seen)


def test_files_stay_readable_when_the_folder_goes(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    staged = stage_checkpoint(root, "step-1", model)
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()
    assert all(os.pread(staged.files[each.file].fd, each.nbytes, each.offset) for each in staged.tensors)
    staged.close()
    assert failure(root, model).reason is FailureReason.CHECKPOINT_NOT_FOUND


def test_closing_twice_closes_nothing_of_others(root: Path, model: ModelTensors) -> None:
    before = open_files()
    staged = stage_checkpoint(root, "step-1", model)
    assert open_files() == before + 2
    staged.close()
    assert open_files() == before
    numbers = {file.fd for file in staged.files}
    others = [os.open("/dev/null", os.O_RDONLY) for _ in numbers]
    staged.close()
    assert numbers & set(others)
    for each in others:
        os.close(each)


def test_shards_do_not_change_the_digest(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    in_two = stage_checkpoint(root, "step-1", model)
    tensors = damage.read_tensors(checkpoint)
    for path in [*damage.shards(checkpoint), checkpoint / INDEX]:
        path.unlink()
    damage.write_checkpoint(checkpoint, dict(reversed(tensors.items())), 1)
    in_one = stage_checkpoint(root, "step-1", model)
    in_two.close()
    in_one.close()
    assert in_one.digest == in_two.digest


def test_versions_differ(root: Path, model: ModelTensors) -> None:
    one, other = stage_checkpoint(root, "step-1", model), stage_checkpoint(root, "base", model)
    one.close()
    other.close()
    assert one.digest != other.digest


INCOMPLETE = (damage.half_written, damage.missing_index, damage.missing_shard, damage.truncated_shard)
UNFIT = (damage.renamed_tensor, damage.missing_tensor, damage.wrong_shape, damage.wrong_dtype)


@pytest.mark.parametrize("breaking", INCOMPLETE)
def test_unfinished_checkpoints_name_the_file(
    root: Path, checkpoint: Path, model: ModelTensors, breaking: Callable[[Path], str]
) -> None:
    """C11: half-written, an index that names an absent shard, a truncated shard."""
    named = breaking(checkpoint)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INCOMPLETE
    assert named in error.message


@pytest.mark.parametrize("breaking", UNFIT)
def test_unfit_checkpoints_name_the_tensor(
    root: Path, checkpoint: Path, model: ModelTensors, breaking: Callable[[Path], str]
) -> None:
    named = breaking(checkpoint)
    error = failure(root, model)
    assert error.reason is FailureReason.COVERAGE_FAILED
    assert named in error.message


def test_a_renamed_tensor_is_named_with_its_file(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    damage.renamed_tensor(checkpoint, "model.norm.weight")
    message = failure(root, model).message
    assert "model.norm.weight: the model has it" in message
    assert "model.norm.weight.renamed in model-0000" in message


def test_missing_path(root: Path, model: ModelTensors) -> None:
    error = failure(root, model, "step-9")
    assert error.reason is FailureReason.CHECKPOINT_NOT_FOUND
    assert "step-9" in error.message


def test_a_file_in_place_of_a_folder(root: Path, model: ModelTensors) -> None:
    (root / "step-8").write_text("", encoding="utf-8")
    assert failure(root, model, "step-8").reason is FailureReason.CHECKPOINT_NOT_FOUND


@pytest.mark.parametrize("path", ["", "/etc", "../outside", "step-1/../../outside", "a\0b"])
def test_paths_that_could_leave_the_root(root: Path, model: ModelTensors, path: str) -> None:
    assert failure(root, model, path).reason is FailureReason.CHECKPOINT_INVALID


def test_links_out_of_the_root_are_refused(root: Path, checkpoint: Path, model: ModelTensors, tmp_path: Path) -> None:
    outside = Path(checkpoint.rename(tmp_path / "outside"))
    (root / "step-1").symlink_to(outside)
    assert failure(root, model).reason is FailureReason.CHECKPOINT_INVALID
    (root / "step-1").unlink()
    (root / "step-1").mkdir()
    for path in outside.iterdir():
        (root / "step-1" / path.name).symlink_to(path)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert "leads out of" in error.message
    staged = stage_checkpoint(root, "step-1", model, confined=False)
    staged.close()


def test_links_within_the_root_are_followed(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    blobs = root / "blobs"
    blobs.mkdir()
    for path in damage.shards(checkpoint):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    (root / "newest").symlink_to("step-1")
    staged = stage_checkpoint(root, "newest", model)
    staged.close()


def test_what_is_no_file_is_refused_without_hanging(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    last = damage.shards(checkpoint)[-1]
    last.unlink()
    os.mkfifo(last)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert last.name in error.message


def edit_index(checkpoint: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (checkpoint / INDEX).write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.update({"lm_head.weight": "model-00001-of-00002.safetensors"}), "does not hold tensor"),
        (lambda index: index.update({"more": "model-00001-of-00002.safetensors"}), "does not hold tensor more"),
        (lambda index: index.pop("lm_head.weight"), "does not name"),
        (lambda index: index.update({"lm_head.weight": "../outside.safetensors"}), "is not the name of a"),
        (lambda index: index.update({"lm_head.weight": "config.json"}), "is not the name of a"),
        (lambda index: index.update({"lm_head.weight": "a\0b.safetensors"}), "cannot be the name of a file"),
        (lambda index: index.update({"lm_head.weight": "\ud800.safetensors"}), "cannot be the name of a file"),
        (lambda index: index.clear(), "has no weight_map"),
    ],
)
def test_an_index_that_contradicts_the_shards(
    root: Path, checkpoint: Path, model: ModelTensors, change: Callable[[dict[str, str]], object], words: str
) -> None:
    edit_index(checkpoint, change)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert words in error.message


def test_a_tensor_in_two_shards(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    first, second = damage.shards(checkpoint)
    tensors = damage.read_tensors(checkpoint)
    damage.write_checkpoint(checkpoint / "rest", tensors, 1)
    (checkpoint / "rest" / SINGLE).replace(second)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert f"{first.name} and in {second.name}" in error.message


def test_an_index_still_empty(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    (checkpoint / INDEX).write_bytes(b"")
    assert failure(root, model).reason is FailureReason.CHECKPOINT_INCOMPLETE


def test_an_empty_folder(root: Path, model: ModelTensors) -> None:
    (root / "step-7").mkdir()
    assert failure(root, model, "step-7").reason is FailureReason.CHECKPOINT_INCOMPLETE


def test_a_file_that_grows_or_changes_meanwhile(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    last = damage.shards(checkpoint)[-1]
    before = open_files()

    def touch(_done: int, _total: int) -> None:
        os.utime(last)

    with pytest.raises(CheckpointError) as raised:
        stage_checkpoint(root, "step-1", model, progress=touch)
    assert raised.value.reason is FailureReason.CHECKPOINT_INCOMPLETE
    assert last.name in raised.value.message
    assert open_files() == before


def test_a_file_that_shrinks_meanwhile(
    root: Path, checkpoint: Path, model: ModelTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "HASH_THREADS", 1)
    for path in damage.shards(checkpoint):
        cut = path.stat().st_size - 8

    def shrink(_done: int, _total: int) -> None:
        os.truncate(path, cut)

    with pytest.raises(CheckpointError) as raised:
        stage_checkpoint(root, "step-1", model, progress=shrink)
    assert raised.value.reason is FailureReason.CHECKPOINT_INCOMPLETE
    assert path.name in raised.value.message


def test_cancelled_on_the_way(root: Path, model: ModelTensors) -> None:
    cancelled = threading.Event()
    before = open_files()
    with pytest.raises(CheckpointError) as raised:
        stage_checkpoint(root, "step-1", model, progress=lambda *_: cancelled.set(), cancelled=cancelled)
    assert raised.value.reason is FailureReason.CANCELLED
    assert open_files() == before


def test_large_and_small_checkpoints_get_the_same_digest(
    root: Path, model: ModelTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones are digested by the reference, large ones by the compiled kernel, both in pieces."""
    small = stage_checkpoint(root, "step-1", model)
    monkeypatch.setattr(staging, "COMPILE_WORTH_BYTES", 0)
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)
    large = stage_checkpoint(root, "step-1", model)
    small.close()
    large.close()
    assert large.digest == small.digest


def tie(folder: Path, *, tied: bool, text: bool = False) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (config.setdefault("text_config", {}) if text else config)["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("without_head", ["base", "step-1"])
@pytest.mark.parametrize("text", [False, True])
def test_a_tied_head_may_be_there_or_not(root: Path, without_head: str, text: bool) -> None:
    tie(root / "base", tied=True, text=text)
    damage.missing_tensor(root / without_head, "lm_head.weight")
    stage_checkpoint(root, "step-1", read_model_tensors(root / "base")).close()


def test_a_head_of_its_own_must_be_there(root: Path, checkpoint: Path, model: ModelTensors) -> None:
    damage.missing_tensor(checkpoint, "lm_head.weight")
    error = failure(root, model)
    assert error.reason is FailureReason.COVERAGE_FAILED
    assert "lm_head.weight" in error.message


def test_a_model_without_safetensors_cannot_be_compared_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=SINGLE):
        read_model_tensors(tmp_path)
