"""A published checkpoint: what engines read of it, what is refused, and that it is found when it is damaged."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.layout import INDEX
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_protocol.manifest import FORMAT, MANIFEST, MANIFEST_UNFINISHED, decode, encode
from rollfleet_protocol.state import FailureReason
from rollfleet_trainer import host, shards
from rollfleet_trainer.adopting import adopt
from rollfleet_trainer.checkpoints import Published, manifest_of, published
from rollfleet_trainer.errors import CheckpointExistsError, PublishError
from rollfleet_trainer.host import TensorError
from rollfleet_trainer.publishing import publish
from tests.support.publishing import Arrays, CountedFiles, full_disk, read_as_engines_do


def read(made: Published) -> Arrays:
    """As the safetensors library reads it."""
    found: Arrays = {}
    for path in sorted(made.folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def failure(root: Path, model: ModelTensors, relative: str = "step-7") -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        stage_checkpoint(root, relative, model)
    return raised.value


@pytest.mark.parametrize("shard_bytes", [1, 600, 1 << 30])
def test_engines_and_others_read_what_was_published(
    root: Path, model: ModelTensors, weights: Arrays, base: Path, shard_bytes: int
) -> None:
    seen: list[tuple[int, int]] = []
    made = publish(
        root,
        weights,
        step=7,
        assets=base,
        shard_bytes=shard_bytes,
        progress=lambda count, nbytes: seen.append((count, nbytes)),
    )
    assert made.path == "step-7"
    assert read_as_engines_do(root, "step-7", model) == made.digest
    found = read(made)
    assert found.keys() == weights.keys()
    assert all((found[name] == weights[name]).all() for name in weights)
    assert seen[-1] == (len(weights), sum(each.nbytes for each in weights.values()))
    assert (made.folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
    count = len(list(made.folder.glob("*.safetensors")))
    assert count == {1: len(weights), 600: count, 1 << 30: 1}[shard_bytes]
    assert [each.path for each in published(root)] == ["step-7"]
    assert [path.name for path in root.iterdir()] == ["step-7"]


def test_tensors_of_several_pieces_have_the_digest_of_whole_ones(
    root: Path, model: ModelTensors, weights: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, looked at again as the same step, and adopted after its manifest is gone."""
    whole = publish(root, weights, step=1).digest
    for module in (host, shards):
        monkeypatch.setattr(module, "PIECE_BYTES", 16)
    for _ in range(2):
        made = publish(root, weights, step=2)
        assert made.digest == whole
        assert read_as_engines_do(root, "step-2", model) == whole
    (made.folder / MANIFEST).unlink()
    assert adopt(root, "step-2", step=2).digest == whole


def test_how_it_is_cut_does_not_change_the_digest(root: Path, weights: Arrays) -> None:
    one = publish(root, weights, step=1)
    other = publish(root, reversed(list(weights.items())), step=2, shard_bytes=300, within="runs/a")
    assert one.digest == other.digest
    assert other.path == "runs/a/step-2"
    assert other.folder.is_dir()


def test_a_header_that_is_full_begins_another_shard(
    root: Path, model: ModelTensors, weights: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "HEADER_BYTES", 512)
    made = publish(root, weights, step=7)
    assert len(list(made.folder.glob("*.safetensors"))) > 3
    assert read_as_engines_do(root, "step-7", model) == made.digest


def test_strides_and_kinds_of_tensors(root: Path) -> None:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    given_tensors: Arrays = {
        "turned": grid.T,
        "every_other": grid[::2, 1::2],
        "reversed": grid[::-1],
        "scalar": np.array(3, dtype=np.int64),
        "odd": np.array([1, 2, 3], dtype=np.uint8),
        "after_odd": np.array([1.5], dtype=np.float64),
        "truth": np.array([True, False]),
    }
    found = read(publish(root, given_tensors, step=1))
    for name, tensor in given_tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert (found[name] == tensor).all()


def test_tied_weights_are_written_once_as_named_parameters_gives_them(root: Path) -> None:
    embedding = np.arange(12, dtype=np.float32).reshape(3, 4)
    tied: Arrays = {"embed.weight": embedding, "norm": np.ones(4, np.float32), "lm_head.weight": embedding.view()}
    made = publish(root, tied, step=1)
    alone = {name: tensor for name, tensor in tied.items() if name != "lm_head.weight"}
    assert made.digest == publish(root, alone, step=2).digest
    manifest = manifest_of(made.folder)
    assert manifest is not None
    assert manifest.tied == {"lm_head.weight": "embed.weight"}
    assert made.tensors == 2
    # The same memory in another form is another tensor.
    assert publish(root, tied | {"lm_head.weight": embedding.T}, step=3).tensors == 3


def test_a_buffer_that_is_used_again_is_not_taken_for_a_tied_weight(root: Path) -> None:
    buffer = np.empty(4, dtype=np.float32)

    def gathered() -> Iterator[tuple[str, Any]]:
        for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
            buffer[:] = value
            yield name, buffer

    found = read(publish(root, gathered(), step=1))
    assert {name: each[0] for name, each in found.items()} == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_tensors_that_are_made_one_by_one_are_not_kept(root: Path) -> None:
    made_so_far: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def made() -> Iterator[tuple[str, Any]]:
        for number in range(5):
            alive.append(sum(each() is not None for each in made_so_far))
            tensor = np.full(1000, number, dtype=np.float32)
            made_so_far.append(weakref.ref(tensor))
            yield f"layer.{number}", tensor
            del tensor

    publish(root, made(), step=1)
    assert max(alive) <= 1


ONE = np.ones(2, dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no tensor to publish"),
        ([("", ONE)], "1 to 512 characters"),
        ([("x" * 513, ONE)], "1 to 512 characters"),
        ([("__metadata__", ONE)], "a name is a text"),
        ([("a\nb", ONE)], "cannot be shown"),
        ([("\ud800", ONE)], "cannot be shown"),
        ([("w", ONE), ("w", ONE)], "tensor w: comes twice"),
        ([("_orig_mod.w", ONE)], "'_orig_mod.': take it out"),
        ([("layers._fsdp_wrapped_module.w", ONE)], "take it out of the names"),
        ([("w", np.ones(0, np.float32))], r"is empty \[0\]"),
        ([("w", np.ones(2, ">f4"))], "dtype >f4 cannot be stored"),
        ([("w", np.array(["a"]))], "cannot be stored"),
        ([("w", [1.0, 2.0])], "is of type list"),
        ([("w", object())], "is of type object"),
    ],
)
def test_what_no_engine_would_take_is_refused(root: Path, tensors: list[tuple[Any, Any]], words: str) -> None:
    with pytest.raises(TensorError, match=words):
        publish(root, tensors, step=1)
    assert not list(root.iterdir())


@pytest.mark.parametrize(
    "names",
    [
        *({"name": name} for name in ("a/b", ".a", "a.part", "x" * 300, "a\0b")),
        *({"within": within} for within in ("../x", "/x", "a/../../x")),
        {"step": "a/b"},
    ],
)
def test_names_that_lead_elsewhere_are_refused(root: Path, weights: Arrays, names: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|longer"):
        publish(root, weights, **({"step": 1} | names))
    assert not root.exists()


def test_the_same_again_is_what_is_there_and_another_is_refused(root: Path, weights: Arrays) -> None:
    first = publish(root, weights, step=1)
    before = sorted(path.stat().st_mtime_ns for path in first.folder.iterdir())
    again = publish(root, iter(weights.items()), step=1, shard_bytes=100)
    assert (again.digest, again.created_ns, again.seconds) == (first.digest, first.created_ns, 0.0)
    changed = weights | {"model.norm.weight": weights["model.norm.weight"] + 1}
    with pytest.raises(CheckpointExistsError, match="never overwritten"):
        publish(root, changed, step=1)
    assert sorted(path.stat().st_mtime_ns for path in first.folder.iterdir()) == before


def test_what_somebody_else_has_there_is_left_alone(root: Path, weights: Arrays) -> None:
    (root / "step-1").mkdir(parents=True)
    (root / "step-1" / "optimizer.pt").write_bytes(b"theirs")
    with pytest.raises(CheckpointExistsError, match="no complete checkpoint"):
        publish(root, weights, step=1)
    assert (root / "step-1" / "optimizer.pt").read_bytes() == b"theirs"
    (root / "step-2").write_bytes(b"a file")
    with pytest.raises(CheckpointExistsError):
        publish(root, weights, step=2)


@pytest.mark.parametrize("equal", [True, False])
def test_publishers_of_the_same_step_at_once(root: Path, model: ModelTensors, weights: Arrays, equal: bool) -> None:
    barrier = threading.Barrier(3)
    made: list[Published] = []
    refused: list[CheckpointExistsError] = []

    def run(number: int) -> None:
        changed = weights | {"model.norm.weight": weights["model.norm.weight"] + (0 if equal else number)}
        barrier.wait(10)
        try:
            made.append(publish(root, changed, step=1))
        except CheckpointExistsError as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(made), len(refused)) == ((3, 0) if equal else (1, 2))
    assert {each.digest for each in made} == {read_as_engines_do(root, "step-1", model)}
    assert [path.name for path in root.iterdir()] == ["step-1"]


def test_a_full_disk_leaves_nothing(root: Path, weights: Arrays) -> None:
    counted = CountedFiles()
    publish(root, weights, step=1, files=counted)
    assert counted.steps > 20
    shutil.rmtree(root)
    root.mkdir()
    for step in range(1, counted.steps):  # the last one is after the folder has its name
        with pytest.raises(PublishError, match="No space left"):
            publish(root, weights, step=1, files=CountedFiles(step, full_disk))
        assert not list(root.iterdir())


def test_tensors_that_cannot_fit_are_refused_before_anything_is_written(root: Path) -> None:
    huge = np.broadcast_to(np.ones(1, np.float32), (1 << 46,))  # a stride of 0: it takes 4 bytes here
    with pytest.raises(PublishError, match="are free"):
        publish(root, {"w": huge}, step=1)
    assert not list(root.iterdir())


def test_ranks_that_gather_together_are_not_left_waiting(root: Path) -> None:
    gathered: list[int] = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for number in range(6):
            gathered.append(number)  # a collective on all ranks
            yield ("a" if number < 2 else f"b{number}"), ONE

    with pytest.raises(TensorError, match="comes twice"):
        publish(root, pairs(), step=1, collective=True)
    assert gathered == list(range(6))


def test_a_failed_gather_is_told_as_it_is(root: Path) -> None:
    def pairs() -> Iterator[tuple[str, Any]]:
        yield "a", ONE
        raise RuntimeError("rank 3 is gone")

    with pytest.raises(RuntimeError, match="rank 3"):
        publish(root, pairs(), step=1, collective=True)
    assert not list(root.iterdir())


def test_every_truncated_or_absent_file_is_named_before_any_pause(
    root: Path, model: ModelTensors, weights: Arrays, base: Path
) -> None:
    made = publish(root, weights, step=7, assets=base, shard_bytes=900)
    for path in sorted(made.folder.iterdir()):
        raw = path.read_bytes()
        for left in (None, raw[: len(raw) // 2], raw[:-2], b""):
            if left is None:
                path.unlink()
            else:
                path.write_bytes(left)
            if left is None and path.name == MANIFEST:
                assert read_as_engines_do(root, "step-7", model) == made.digest  # as if somebody else had written it
            else:
                error = failure(root, model)
                assert error.reason is FailureReason.CHECKPOINT_INCOMPLETE
                assert path.name in error.message
            assert manifest_of(made.folder) is None
        path.write_bytes(raw)
    assert read_as_engines_do(root, "step-7", model) == made.digest


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, root: Path, model: ModelTensors, weights: Arrays) -> None:
    made = publish(root, weights, step=7, shard_bytes=900)
    path = data.draw(st.sampled_from(sorted(made.folder.iterdir())))
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    before = path.read_bytes()
    path.write_bytes(raw)
    try:
        error = failure(root, model)
        assert path.name == INDEX or path.name in error.message  # a damaged index names other files, or none
    finally:
        path.write_bytes(before)


def test_a_damaged_tensor_is_named_with_its_file(root: Path, model: ModelTensors, weights: Arrays) -> None:
    made = publish(root, weights, step=7, shard_bytes=1)
    path = made.folder / "model-00003.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert list(weights)[2] in error.message
    assert path.name in error.message
    assert "publish it again" in error.message


def test_parts_of_two_checkpoints_are_no_checkpoint(root: Path, model: ModelTensors, weights: Arrays) -> None:
    one = publish(root, weights, step=7, shard_bytes=900)
    other = publish(root, {name: each + 1 for name, each in weights.items()}, step=8, shard_bytes=900)
    shutil.copy(other.folder / "model-00001.safetensors", one.folder / "model-00001.safetensors")
    assert "model-00001.safetensors" in failure(root, model).message


def test_a_manifest_of_another_kind_is_refused(root: Path, model: ModelTensors, weights: Arrays) -> None:
    made = publish(root, weights, step=7)
    manifest = decode((made.folder / MANIFEST).read_bytes())
    (made.folder / MANIFEST).write_bytes(encode(replace(manifest, format=FORMAT + 1)))
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INVALID
    assert f"format {FORMAT + 1}, this reader knows {FORMAT}" in error.message
    (made.folder / MANIFEST).write_bytes(encode(replace(manifest, digest=f"sha256:{'0' * 64}")))
    assert "says digest sha256:000" in failure(root, model).message


def test_a_working_folder_is_refused_by_its_path_too(root: Path, model: ModelTensors, weights: Arrays) -> None:
    made = publish(root, weights, step=7)
    (made.folder / MANIFEST).rename(made.folder / MANIFEST_UNFINISHED)
    error = failure(root, model)
    assert error.reason is FailureReason.CHECKPOINT_INCOMPLETE
    assert MANIFEST_UNFINISHED in error.message


def test_a_folder_that_cannot_be_written_to_is_told(root: Path, weights: Arrays) -> None:
    def refused() -> None:
        raise PermissionError(13, os.strerror(13), "/checkpoints/x")

    with pytest.raises(PublishError, match=r"/checkpoints/x: Permission denied"):
        publish(root, weights, step=1, files=CountedFiles(1, refused))


def test_a_module_and_a_callable_are_taken_as_update_takes_them(root: Path, weights: Arrays) -> None:
    class Module:
        def named_parameters(self) -> Iterator[tuple[str, Any]]:
            return iter(weights.items())

    digests = {publish(root, each, step=7).digest for each in (weights, Module(), lambda: iter(weights.items()))}  # type: ignore[arg-type]
    assert len(digests) == 1


@pytest.mark.parametrize("tensors", [5, "step-7", Path, None, lambda: None, [np.ones(2)], ["wx"]])
def test_what_gives_no_tensors_is_told_with_what_is_taken(root: Path, tensors: Any) -> None:
    with pytest.raises(TensorError, match="publish takes a mapping of names to tensors, a module of torch, pairs"):
        publish(root, tensors, step=7)
    assert not root.exists() or not any(root.iterdir())
