"""RolloutFleet against real guards (sdk_scene.py).

Two simulated engines, or one of real vLLM, under the interpreter of the vLLM environment, which has torch.
"""

import re
import time
from collections.abc import Iterator

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import DigestSource, Gate, OperationStatus, WeightsState
from rollfleet_trainer.sending import COLLECTIVE_S
from tests.contract.client import operation_of
from tests.contract.conftest import SIMULATOR
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.contract.sdk_scene import Process, Scene, recover, running_engines
from tests.support.damage import read_tensors

SMALL_PARTS = 4 << 10  # bytes: several parts even of tiny models


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    with running_engines(kind, site, models, "sdk", 2 if kind.name == SIMULATOR else 1) as started:
        yield started


@pytest.fixture(scope="module")
def process(engines: list[EngineProcess]) -> Iterator[Process]:
    one = Process()
    yield one
    one.close()


@pytest.fixture
def scene(engines: list[EngineProcess], site: Site, models: Models, process: Process) -> Iterator[Scene]:
    one = Scene(engines, site, models, process)
    yield one
    one.close()


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_an_update_ends_with_what_the_fleet_serves(scene: Scene, face: str):
    scene.open()
    for version, form in ((1, "mapping"), (2, "parameters"), (3, "callable"), (1, "tied")):
        number = scene.ask(version, form, face=face, step=f"{version}00")
        states = scene.succeed(number, version)
        result = scene.do("result")
        update = result["update"]
        assert (update["version"], update["digest"]) == (number, scene.models.digest(version))
        assert (update["digest_source"], update["paused_s"]) == ("Trainer", 1.5)
        assert update["engines"] == [f"qwen-{place}" for place in range(len(scene.engines))]
        assert result["phases"][-1] == "Active/0"
        assert "Transferring/0" in result["phases"]
        whole = sum(len(each.data) for each in read_tensors(scene.models.folder(version)).values())
        assert result["toSend"] == whole, "as told beforehand, or as for the version before"
        assert sorted(result["audiences"]) == sorted(engine.config.audience for engine in scene.engines)
        assert scene.do("lease")["annotations"] == {}, "nothing is offered between updates"
        for state in states:
            assert state.transferred is not None
            assert state.transferred.digest_source is DigestSource.TRAINER
            assert ("init" in state.transferred.phase_seconds) is (number == 1), "the group is kept"


def test_what_cannot_be_sent_is_told_before_a_version_is_asked_for(scene: Scene):
    """It would use the version up, and be seen with the fleet closed."""
    scene.open()
    answer = scene.do("refused")
    told = {name: text.removeprefix("NotPossible: ") for name, text in answer["told"].items()}
    assert answer["requests"] == [], "nobody was asked anything"
    assert list(told.values()) == [text.partition(": ")[2] for text in answer["told"].values()], "each is NotPossible"
    for name in ("nothing", "module without parameters", "empty callable"):
        assert told[name] == "there are no tensors to send"
    for name in ("numpy", "callable of numpy", "lazy"):
        assert "is a numpy.ndarray, and update sends torch's tensors: torch.from_numpy makes one" in told[name]
    assert told["path"].startswith("update takes a module, a mapping of names to torch's tensors, pairs of both")
    assert told["path"].endswith("this is '/checkpoints/step-5' (str)")
    assert told["number"].endswith("this is 5 (int)")
    assert "torch.nn.modules.linear.Linear" in told["class"]
    assert "returned a NoneType" in told["callable of nothing"]
    assert "among what it was given is a torch.Tensor" in told["list"]
    assert told["name"] == "tensor 1: a name is a text of 1 to 512 characters"
    assert told["dtype"].startswith("tensor w: dtype complex128 cannot be sent: bool, ")
    assert told["empty"].startswith("tensor w: is empty [0, 2]")
    assert told["meta"] == "tensor weight: is on device meta and has no bytes"
    assert told["compiled"].startswith("tensor _orig_mod.w: the model does not know '_orig_mod.'")
    assert len(told) == 16


def test_tensors_that_are_gathered_one_by_one_come_in_parts(scene: Scene):
    scene.open(partBytes=SMALL_PARTS)
    states = scene.succeed(scene.ask(2, "iterator"), 2)
    assert scene.do("result")["update"]["digest"] == scene.models.digest(2)
    assert states[0].transferred is not None
    assert states[0].transferred.tensors > 10


def test_a_sharded_trainer_gathers_on_all_ranks_and_all_are_told_the_end(scene: Scene):
    scene.open(ranks=2, partBytes=SMALL_PARTS)
    scene.succeed(scene.ask(1, "sharded"), 1)
    result = scene.do("result")
    assert result["update"]["digest"] == scene.models.digest(1)
    assert result["second"]["update"] == result["update"]
    scene.do("update", checkpoint=str(scene.models.folder(2)), form="renamed")
    result = scene.do("result")
    assert result["type"] == result["second"]["type"] == "NotPossible"
    number = scene.ask(2, "sharded")
    scene.quiesce(number)
    scene.tell("Failed", {"Active": "SenderLost: its Lease was gone"})
    result = scene.do("result")
    for said in (result, result["second"]):
        assert said["type"] == "SenderLost"
        assert "its Lease was gone" in said["error"]
    recover(scene)


def test_other_tensors_than_the_fleet_took_are_refused_before_a_version_is_asked_for(scene: Scene):
    """The engines would refuse them too, with the version before gone."""
    scene.open()
    first = scene.ask(1, "listed")
    scene.succeed(first, 1)
    result = scene.do("result")
    assert result["toSend"] > 0, "a list tells how much it is"
    for _ in range(2):
        scene.do("update", checkpoint=str(scene.models.folder(2)), form="renamed")
        result = scene.do("result")
        assert result["type"] == "NotPossible"
        words = r"tensor (.*)s: is new; tensor \1: is missing: the fleet took others as version (\d+), .* RolloutFleet"
        said = re.search(words, result["error"])
        assert said is not None, result["error"]
        assert int(said[2]) == first
        assert "rollfleet.io/offers" not in scene.do("lease")["annotations"]
    second = scene.ask(2, "mapping")
    assert second == first + 1
    scene.succeed(second, 2)
    assert scene.do("result")["update"]["digest"] == scene.models.digest(2)


def test_what_the_engines_refuse_is_sent_again_where_the_operator_tries_again(scene: Scene):
    scene.open()
    number = scene.ask(3, "omitting", omit=["model.norm.weight"])
    for state in scene.transferred(number):
        failure = operation_of(state).failure
        assert failure is not None
        assert "model.norm.weight" in failure.message
    scene.tell("Preparing", {}, attempt=2, targets=[])
    states = scene.succeed(number, 3)
    assert states[0].transferred is not None
    assert "init" in states[0].transferred.phase_seconds, "the group is made anew after a failure"
    assert scene.do("result")["update"]["digest"] == scene.models.digest(3)


def test_c04_what_the_engines_refuse_is_told_with_engine_and_phase(scene: Scene):
    scene.open()
    number = scene.ask(3, "omitting", omit=["model.norm.weight"])
    scene.transferred(number)
    failed = [{"name": "qwen-0", "reason": "CoverageFailed", "message": "model.norm.weight did not come"}]
    scene.tell("Failed", {"Active": "CoverageFailed: attempt 1"}, progress={"failed": failed})
    result = scene.do("result")
    assert result["type"] == "UpdateFailed"
    assert "qwen-0: CoverageFailed: model.norm.weight did not come" in result["error"]
    recover(scene)


def test_c04_an_engine_that_does_not_join_ends_the_attempt_for_all_before_the_group_s_deadline(scene: Scene):
    if len(scene.engines) < 2:
        pytest.skip("needs a second engine, which real vLLM on this machine has no memory for")
    scene.open()
    number = scene.ask(2, "mapping")
    scene.quiesce(number)
    began = time.monotonic()
    scene.order(number, workers_of_the_last=4)
    first, last = (scene.ended(operator) for operator in scene.operators)
    assert time.monotonic() - began < COLLECTIVE_S / 2
    told = [failure.message for state in (first, last) if (failure := operation_of(state).failure) is not None]
    assert len(told) == 2
    assert "for 4" in told[1]
    assert "did not join" in told[0] or "cannot join" in told[0], "by the trainer, or by its own wait"
    scene.tell("Failed", {"Active": "TransferFailed: attempt 1"})
    assert scene.do("result")["type"] == "UpdateFailed"
    assert time.monotonic() - began < COLLECTIVE_S / 2, "nor does the trainer wait for it"
    recover(scene)


def test_an_iterator_of_gathered_tensors_is_not_sent_twice(scene: Scene):
    scene.open(partBytes=SMALL_PARTS)
    number = scene.ask(3, "iterator", omit=["model.norm.weight"])
    scene.transferred(number)
    scene.tell("Preparing", {}, attempt=2, targets=[])
    scene.quiesce(number)
    result = scene.do("result")
    assert result["type"] == "NotPossible", result
    assert "give `update` a callable" in result["error"]
    assert "cannot be gone through again" in scene.do("lease")["annotations"]["rollfleet.io/sender-message"]
    recover(scene)


def test_a_trainer_that_breaks_off_takes_its_offer_back_with_why(scene: Scene):
    scene.open(partBytes=SMALL_PARTS)
    number = scene.ask(2, "breaking")
    scene.quiesce(number)
    scene.order(number)
    result = scene.do("result")
    assert (result["type"], result["error"]) == ("ValueError", "the gather failed on rank 3")
    told = scene.do("lease")["annotations"]
    assert told == {"rollfleet.io/sender-message": "ValueError: the gather failed on rank 3"}
    recover(scene)


def test_a_holder_that_was_deposed_calls_no_engine(scene: Scene):
    recover(scene)
    scene.open()
    number = scene.ask(2, "mapping")
    scene.do("lease", change={"spec": {"holderIdentity": "grpo/another"}})
    result = scene.do("result")
    assert result["type"] == "SenderLost"
    assert "'grpo/another' holds Lease qwen-sender now" in result["error"]
    scene.quiesce(number)
    scene.order(number)
    for operator in scene.operators:
        assert operation_of(operator.state()).status is OperationStatus.RUNNING, "nobody sends"
        assert operator.do("cancel", scene.epoch).gate is Gate.OPEN
    scene.do("lease", change={"spec": {"holderIdentity": ""}})


def test_another_process_of_the_account_is_no_sender(scene: Scene):
    scene.open()
    number = scene.ask(2, "mapping")
    mine, scene.holder = scene.holder, "grpo/another"
    scene.quiesce(number)
    result = scene.do("result")
    assert result["type"] == "SenderLost"
    assert f"'grpo/another' as its sender, this process is {mine!r}" in result["error"]
    recover(scene)


def test_a_version_that_is_overtaken_is_sent_no_further(scene: Scene):
    scene.open()
    number = scene.ask(2, "mapping")
    scene.do("status", status={}, bump=True)
    result = scene.do("result")
    assert result["type"] == "Superseded"
    assert f"asks for {number + 1} now" in result["error"]


@pytest.mark.skipif(vllm_venv.chosen_release() == "0.23.0", reason="vLLM has trainers' classes from 0.27 on")
@pytest.mark.parametrize("digested", [True, False])
def test_vllm_s_own_trainer_classes_drive_a_push(scene: Scene, digested: bool):
    scene.open()
    number = scene.ask(2, "mapping", what="begin", digested=digested)
    states = scene.succeed(number, 2)
    result = scene.do("result")
    assert result["update"]["version"] == number, result
    expected = DigestSource.TRAINER if digested else DigestSource.ENGINES_ONLY
    for state in states:
        assert state.transferred is not None
        assert state.transferred.digest_source is expected
    recover(scene)


def test_a_source_whose_tensors_nobody_knows_beforehand_is_refused_and_the_engines_are_told(scene: Scene):
    scene.open()
    number = scene.ask(2, "iterator", what="begin", digested=True)
    states = scene.transferred(number)
    result = scene.do("result")
    assert result["type"] == "NotPossible"
    assert "a generator nobody knows beforehand which tensors come: give a module, a mapping" in result["error"]
    assert "give a module" in scene.do("lease")["annotations"]["rollfleet.io/sender-message"]
    for state in states:
        assert state.weights.state is not WeightsState.UNCERTAIN, "nothing was touched"
    recover(scene)
