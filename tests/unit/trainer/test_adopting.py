"""Directories as other trainers' savers write them: refused while half written, adopted when whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollfleet_engine.tools.checkpoint_files import RawTensor, write_checkpoint
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.layout import INDEX
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_protocol.manifest import MANIFEST
from rollfleet_trainer import adopting
from rollfleet_trainer.adopting import adopt
from rollfleet_trainer.checkpoints import manifest_of
from rollfleet_trainer.errors import CheckpointNotReadyError, PublishError
from rollfleet_trainer.publishing import publish
from tests.support.publishing import Arrays, CountedFiles, CrashError, read_as_engines_do


def write(folder: Path, weights: Arrays, shards: int) -> None:
    write_checkpoint(
        folder, {name: RawTensor("F32", each.shape, each.tobytes()) for name, each in weights.items()}, shards
    )


def slime(folder: Path, weights: Arrays) -> Iterator[str]:
    """Each state of the folder that its saver shows: config, numbered shards, renamed shards, the index in place."""
    write(folder.with_name("whole"), weights, 3)
    whole = sorted(folder.with_name("whole").glob("*.safetensors"))
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    yield "config"
    for number, path in enumerate(whole, start=1):
        raw = path.read_bytes()
        for part in (raw[: len(raw) // 2], raw):
            (folder / f"model-{number:05d}.safetensors").write_bytes(part)
            yield f"shard {number} with {len(part)} bytes"
    for number, path in enumerate(whole, start=1):
        (folder / f"model-{number:05d}.safetensors").rename(folder / path.name)
        yield f"shard {number} renamed"
    index = (folder.with_name("whole") / INDEX).read_text(encoding="utf-8")
    for end in (0, 1, len(index) // 2, len(index) - 1):
        (folder / INDEX).write_text(index[:end], encoding="utf-8")
        yield f"index with {end} characters"
    (folder / INDEX).write_text(index, encoding="utf-8")


def test_slimes_folders_are_refused_until_their_index_is_whole(
    root: Path, model: ModelTensors, weights: Arrays
) -> None:
    root.mkdir()
    folder = root / "weight_v000042"
    for state in slime(folder, weights):
        assert read_as_engines_do(root, "weight_v000042", model) == "", state
        with pytest.raises(CheckpointNotReadyError, match="is not whole"):
            adopt(root, "weight_v000042", step=42)
        assert not (folder / MANIFEST).exists()
    digest = read_as_engines_do(root, "weight_v000042", model)
    made = adopt(root, "weight_v000042", step=42)
    assert made.digest == digest == read_as_engines_do(root, "weight_v000042", model)
    assert made.digest == publish(root, weights, step=1).digest
    manifest = manifest_of(folder)
    assert manifest is not None
    assert (manifest.step, set(manifest.files)) == ("42", {"config.json", INDEX})
    assert adopt(root, "weight_v000042", step="again").created_ns == made.created_ns


def test_differences_are_no_weights(root: Path, model: ModelTensors, weights: Arrays) -> None:
    write(root / "weight_v000002", weights, 2)
    path = root / "weight_v000002" / INDEX
    index = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(index | {"metadata": {"delta_encoding": "xor"}}), encoding="utf-8")
    with pytest.raises(PublishError, match="differences to another version"):
        adopt(root, "weight_v000002", step=2)
    with pytest.raises(CheckpointError, match="differences to another version"):
        stage_checkpoint(root, "weight_v000002", model)


def test_a_marker_is_waited_for(root: Path, weights: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """As prime-rl: one file, then STABLE."""
    folder = root / "broadcasts" / "step_5"
    write(folder, weights, 1)
    with pytest.raises(CheckpointNotReadyError, match="STABLE is not there"):
        adopt(root, "broadcasts/step_5", step=5, marker="broadcasts/step_5/STABLE")
    looked = threading.Event()
    sleep = adopting.time.sleep

    def look(seconds: float) -> None:
        looked.set()
        sleep(seconds)

    monkeypatch.setattr(adopting, "LOOK_S", 0.01)
    monkeypatch.setattr(adopting.time, "sleep", look)

    def finish() -> None:
        assert looked.wait(10)
        (folder / "STABLE").touch()

    thread = threading.Thread(target=finish)
    thread.start()
    made = adopt(root, "broadcasts/step_5", step=5, marker="broadcasts/step_5/STABLE", wait_s=10)
    thread.join(10)
    assert made.path == "broadcasts/step_5"
    assert made.tensors == len(weights)


def test_two_adopt_the_same(root: Path, model: ModelTensors, weights: Arrays) -> None:
    write(root / "global_step_3/actor/huggingface", weights, 2)
    barrier = threading.Barrier(2)
    found: list[str] = []

    def run() -> None:
        barrier.wait(10)
        found.append(adopt(root, "global_step_3/actor/huggingface", step=3).digest)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [read_as_engines_do(root, "global_step_3/actor/huggingface", model)] * 2


def test_whoever_dies_while_adopting_is_followed_by_another(root: Path, model: ModelTensors, weights: Arrays) -> None:
    def die() -> None:
        raise CrashError

    for step in range(1, 5):
        write(root / "a", weights, 2)
        with pytest.raises(CrashError):
            adopt(root, "a", step=1, files=CountedFiles(step, die))
        # Half a manifest is refused; a missing one is as before; a whole one holds.
        assert read_as_engines_do(root, "a", model) in ("", adopt(root, "a", step=1).digest)
        assert read_as_engines_do(root, "a", model)
        assert [path.name for path in (root / "a").iterdir() if path.name.endswith(".part")] == []
        shutil.rmtree(root / "a")


@pytest.mark.parametrize(
    "how", [lambda raw: raw + b"x", lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"\xff" * 50]
)
def test_files_that_are_not_whole(root: Path, weights: Arrays, how: Callable[[bytes], bytes]) -> None:
    write(root / "a", weights, 2)
    path = sorted((root / "a").glob("*.safetensors"))[-1]
    path.write_bytes(how(path.read_bytes()))
    with pytest.raises(CheckpointNotReadyError, match=path.name):
        adopt(root, "a", step=1)


def test_a_saver_that_is_still_at_it(root: Path, weights: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root / "a", weights, 2)
    path = sorted((root / "a").glob("*.safetensors"))[-1]
    whole = adopting._wait_whole

    def then_written(folder: Path, marker: Path | None, deadline: float) -> object:
        found = whole(folder, marker, deadline)
        path.touch()
        return found

    monkeypatch.setattr(adopting, "_wait_whole", then_written)
    with pytest.raises(PublishError, match="changed while it was read"):
        adopt(root, "a", step=1)
    assert not (root / "a" / MANIFEST).exists()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_bytes(b'{"weight_map": ' + b"[" * 200_000)


def large(path: Path) -> None:
    os.truncate(path, adopting.LARGEST_INDEX + 1)


@pytest.mark.parametrize("name", [INDEX, "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize("how", [pipe, endless, deep, large])
def test_files_that_are_none_hold_nobody_up(
    root: Path, weights: Arrays, name: str, how: Callable[[Path], None]
) -> None:
    write(root / "weight_v000007", weights, 2)
    assert (root / "weight_v000007" / name).exists()
    how(root / "weight_v000007" / name)
    with pytest.raises(PublishError, match=r"is not a regular file|is not whole|more than"):
        adopt(root, "weight_v000007", step=7)


def test_pipes_beside_the_weights_are_not_read(root: Path, model: ModelTensors, weights: Arrays) -> None:
    write(root / "weight_v000007", weights, 2)
    os.mkfifo(root / "weight_v000007" / "progress")
    (root / "weight_v000007" / "log").symlink_to("/dev/zero")
    made = adopt(root, "weight_v000007", step=7)
    assert read_as_engines_do(root, "weight_v000007", model) == made.digest


def test_a_folder_that_is_not_there(root: Path) -> None:
    with pytest.raises(CheckpointNotReadyError, match="is not there"):
        adopt(root, "nothing", step=1)
    with pytest.raises(ValueError, match="must be relative"):
        adopt(root, "../nothing", step=1)


def test_a_folder_that_a_saver_has_used_again_is_adopted_again(
    root: Path, model: ModelTensors, weights: Arrays
) -> None:
    write(root / "a", weights, 2)
    first = adopt(root, "a", step=1)
    write(root / "a", {name: each + 1 for name, each in weights.items()}, 2)  # of the same sizes
    for path in (root / "a").glob("*.safetensors"):
        os.utime(path, ns=(first.created_ns, first.created_ns + 10**9))  # clocks of file systems go in steps
    with pytest.raises(CheckpointError, match="publish it again"):
        stage_checkpoint(root, "a", model)
    again = adopt(root, "a", step=2)
    assert again.digest != first.digest
    assert read_as_engines_do(root, "a", model) == again.digest
