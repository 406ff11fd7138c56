"""The copy that another node's workers stage: the same bytes as the guard's, or a reason why not."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollfleet_engine.weights import own_copy
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.own_copy import OwnCopy
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from rollfleet_engine.weights.transfer import CheckpointUpdate
from rollfleet_kernels.digest import lanes_reference
from rollfleet_protocol.state import FailureReason
from tests.unit.launch.conftest import write_safetensors

ROOTS = ("leader", "follower")


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", "F32", 4096)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[StagedCheckpoint]:
    """On the leader's node; the follower's node has the same files."""
    write(tmp_path / ROOTS[0] / "step-1")
    shutil.copytree(tmp_path / ROOTS[0], tmp_path / ROOTS[1])
    root = tmp_path / ROOTS[0]
    made = stage_checkpoint(root, "step-1", read_model_tensors(root / "step-1"))
    yield made
    made.close()


def update_of(staged: StagedCheckpoint, tmp_path: Path) -> CheckpointUpdate:
    """As it comes over the wire to a node that has its own volume under another path."""
    told = CheckpointUpdate.from_wire(CheckpointUpdate.of(staged).to_wire())
    assert (told.root, told.path, told.confined) == (str(tmp_path / ROOTS[0]), "step-1", True)
    return replace(told, root=str(tmp_path / ROOTS[1]))


def staged_copy(update: CheckpointUpdate, *, hashes: bool = True) -> OwnCopy:
    copy = OwnCopy(update, hashes=hashes)
    copy._thread.join(20)
    assert copy.done
    return copy


def shard(tmp_path: Path) -> Path:
    return tmp_path / ROOTS[1] / "step-1" / "model.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("hashes", [True, False])
def test_it_reads_its_own_files_even_if_they_are_removed(
    staged: StagedCheckpoint, tmp_path: Path, *, hashes: bool
) -> None:
    before = open_files()
    copy = staged_copy(update_of(staged, tmp_path), hashes=hashes)
    assert copy.failure is None
    assert copy.digest == staged.digest
    shutil.rmtree(tmp_path / ROOTS[1])
    for _ in range(2):  # a transfer that failed may be tried again
        with copy.reader() as reader:
            for tensor in staged.tensors:
                buffer = bytearray(tensor.nbytes)
                reader.read_checked(tensor, memoryview(buffer), lanes_reference)
    copy.close()
    copy.close()
    assert open_files() == before


@pytest.mark.parametrize(
    ("damage", "reason", "words"),
    [
        (lambda path: path.unlink(), FailureReason.CHECKPOINT_INCOMPLETE, "model.safetensors: is absent"),
        (lambda path: os.truncate(path, 100), FailureReason.CHECKPOINT_CHANGED, "has 100 bytes on this node and "),
        (flip, FailureReason.DIGEST_MISMATCH, "holds other bytes on this node than on the leader's"),
        (lambda path: shutil.rmtree(path.parent), FailureReason.CHECKPOINT_NOT_FOUND, "'step-1': no such folder"),
    ],
    ids=["missing", "cut", "other bytes", "no folder"],
)
def test_what_its_node_lacks_is_found_before_the_pause(
    staged: StagedCheckpoint, tmp_path: Path, damage, reason: FailureReason, words: str
) -> None:
    before = open_files()
    damage(shard(tmp_path))
    copy = staged_copy(update_of(staged, tmp_path))
    assert copy.failure is not None
    assert (copy.failure.reason, words in copy.failure.message) == (reason, True), copy.failure.message
    with pytest.raises(CheckpointError, match="not staged: Prepare again"):
        copy.reader()
    copy.close()
    assert open_files() == before


def test_files_that_change_between_staging_and_transfer_are_told(staged: StagedCheckpoint, tmp_path: Path) -> None:
    copy = staged_copy(update_of(staged, tmp_path))
    with shard(tmp_path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(shard(tmp_path), ns=(1, 1))
    with pytest.raises(CheckpointError, match="was changed on this node since it was staged"), copy.reader():
        pass
    copy.close()


def test_one_that_is_closed_while_it_stages_leaves_nothing_open(staged: StagedCheckpoint, tmp_path: Path) -> None:
    before = open_files()
    copy = OwnCopy(update_of(staged, tmp_path), hashes=True)
    copy.close()
    copy._thread.join(20)
    copy.close()
    assert open_files() == before


def test_one_that_is_closed_while_its_thread_comes_to_its_end_leaves_nothing_open(
    staged: StagedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    copy = staged_copy(update_of(staged, tmp_path))
    monkeypatch.setattr(copy._thread, "is_alive", lambda: True)  # has done its last step, and is not gone
    copy.close()
    assert open_files() == before


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't start new thread")], ids=str)
def test_what_could_not_be_hashed_is_no_copy(
    staged: StagedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(own_copy, "hash_ranges", fail)
    copy = staged_copy(update_of(staged, tmp_path))
    assert copy.failure is not None
    assert copy.failure.message == f"checkpoint 'step-1': cannot be read: {type(error).__name__}: {error}"
    with pytest.raises(CheckpointError, match="not staged: Prepare again"):
        copy.reader()
    copy.close()


def test_a_link_out_of_the_volume_is_refused_there_too(staged: StagedCheckpoint, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.move(shard(tmp_path), outside)
    shard(tmp_path).symlink_to(outside)
    copy = staged_copy(update_of(staged, tmp_path))
    assert copy.failure is not None
    assert "leads out of" in copy.failure.message
    copy.close()
