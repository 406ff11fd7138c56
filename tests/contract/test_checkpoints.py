"""Broken checkpoints are found while staging: the engine goes on serving, and the message names file or tensor."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfleet_protocol.state import FailureReason, Gate, OperationStatus
from tests.contract.client import Client, Operator, operation_of
from tests.contract.models import Models
from tests.contract.process import EngineProcess
from tests.support import damage

BROKEN: list[tuple[Callable[[Path], str], FailureReason]] = [
    (damage.renamed_tensor, FailureReason.COVERAGE_FAILED),
    (damage.missing_tensor, FailureReason.COVERAGE_FAILED),
    (damage.wrong_shape, FailureReason.COVERAGE_FAILED),
    (damage.wrong_dtype, FailureReason.COVERAGE_FAILED),
    (damage.truncated_shard, FailureReason.CHECKPOINT_INCOMPLETE),
    (damage.missing_shard, FailureReason.CHECKPOINT_INCOMPLETE),
    (damage.missing_index, FailureReason.CHECKPOINT_INCOMPLETE),
    (damage.half_written, FailureReason.CHECKPOINT_INCOMPLETE),
]


def _assert_unnoticed(operator: Operator, client: Client, models: Models) -> None:
    state = operator.state()
    assert (state.gate, state.paused, state.weights.version, state.staged) == (Gate.OPEN, False, 1, None)
    answer = client.complete(models.short_prompt, 8)
    assert (answer.status, answer.version, answer.text) == (200, 1, models.answer(1, models.short_prompt)[:8])


@pytest.mark.parametrize(("how", "reason"), BROKEN, ids=[how.__name__ for how, _ in BROKEN])
def test_c11_broken_checkpoint(
    serving: Operator, client: Client, models: Models, how: Callable[[Path], str], reason: FailureReason
):
    name, culprit = models.damaged(2, how)
    state = serving.prepare(serving.next_epoch(), 2, name)
    operation = operation_of(state)
    assert operation.status is OperationStatus.FAILED
    assert operation.failure is not None
    assert operation.failure.reason is reason
    assert culprit in operation.failure.message
    _assert_unnoticed(serving, client, models)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("step-99", FailureReason.CHECKPOINT_NOT_FOUND),
        ("../step-1", FailureReason.CHECKPOINT_INVALID),
        ("step-1/../../step-1", FailureReason.CHECKPOINT_INVALID),
        ("/etc", FailureReason.CHECKPOINT_INVALID),
        ("step-1/config.json", FailureReason.CHECKPOINT_NOT_FOUND),
    ],
)
def test_c11_paths(serving: Operator, client: Client, models: Models, path: str, reason: FailureReason):
    operation = operation_of(serving.prepare(serving.next_epoch(), 2, path))
    assert operation.failure is not None
    assert operation.failure.reason is reason
    assert path in operation.failure.message
    _assert_unnoticed(serving, client, models)


def test_a_link_out_of_the_volume_is_refused(serving: Operator, client: Client, models: Models, tmp_path: Path):
    shutil.copytree(models.folder(2), tmp_path / "elsewhere")
    link = models.root / "linked"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    operation = operation_of(serving.prepare(serving.next_epoch(), 2, "linked"))
    assert operation.failure is not None
    assert operation.failure.reason is FailureReason.CHECKPOINT_INVALID
    assert "linked" in operation.failure.message
    _assert_unnoticed(serving, client, models)


def test_a_repaired_checkpoint_is_taken_under_the_same_epoch(serving: Operator, client: Client, models: Models):
    name, _ = models.damaged(2, damage.missing_shard)
    epoch = serving.next_epoch()
    assert operation_of(serving.prepare(epoch, 2, name)).status is OperationStatus.FAILED
    for file in models.folder(2).iterdir():
        shutil.copy(file, models.root / name / file.name)
    state = serving.prepare(epoch, 2, name)
    assert state.staged is not None
    assert state.staged.digest == models.digest(2)
    serving.do("cancel", epoch)
    _assert_unnoticed(serving, client, models)


def test_c11_a_folder_that_is_deleted_after_staging_is_still_loaded(serving: Operator, client: Client, models: Models):
    shutil.copytree(models.folder(3), models.root / "short-lived", dirs_exist_ok=True)
    epoch = serving.next_epoch()
    state = serving.prepare(epoch, 3, "short-lived")
    assert state.staged is not None
    digest = state.staged.digest
    shutil.rmtree(models.root / "short-lived")
    serving.close(epoch, 3)
    serving.do("arm", epoch)
    serving.transfer(epoch, 3, digest)
    serving.verify(epoch, 3, digest)
    serving.do("open", epoch, version=3, digest=digest)
    assert client.complete(models.short_prompt, 8).text == models.answer(3, models.short_prompt)[:8]


def test_files_changed_after_staging_never_become_weights(
    serving: Operator, client: Client, models: Models, engine: EngineProcess
):
    name = "changing"
    shutil.rmtree(models.root / name, ignore_errors=True)
    shutil.copytree(models.folder(2), models.root / name)
    epoch = serving.next_epoch()
    state = serving.prepare(epoch, 2, name)
    assert state.staged is not None
    digest = state.staged.digest
    shard = damage.shards(models.root / name)[-1]
    damage.flipped_bit(models.root / name)
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    state = serving.finish("transfer", epoch, version=2, digest=digest, deadlineSeconds=60)
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.reason in (FailureReason.DIGEST_MISMATCH, FailureReason.CHECKPOINT_CHANGED)
    assert shard.name in failure.message
    assert state.weights.state.value == "Uncertain"
    assert client.complete("abc", 1).body["error"]["closedReason"] == "Uncertain"
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    assert serving.refused("open", epoch, version=2, digest=digest)[0] == 409
    # A full reload cures it.
    restored = serving.update(1, "step-1")
    assert restored.weights.digest == models.digest(1)
    _assert_unnoticed(serving, client, models)
    assert engine.core_pids()
