"""C11: a broken checkpoint is found in Preparing; the fleet goes on serving, and the message names the culprit."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from examples.demo.environment import Environment
from examples.demo.fleet import Fleet, condition
from examples.demo.kubectl import get
from tests.support import damage

REPLICAS = 2
CASES: dict[str, tuple[Callable[[Path], str] | None, str]] = {
    "missing path": (None, "step-1"),
    "half-written": (damage.half_written, "step-1"),
    "absent shard": (damage.missing_shard, "step-1"),
    "truncated shard": (damage.truncated_shard, "step-1"),
    "renamed tensor": (damage.renamed_tensor, "step-1"),
}


@pytest.fixture
async def serving_fleet(environment: Environment, fleet: Fleet, own_models: Path) -> Fleet:
    kind = environment.simulated()
    await fleet.create(replace(kind, models=own_models), REPLICAS)
    await fleet.serving(REPLICAS)
    return fleet


async def test_c11_broken_checkpoints_never_pause_the_fleet(serving_fleet: Fleet, own_models: Path) -> None:
    fleet = serving_fleet
    deadlines = {"prepareSeconds": 10}
    for version, (name, (break_it, path)) in enumerate(CASES.items(), start=1):
        folder = own_models / f"case-{version}"
        culprit = f"case-{version}"
        if break_it is not None:
            shutil.copytree(own_models / path, folder)
            culprit = break_it(folder)
        await fleet.bump(version, folder.name, deadlines=deadlines)
        document = await fleet.finished(version, timeout_s=60)
        assert document["status"]["phase"] == "Failed", name
        message = " ".join(c.get("message", "") for c in document["status"]["conditions"])
        assert culprit in message, f"{name}: {culprit!r} is not named in {message!r}"
        engine = await get("rolloutengine", fleet.name, fleet.namespace)
        assert engine["status"]["servingReplicas"] == REPLICAS
        assert engine["status"]["committed"]["version"] == 0
        assert condition(engine, "Available")["status"] == "True"
    changes = await fleet.gate_changes([pod["metadata"]["name"] for pod in await fleet.pods()])
    assert [change.opened for change in changes] == [True] * REPLICAS, "every gate opened once and never closed"
    # A good version afterwards needs nothing but its number.
    await fleet.bump(len(CASES) + 1, "step-2")
    await fleet.active(len(CASES) + 1)
