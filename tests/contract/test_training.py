"""A real training loop against two engines of real vLLM and their guards; the test is the operator (sdk_scene.py)."""

import math
from collections.abc import Iterator

import pytest

from rollfleet_protocol.state import OperationStatus
from rollfleet_trainer.checkpoints import published
from tests.contract.client import held, operation_of
from tests.contract.conftest import VLLM
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.contract.sdk_scene import Process, Scene, running_engines

pytestmark = pytest.mark.parametrize("kind", [VLLM], indirect=True, scope="session")  # simulated ones follow no policy
VERSIONS = 3
SAMPLES = 8 * 4
CLOSE_ENOUGH = 1e-3  # of logprobs in float32


@pytest.fixture(scope="module")
def process(kind: Kind) -> Iterator[Process]:
    one = Process("tests.contract.training_process")
    yield one
    one.close()


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    with running_engines(kind, site, models, "training", 2) as started:
        yield started


def test_a_policy_is_trained_on_samples_whose_tokens_know_their_version(
    engines: list[EngineProcess], site: Site, models: Models, process: Process
):
    scene = Scene(engines, site, models, process)
    for operator in scene.operators:
        operator.serve_initial()
    scene.epoch = max(operator.state().epoch for operator in scene.operators)
    scene.open()
    told = process.do(
        "train",
        model=str(models.folder(1)),
        endpoints=[engine.serving_url for engine in engines],
        checkpoints=str(models.root),
        plan={"versions": VERSIONS, "group": 4, "max_tokens": 48, "checkpoint_every": 3, "keep": 1, "seed": 1},
    )
    digests = []
    while told["version"] is not None:
        scene.holder = told["holder"]
        states = scene.transferred(told["version"])
        for state in states:
            assert operation_of(state).status is OperationStatus.SUCCEEDED, operation_of(state)
        digests += [{held(state)[2] for state in states}]
        scene.commit(told["version"], str(held(states[0])[2]))
        told = process.do("next", after=told["version"])
    result = process.do("result")
    assert "error" not in result, result
    lines = result["lines"]
    assert [line["version"] for line in lines] == [2, 3, 4]
    assert all(len(agreed) == 1 for agreed in digests)
    assert len({*map(tuple, digests)}) == VERSIONS + 1, "each version has weights of its own"
    for line in lines:
        assert line["samples"] == SAMPLES
        assert line["logprobs"] < CLOSE_ENOUGH, line
        assert line["logprobsOtherVersion"] > 10 * CLOSE_ENOUGH or line["version"] == 2, "a wrong version would show"
    assert sum(line["mixed"] for line in lines) > 0, "no sample was interrupted by an update and continued"
    assert math.isfinite(result["result"]["t"])
    [copy] = published(models.root)
    assert process.do("policy")["recovery"] == {"checkpoint": {"path": copy.path}}
    assert {copy.digest} == digests[-1]
    for operator in scene.operators:
        state = operator.update(scene.epoch + 1, copy.path)
        assert held(state)[2] == copy.digest, "late joiners read the same weights"
    scene.close()


def test_the_loss_is_the_clipped_surrogate_over_the_tokens_that_were_sampled(process: Process):
    """By hand: ratios 1.1, 1.5 (clipped for a gain, not for a loss), 0.5 (the other way round), and padding."""
    ratios = [[1.1, 1.5, 9.0], [1.5, 0.5, 0.5]]
    new = [[math.log(ratio) - 2.0 for ratio in row] for row in ratios]
    old = [[-2.0] * 3, [-2.0] * 3]
    order = {"new": new, "old": old, "advantages": [1.0, -2.0], "mask": [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]}
    told = process.do("loss", **order)
    gains = [1.1, 1.2, 2 * -1.5, 2 * -0.8, 2 * -0.8]
    assert told["loss"] == pytest.approx(-sum(gains) / 5, abs=1e-5)
    assert told["gradient"] == [pytest.approx([-1.1 / 5, 0, 0], abs=1e-5), pytest.approx([2 * 1.5 / 5, 0, 0], abs=1e-5)]
