"""The installed TRL: its client's methods are those of our table, and its GRPOTrainer trains against a fleet."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import OperationStatus
from tests.contract.client import held, operation_of
from tests.contract.models import Models
from tests.contract.process import ROOT, EngineProcess, Kind, Site
from tests.contract.sdk_scene import Process, Scene, running_engines
from tests.support import tiny
from tests.support.trl_surface import table

STEPS = 3
# Engine and trainer compute in single precision on the CPU, by kernels of their own.
NEAR = 1e-3


def test_methods_and_arguments_of_the_installed_one_are_those_of_the_table(trl: Path):
    python = vllm_venv.venv_path(vllm_venv.RELEASES[0]) / "bin" / "python"
    command = [str(python), "-m", "tests.support.trl_surface"]
    environ = {"PYTHONPATH": f"{ROOT}:{trl}", "PATH": "/usr/bin:/bin"}
    told = subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=300, capture_output=True, text=True)
    assert json.loads(told.stdout) == table()


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    features = {"logprobsMode": "processed_logprobs"}
    with running_engines(kind, site, models, "grpo", 1, features=features) as started:
        yield started


@pytest.fixture
def scene(engines: list[EngineProcess], site: Site, models: Models, trl: Path) -> Iterator[Scene]:
    process = Process("tests.trl.grpo_process", trl, answer_s=300.0)
    one = Scene(engines, site, models, process)
    yield one
    one.close()
    process.close()


def test_grpo_trains_against_a_fleet_one_version_per_step(scene: Scene, models: Models):
    """Samples of a step are of the version that it synced, and the trainer's own logprobs of them are the engine's."""
    scene.open(serving=[engine.serving_url for engine in scene.engines])
    base = models.folder(0)
    prompts = [each["prompt"] for each in tiny.expected(base)["prompts"]][:4]
    scene.do("train", model=str(base), steps=STEPS, prompts=prompts)
    digests = []
    for number in range(1, STEPS + 1):
        told = scene.do("offered", version=number)
        assert told["alive"], scene.do("result")
        scene.holder = told["holder"]
        states = scene.transferred(number)
        for state in states:
            assert operation_of(state).status is OperationStatus.SUCCEEDED, operation_of(state)
        digest = held(states[0])[2]
        assert digest is not None
        digests.append(digest)
        scene.commit(number, digest)
    result = scene.do("result")
    assert result["update"]["version"] == STEPS, result
    assert len(set(digests)) == STEPS, "each step changed the weights"
    told = scene.do("told")
    assert [{version for sample in batch for version in sample} for batch in told["versions"]] == [
        {number} for number in range(1, STEPS + 1)
    ]
    differences = [each for each in told["history"] if "sampling/sampling_logp_difference/max" in each]
    assert len(differences) == STEPS
    assert all(each["sampling/sampling_logp_difference/max"] < NEAR for each in differences), told["history"]
