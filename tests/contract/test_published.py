"""Checkpoints that our publisher has made, held by the guard against their manifest before anything pauses."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rollfleet_protocol.manifest import MANIFEST, MANIFEST_UNFINISHED
from rollfleet_protocol.state import FailureReason, Gate, OperationStatus
from rollfleet_trainer.checkpoints import Published
from rollfleet_trainer.publishing import publish
from tests.contract.client import Client, Operator, operation_of
from tests.contract.models import Models
from tests.support import damage


def published(models: Models, version: int, name: str) -> Published:
    """The weights of a version, through the publisher."""
    shutil.rmtree(models.root / name, ignore_errors=True)
    raw = damage.read_tensors(models.folder(version))
    arrays = {key: np.frombuffer(each.data, np.float32).reshape(each.shape) for key, each in raw.items()}
    return publish(models.root, arrays, step=version, name=name, shard_bytes=40_000, assets=models.folder(version))


def test_what_is_published_is_served(serving: Operator, client: Client, models: Models):
    made = published(models, 2, "published")
    assert made.digest == models.digest(2)
    state = serving.update(2, made.path)
    assert state.weights.digest == made.digest
    answer = client.complete(models.short_prompt, 8)
    assert (answer.version, answer.text) == (2, models.answer(2, models.short_prompt)[:8])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flipped", FailureReason.CHECKPOINT_INVALID),
        ("absent", FailureReason.CHECKPOINT_INCOMPLETE),
        ("torn", FailureReason.CHECKPOINT_INCOMPLETE),
        ("unfinished", FailureReason.CHECKPOINT_INCOMPLETE),
    ],
)
def test_c11_what_is_not_as_it_was_published_is_refused_while_the_engine_serves(
    serving: Operator, client: Client, models: Models, how: str, reason: FailureReason
):
    folder = published(models, 2, f"published-{how}").folder
    culprit = _break(folder, how)
    operation = operation_of(serving.prepare(serving.next_epoch(), 2, folder.name))
    assert operation.status is OperationStatus.FAILED
    assert operation.failure is not None
    assert operation.failure.reason is reason
    assert culprit in operation.failure.message
    state = serving.state()
    assert (state.gate, state.paused, state.weights.version) == (Gate.OPEN, False, 1)
    assert client.complete(models.short_prompt, 8).text == models.answer(1, models.short_prompt)[:8]


def _break(folder: Path, how: str) -> str:
    if how == "flipped":
        return damage.flipped_bit(folder)
    if how == "absent":
        (folder / "config.json").unlink()
        return "config.json"
    if how == "torn":
        raw = (folder / MANIFEST).read_bytes()
        (folder / MANIFEST).write_bytes(raw[: len(raw) // 2])
        return MANIFEST
    (folder / MANIFEST).rename(folder / MANIFEST_UNFINISHED)
    return MANIFEST_UNFINISHED
