"""TRL's client over a fleet, against real guards: syncs are versions, samples are of them (sdk_scene.py).

Without TRL, which tests/trl has: the ways in which TRL hands over weights are done by hand here.
"""

from collections.abc import Iterator

import httpx
import pytest

from rollfleet_protocol.state import DigestSource
from tests.contract.client import operation_of
from tests.contract.conftest import SIMULATOR
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.contract.sdk_scene import Process, Scene, recover, running_engines

NORM = "model.norm.weight"
TOKENS = 8


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    with running_engines(kind, site, models, "trl", 2 if kind.name == SIMULATOR else 1) as started:
        yield started


@pytest.fixture(scope="module")
def process(engines: list[EngineProcess]) -> Iterator[Process]:
    one = Process("tests.contract.trl_process")
    yield one
    one.close()


@pytest.fixture
def scene(engines: list[EngineProcess], site: Site, models: Models, process: Process) -> Iterator[Scene]:
    one = Scene(engines, site, models, process)
    yield one
    one.close()


def opened(scene: Scene, **options: bool) -> None:
    scene.open(serving=[engine.serving_url for engine in scene.engines], **options)


def require_samples(scene: Scene, number: int, version: int) -> None:
    """All engines answer by these weights."""
    prompt = scene.models.short_prompt
    count = 2 * len(scene.engines)
    batch = scene.do("sample", prompts=[prompt] * 2, n=count // 2, maxTokens=TOKENS)
    assert batch["versions"] == [[number] * TOKENS] * count
    assert len(batch["prompt_ids"]) == 2
    assert {len(each) for each in batch["completion_ids"]} == {TOKENS}
    assert batch["logprob_token_ids"] == [[[token] for token in each] for each in batch["completion_ids"]]
    assert all(len(position) == 1 and position[0] <= 0 for each in batch["logprobs"] for position in each)
    detokenized = {
        httpx.post(f"{scene.engines[0].serving_url}/detokenize", json={"tokens": each}).json()["prompt"]
        for each in batch["completion_ids"]
    }
    assert len(detokenized) == 1
    assert scene.models.answer(version, prompt).startswith(detokenized.pop())


@pytest.mark.parametrize("double", [False, True])
def test_a_sync_is_one_version_and_samples_after_it_are_of_it(scene: Scene, kind: Kind, double: bool):
    if double and kind.name == SIMULATOR:
        pytest.skip("its weights are random bytes, and those that are no numbers do not survive a cast")
    recover(scene)
    opened(scene, double=double)
    assert scene.do("connect")["weight_transfer_config"] == {"backend": "gloo"}
    for version, form in ((1, "params"), (2, "group"), (3, "model")):
        number = scene.ask(version, form, what="sync")
        states = scene.succeed(number, version)
        result = scene.do("result")
        assert (result["update"]["version"], result["update"]["digest"]) == (number, scene.models.digest(version))
        for state in states:
            assert state.transferred is not None
            assert state.transferred.digest_source is DigestSource.TRAINER
        if form != "model":
            assert scene.do("iterator")["ended"]
        require_samples(scene, number, version)
    recover(scene)


def test_weights_that_are_refused_are_gone_through_to_their_end_all_the_same(scene: Scene):
    opened(scene)
    number = scene.ask(3, "params", what="sync", omit=[NORM])
    scene.transferred(number)
    failed = [{"name": "qwen-0", "reason": "CoverageFailed", "message": f"{NORM} did not come"}]
    scene.tell("Failed", {"Active": "CoverageFailed: attempt 1"}, progress={"failed": failed})
    result = scene.do("result")
    assert result["type"] == "UpdateFailed"
    assert f"qwen-0: CoverageFailed: {NORM} did not come" in result["error"]
    assert scene.do("iterator")["ended"], "other ranks would wait for ever"
    recover(scene)


@pytest.mark.parametrize("kept", [False, True])
def test_a_second_attempt_needs_a_copy(scene: Scene, kept: bool):
    opened(scene, keepCopy=kept)
    number = scene.ask(3, "params", what="sync", omit=[NORM])
    scene.transferred(number)
    scene.tell("Preparing", {}, attempt=2, targets=[])
    if not kept:
        scene.quiesce(number)
        result = scene.do("result")
        assert result["type"] == "NotPossible", result
        assert "FleetClient(keep_copy=True)" in result["error"]
        recover(scene)
        return
    for state in scene.transferred(number):
        failure = operation_of(state).failure
        assert failure is not None
        assert NORM in failure.message, "all others came again"
    scene.tell("Failed", {"Active": "CoverageFailed: attempt 2"})
    assert scene.do("result")["type"] == "UpdateFailed"
    recover(scene)


def test_a_copy_is_whole_wherever_the_first_pass_was_left(scene: Scene):
    opened(scene)
    told = scene.do("passes", checkpoint=str(scene.models.folder(1)))
    assert told["same"]
    assert told["cast"] == {"whole": "int64", "half": "float32"}, "what is no floating number keeps its dtype"
    assert told["type"] == "NotPossible"
    assert "tensor 0:" in told["error"]
    assert "was announced" in told["error"]


def test_a_group_that_breaks_off_ends_the_update_with_why(scene: Scene):
    opened(scene)
    number = scene.ask(2, "group", what="sync", breakAt=3)
    scene.quiesce(number)
    scene.order(number)
    result = scene.do("result")
    assert (result["type"], result["error"]) == ("ValueError", "the merge failed")
    assert "the merge failed" in scene.do("lease")["annotations"]["rollfleet.io/sender-message"]
    recover(scene)
    number = scene.ask(1, "group", what="sync")
    scene.succeed(number, 1)
    assert scene.do("result")["update"]["version"] == number
    recover(scene)
