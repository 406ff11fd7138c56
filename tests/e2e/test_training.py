"""A policy is trained on a fleet of real engines: the loop of examples/training, as its README says.

The test of learning is examples/training/objective.py's, stated before any run.
"""

import asyncio
import statistics
from pathlib import Path
from typing import Any

import pytest

from devtools import tiny_models
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl, until
from examples.training.objective import LEAST_RISE, Rise
from tests.e2e.training import Training, create, kubeconfig, training

CLOSE_ENOUGH = 1e-3  # of trainer's and engines' logprobs, in float32
SEEDS = (1, 2, 3)  # each begins with weights of its own
VERSIONS = 20
ANSWERS = 64  # of one batch
START_S, VERSION_S, SCALE_S = 600.0, 60.0, 400.0


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """The fleet's volume, which engines of another user read."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for each in (tmp_path, folder):
        each.chmod(0o755)
    return folder


def models_of(environment: Environment, dtype: str) -> Path:
    """The tiny models; those of float32 are there already."""
    if dtype == "float32":
        return environment.models.real
    return tiny_models.tiny_model(environment.venv / "bin" / "python", "--checkpoints", "1", "--dtype", dtype)


def show(name: str, done: Training, result: dict[str, Any]) -> None:
    """Figures for who reads the log."""
    lines = done.versions
    paused, moved = ([line[what] for line in lines] for what in ("pausedS", "transferS"))
    own, other = [line["logprobs"] for line in lines], [line["logprobsOtherVersion"] for line in lines[1:]]
    mixed, samples = (sum(line[what] for line in lines) for what in ("mixed", "samples"))
    print(f"{name}: reward {result['before']:.3f} -> {result['after']:.3f}, Welch's t {result['t']:.1f}")
    print(f"  {len(lines)} versions, each out of service {statistics.median(paused):.2f} s (at most {max(paused):.2f})")
    print(f"  transfer {statistics.median(moved):.2f} s (at most {max(moved):.2f}); medians")
    print(f"  logprobs differ by at most {max(own):.1e}; under another version by at least {min(other):.1e}")
    print(f"  {mixed} of {samples} samples are of two versions", flush=True)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def require_whole(lines: list[dict[str, Any]], dtype: str = "float32") -> None:
    """What must hold of every version, whatever the reward. The loop itself refuses samples without versions."""
    versions = [line["version"] for line in lines]
    assert versions == list(range(versions[0], versions[0] + len(versions))), "no version is left out"
    assert len({line["digest"] for line in lines}) == len(lines), "each step changes the weights"
    for line in lines:
        assert line["samples"] == ANSWERS
        if dtype == "float32":
            assert line["logprobs"] < CLOSE_ENOUGH, line
    if dtype == "float32":
        others = [line["logprobsOtherVersion"] for line in lines[1:]]
        # Not of each: where all answers of a batch get one reward there is nothing to learn, and weights hardly move.
        assert statistics.median(others) > 10 * CLOSE_ENOUGH, "a token of another version than it says would be seen"
    assert sum(line["mixed"] for line in lines) > 0, "no update found a sample in the middle"


async def committed(fleet: Fleet, checkpoint: str = "") -> dict[str, Any]:
    """What the fleet serves, once the operator has heard of its copy, which is named after the version is Active."""

    def is_told(document: dict[str, Any]) -> bool:
        return not checkpoint or bool(document["status"]["committed"].get("checkpoint") == checkpoint)

    document = await until("rolloutengine", fleet.name, fleet.namespace, is_told, 30.0)
    found: dict[str, Any] = document["status"]["committed"]
    return found


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
async def test_a_few_versions(environment: Environment, fleet: Fleet, checkpoints: Path, tmp_path: Path, dtype: str):
    """Versions, logprobs and copies of a short run; that rewards rise beyond chance, and not by how much."""
    models = await asyncio.to_thread(models_of, environment, dtype)
    await create(fleet, environment, checkpoints, models, dtype)
    await fleet.serving(2)
    account = await kubeconfig(fleet, tmp_path / "grpo.json")
    options = ("--versions", "4", "--checkpoint-every", "2", "--keep", "1", "--checkpoints", str(checkpoints))
    async with training(fleet, environment, account, models / "step-1", "--dtype", dtype, *options) as done:
        result = await done.result(START_S)
    show(f"two engines, {dtype}", done, result)
    require_whole(done.versions, dtype)
    assert result["t"] > 2, "four steps move the reward beyond most chances"
    last = await committed(fleet, "version-5")
    assert last["version"] == result["version"] == 5
    assert last["digest"] == done.versions[-1]["digest"]
    assert names(checkpoints) == ["version-5"], "older copies are deleted"
    lease = await get("lease", f"{fleet.name}-sender", fleet.namespace)
    assert not lease["spec"].get("holderIdentity"), "the next trainer need not wait"


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_the_reward_rises_clearly_from_every_start(
    environment: Environment, fleet: Fleet, checkpoints: Path, tmp_path: Path
):
    models = environment.models.real
    await create(fleet, environment, checkpoints, models, "float32")
    await fleet.serving(2)
    starts = folders(models)
    for seed in SEEDS:
        account = await kubeconfig(fleet, tmp_path / "grpo.json")
        options = ("--versions", str(VERSIONS), "--seed", str(seed), "--checkpoints", str(checkpoints))
        async with training(fleet, environment, account, starts[seed], *options) as done:
            result = await done.result(START_S)
        show(f"seed {seed}", done, result)
        require_whole(done.versions)
        risen = Rise(result["before"], result["after"], result["t"])
        assert risen.holds(LEAST_RISE), risen
        assert (await committed(fleet))["version"] == result["version"] == seed * (VERSIONS + 1)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_c17_training_goes_on_while_engines_come_and_go(
    environment: Environment, fleet: Fleet, checkpoints: Path, tmp_path: Path
):
    """Two engines, then four, then one of them replaced, between pushes: each group has the ranks of its engines."""
    models = environment.models.real
    await create(fleet, environment, checkpoints, models, "float32")
    await fleet.serving(2)
    account = await kubeconfig(fleet, tmp_path / "grpo.json")
    options = ("--versions", "10000", "--checkpoint-every", "1", "--checkpoints", str(checkpoints))
    async with training(fleet, environment, account, models / "step-1", *options) as done:
        await done.until(lambda lines: len(lines) >= 2, START_S)
        await kubectl("scale", "rolloutengine", fleet.name, "-n", fleet.namespace, "--replicas=4")
        await done.until(lambda lines: len(lines[-1]["engines"]) == 4, SCALE_S)
        assert await ranks(fleet, 4) == [(1, 1), (2, 1), (3, 1), (4, 1)]
        victim = (await fleet.pods())[0]["metadata"]["name"]
        await fleet.remove_pod(victim)
        await done.until(lambda lines: victim not in lines[-1]["engines"], SCALE_S)
        left = len(done.versions)
        await done.until(lambda lines: any(len(line["engines"]) == 4 for line in lines[left:]), SCALE_S)
        assert await ranks(fleet, 4) == [(1, 1), (2, 1), (3, 1), (4, 1)]
        await done.interrupt()
    counts = [len(line["engines"]) for line in done.versions]
    print(f"engines that took each version: {counts}; attempts: {[line['attempts'] for line in done.versions]}")
    require_whole(done.versions)
    lease = await get("lease", f"{fleet.name}-sender", fleet.namespace)
    assert not lease["spec"].get("holderIdentity"), "an interrupted trainer gives its Lease back"


async def ranks(fleet: Fleet, engines: int) -> list[tuple[int, int]]:
    """First rank and workers of each engine, of an update that so many take part in."""
    found = await until(
        "weightversion",
        fleet.weight_version,
        fleet.namespace,
        lambda o: len(o["status"].get("targets") or ()) == engines,
        VERSION_S,
        interval_s=0.1,
    )
    return sorted((each["rankOffset"], each["worldSize"]) for each in found["status"]["targets"])
