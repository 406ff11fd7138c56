"""What workers are told of a staged checkpoint, and how they read it again, from another process too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollfleet_engine.weights import transfer
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from rollfleet_engine.weights.transfer import CheckpointReader, CheckpointUpdate
from rollfleet_kernels.digest import lanes, lanes_reference
from rollfleet_protocol.state import FailureReason
from tests.support import damage

READ_ALL = """
import json, sys
from rollfleet_engine.weights.transfer import CheckpointReader, CheckpointUpdate
from rollfleet_kernels.digest import lanes_reference
update = CheckpointUpdate.from_wire(json.load(sys.stdin))
with CheckpointReader(update) as reader:
    for tensor in update.tensors:
        data = bytearray(tensor.nbytes)
        reader.read_checked(tensor, memoryview(data), lanes_reference)
print(len(update.tensors))
"""


@pytest.fixture
def staged(root: Path, model: ModelTensors) -> Iterator[StagedCheckpoint]:
    made = stage_checkpoint(root, "step-1", model)
    yield made
    made.close()


def failure(update: CheckpointUpdate) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised, CheckpointReader(update):
        pass
    return raised.value


def test_survives_the_wire(staged: StagedCheckpoint) -> None:
    update = CheckpointUpdate.of(staged)
    assert CheckpointUpdate.from_wire(json.loads(json.dumps(update.to_wire()))) == update


def test_another_process_reads_the_same_bytes_though_the_folder_is_gone(
    staged: StagedCheckpoint, checkpoint: Path
) -> None:
    for path in checkpoint.iterdir():
        path.unlink()
    wire = json.dumps(CheckpointUpdate.of(staged).to_wire())
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL], input=wire, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == str(len(staged.tensors)), done.stderr


def test_a_file_that_was_written_to_is_not_read(staged: StagedCheckpoint, checkpoint: Path) -> None:
    os.utime(damage.shards(checkpoint)[0])
    error = failure(CheckpointUpdate.of(staged))
    assert error.reason is FailureReason.CHECKPOINT_CHANGED
    assert staged.files[0].name in error.message


def test_another_file_under_the_same_number_is_not_read(staged: StagedCheckpoint) -> None:
    update = CheckpointUpdate.of(staged)
    swapped = replace(update, files=(update.files[1], replace(update.files[0], path=update.files[1].path)))
    assert failure(swapped).reason is FailureReason.CHECKPOINT_CHANGED


def test_a_guard_that_closed_the_files_is_named(staged: StagedCheckpoint) -> None:
    update = CheckpointUpdate.of(staged)
    staged.close()
    error = failure(update)
    assert error.reason is FailureReason.CHECKPOINT_CHANGED
    assert update.files[0].path in error.message


def test_other_bytes_are_a_mismatch_that_names_the_tensor(staged: StagedCheckpoint) -> None:
    tensor = replace(staged.tensors[0], lanes=lanes_reference(b"other"))
    with CheckpointReader(CheckpointUpdate.of(staged)) as reader, pytest.raises(CheckpointError) as raised:
        reader.read_checked(tensor, memoryview(bytearray(tensor.nbytes)), lanes_reference)
    assert raised.value.reason is FailureReason.DIGEST_MISMATCH
    assert tensor.name in raised.value.message


def test_a_tensor_read_in_pieces_is_the_same(staged: StagedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, in_pieces = [], []
    for size, found in ((1 << 20, whole), (24, in_pieces)):
        monkeypatch.setattr(transfer, "CACHED_BYTES", size)
        with CheckpointReader(CheckpointUpdate.of(staged)) as reader:
            for tensor in staged.tensors:
                found.append(bytearray(tensor.nbytes))
                assert reader.read_checked(tensor, memoryview(found[-1]), lanes) == tensor.lanes
    assert whole == in_pieces
    assert any(tensor.nbytes % 24 for tensor in staged.tensors)
    assert any(tensor.nbytes > 24 for tensor in staged.tensors)
