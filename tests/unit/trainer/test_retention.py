"""What is deleted, what never is, and what becomes of it where something dies or somebody is faster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_protocol.manifest import MANIFEST, FileRecord, decode, encode
from rollfleet_trainer import checkpoints, retention
from rollfleet_trainer.checkpoints import INDEX, manifest_of, published
from rollfleet_trainer.errors import PublishError
from rollfleet_trainer.publishing import publish
from rollfleet_trainer.retention import paths_in_use, retain
from tests.support.publishing import Arrays, CountedFiles, CrashError, read_as_engines_do


def make(root: Path, weights: Arrays, count: int, within: str = "") -> None:
    for step in range(1, count + 1):
        publish(root, weights, step=step, within=within)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def nobody() -> Collection[str]:
    return ()


def test_the_newest_stay(root: Path, weights: Arrays) -> None:
    make(root, weights, 5)
    done = retain(root, keep=2, in_use=nobody)
    assert [each.step for each in done.deleted] == ["1", "2", "3"]
    assert [each.step for each in done.kept] == ["4", "5"]
    assert names(root) == ["step-4", "step-5"]


def test_the_newest_is_the_one_that_was_published_last(root: Path, weights: Arrays) -> None:
    """A trainer that went back to an older step goes on from there."""
    for step in (30, 40, 10, 20):
        publish(root, weights, step=step)
    retain(root, keep=2, in_use=nobody)
    assert names(root) == ["step-10", "step-20"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 5),
    keep=st.integers(1, 6),
    used=st.sets(st.sampled_from(["step-1", "./step-2", "step-3/", "step-5", "gone"])),
)
def test_what_is_in_use_is_never_deleted(
    root: Path, model: ModelTensors, weights: Arrays, count: int, keep: int, used: set[str]
) -> None:
    make(root, weights, count)
    wanted = {path.strip("./") for path in used} & {f"step-{step}" for step in range(1, count + 1)}
    if used and not wanted:
        with pytest.raises(PublishError, match="holds nothing of what is in use"):
            retain(root, keep=keep, in_use=lambda: used)
        kept = {f"step-{step}" for step in range(1, count + 1)}
    else:
        done = retain(root, keep=keep, in_use=lambda: used)
        kept = wanted | {f"step-{step}" for step in range(max(1, count - keep + 1), count + 1)}
        assert {each.path for each in done.in_use} == wanted
        assert {each.path for each in done.deleted} == {f"step-{step}" for step in range(1, count + 1)} - kept
    assert {each.path for each in published(root)} == kept
    assert all(read_as_engines_do(root, path, model) for path in kept)
    for each in published(root):
        for path in each.folder.iterdir():
            path.unlink()
        each.folder.rmdir()


def test_links_and_folders_below_and_above(root: Path, weights: Arrays) -> None:
    make(root, weights, 4, within="runs/a")
    (root / "current").symlink_to("runs/a/step-1")
    retain(root, keep=1, within="runs/a", in_use=lambda: ["current", "runs/a/step-2/sub"])
    assert names(root / "runs" / "a") == ["step-1", "step-2", "step-4"]
    retain(root, keep=1, within="runs/a", in_use=lambda: ["runs"])
    assert names(root / "runs" / "a") == ["step-1", "step-2", "step-4"]


def test_what_is_not_ours_stays(root: Path, weights: Arrays) -> None:
    make(root, weights, 2)
    for other in ("base", "step-0", ".hidden", ".a.b.deleted-not"):
        (root / other).mkdir()
        (root / other / "model.safetensors").write_bytes(b"theirs")
    (root / "a-file").write_bytes(b"")
    retain(root, keep=1, in_use=nobody, abandoned_after_s=0)
    assert names(root) == [".a.b.deleted-not", ".hidden", "a-file", "base", "step-0", "step-2"]


def test_where_nobody_can_be_asked_nothing_is_deleted(root: Path, weights: Arrays) -> None:
    make(root, weights, 3)

    def away() -> Collection[str]:
        raise ConnectionError("the API server does not answer")

    with pytest.raises(ConnectionError, match="does not answer"):
        retain(root, keep=1, in_use=away)
    assert len(published(root)) == 3
    asked = iter([()])

    def away_later() -> Collection[str]:
        for answer in asked:
            return answer
        raise TimeoutError("the API server does not answer any more")

    with pytest.raises(TimeoutError, match="any more"):
        retain(root, keep=1, in_use=away_later)
    assert names(root) == ["step-1", "step-2", "step-3"]


def test_a_version_that_is_raised_at_the_same_moment_keeps_its_checkpoint(
    root: Path, model: ModelTensors, weights: Arrays
) -> None:
    make(root, weights, 3)
    answers = iter([[], ["step-1"], ["step-1"]])
    done = retain(root, keep=1, in_use=lambda: next(answers))
    assert [each.path for each in done.deleted] == ["step-2"]
    assert read_as_engines_do(root, "step-1", model)


def test_whoever_dies_while_deleting_loses_nothing_that_is_used(
    root: Path, model: ModelTensors, weights: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ASIDE_S", -1.0)

    def die() -> None:
        raise CrashError

    for step in (1, 2):
        make(root, weights, 3)
        with pytest.raises(CrashError):
            retain(root, keep=2, in_use=nobody, files=CountedFiles(step, die))
        assert (root / "step-1").exists() == (step == 1)
        assert read_as_engines_do(root, "step-2", model)
        # Somebody names it now: it comes back, if it had been taken aside.
        retain(root, keep=2, in_use=lambda: ["step-1"])
        assert names(root) == ["step-1", "step-2", "step-3"]
        assert read_as_engines_do(root, "step-1", model)
        with pytest.raises(CrashError):
            retain(root, keep=2, in_use=nobody, files=CountedFiles(step, die))
        retain(root, keep=2, in_use=nobody)
        assert names(root) == ["step-2", "step-3"]
        shutil.rmtree(root)


def test_working_folders_go_when_nobody_has_written_for_a_day(root: Path, weights: Arrays) -> None:
    make(root, weights, 1)
    for name, age in ((f".step-8.{'a' * 32}.part", 10), (f".step-9.{'b' * 32}.part", 100_000)):
        (root / name).mkdir()
        (root / name / "model-00001.safetensors").write_bytes(b"x")
        for path in (root / name / "model-00001.safetensors", root / name):
            os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    retain(root, keep=1, in_use=nobody)
    assert names(root) == [f".step-8.{'a' * 32}.part", "step-1"]


def test_a_root_that_is_not_the_volume_deletes_nothing(root: Path, weights: Arrays) -> None:
    make(root, weights, 3, within="mounted")
    with pytest.raises(PublishError, match=r"is it the fleet's volumes\.checkpoints"):
        retain(root / "mounted", keep=1, in_use=lambda: ["mounted/step-1"])
    assert len(published(root, within="mounted")) == 3


def test_keep_is_at_least_one(root: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        retain(root, keep=0, in_use=nobody)
    assert retain(root, keep=1, in_use=nobody).kept == ()


def test_by_whose_clock_something_is_old(root: Path, weights: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trainer whose clock is two days ahead everything would be old: what is being written or judged right now."""
    make(root, weights, 1)
    monkeypatch.setattr("time.time", lambda: 4e9)
    kept = [f".step-7.{'a' * 32}.deleted", f".step-8.{'b' * 32}.part"]
    for name in kept:
        (root / name).mkdir()
    retain(root, keep=1, in_use=nobody)
    assert names(root) == [*kept, "step-1"]


@pytest.mark.parametrize("within", ["..", "a/../..", "/etc", "a\0"])
def test_nothing_is_looked_at_outside(root: Path, weights: Arrays, within: str) -> None:
    outside = root.parent / f".step-8.{'b' * 32}.part"
    outside.mkdir()
    make(root, weights, 1)
    with pytest.raises(ValueError, match="within"):
        retain(root, keep=1, in_use=nobody, within=within, abandoned_after_s=-1)
    assert outside.exists()


def forged(folder: Path, **changes: Any) -> None:
    """A manifest that says something else, whole by its own sum."""
    manifest = decode((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(encode(replace(manifest, **changes)))


def test_what_somebody_left_there_stops_nobody(
    root: Path, weights: Arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Copies with names of unfinished ones, pipes, links in circles, names that are too long, folders of root's."""
    make(root, weights, 8)
    (root / "step-1").rename(root / "step-1.tmp")
    (root / "step-2" / MANIFEST).unlink()
    os.mkfifo(root / "step-2" / MANIFEST)
    (root / "step-3" / INDEX).unlink()
    (root / "step-3" / INDEX).symlink_to(INDEX)
    forged(root / "step-4", files={"\N{SNOWMAN}" * 200: FileRecord(size=1, sha256="0" * 64)})
    (root / "step-5" / MANIFEST).unlink()
    (root / "step-5" / MANIFEST).mkdir()

    def closed(folder: Path) -> Any:
        if folder.name == "step-6":
            raise PermissionError(13, "Permission denied", str(folder))
        return manifest_of(folder)

    monkeypatch.setattr(checkpoints, "manifest_of", closed)
    done = retain(root, keep=1, in_use=nobody)
    assert [each.path for each in done.deleted] == ["step-7"]
    assert [each.path for each in done.kept] == ["step-8"]
    assert len(names(root)) == 7


def test_the_model_that_engines_start_from_stays_where_it_is_on_the_same_volume(root: Path, weights: Arrays) -> None:
    """A run that began with a checkpoint of the run before: nothing but its fleet's spec names it."""
    make(root, weights, 3)
    (root / "step-1" / "config.json").write_text("{}", encoding="utf-8")
    volume = {"persistentVolumeClaim": {"claimName": "checkpoints"}}
    engine = {"spec": {"model": {"path": "step-1"}, "volumes": {"model": volume, "checkpoints": volume}}}
    used = paths_in_use([engine], [])
    retain(root, keep=1, in_use=lambda: used)
    assert names(root) == ["step-1", "step-3"]
    other = {"persistentVolumeClaim": {"claimName": "models"}}
    engine["spec"]["volumes"] = {"model": other, "checkpoints": volume}
    assert paths_in_use([engine], []) == set()


def test_a_model_is_no_reason_to_keep_all_that_lies_below_it(root: Path, weights: Arrays) -> None:
    make(root, weights, 2, within="qwen/steps")
    (root / "qwen" / "config.json").write_text("{}", encoding="utf-8")
    retain(root, keep=1, within="qwen/steps", in_use=lambda: ["qwen/config.json"])
    assert names(root / "qwen" / "steps") == ["step-2"]


def objects() -> tuple[dict[str, Any], dict[str, Any]]:
    engine = {"status": {"committed": {"version": 4, "checkpoint": "committed"}}}
    version = {
        "spec": {
            "source": {"type": "Checkpoint", "checkpoint": {"path": "wanted"}},
            "recovery": {"checkpoint": {"path": "stored"}},
            "stored": {"version": 3, "checkpoint": {"path": "stored-before"}},
        },
        "status": {"checkpoint": "loading"},
    }
    return engine, version


def test_what_objects_name() -> None:
    engine, version = objects()
    assert paths_in_use([engine], [version]) == {"committed", "wanted", "stored", "stored-before", "loading"}
    assert paths_in_use([{}, {"status": {"committed": None}}], [{"spec": {"source": {"type": "Trainer"}}}]) == set()
    assert paths_in_use([{"status": {"committed": {"checkpoint": ""}}}], []) == set()
