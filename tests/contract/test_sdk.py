"""RolloutFleet against real guards: the test is the operator, a process with torch is the trainer.

Two simulated engines, or one of real vLLM, under the interpreter of the vLLM environment, which has torch.
"""

import base64
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import DigestSource, EngineState, Gate, OperationStatus, WeightsState
from rollfleet_trainer.sending import COLLECTIVE_S
from tests.contract.client import STEP_TIMEOUT_S, Operator, held, operation_of
from tests.contract.conftest import SIMULATOR, run_engine
from tests.contract.models import Models
from tests.contract.process import ROOT, EngineProcess, Kind, Site
from tests.contract.trainer import SUBJECT, UID

STEPS = {"Accepted": True, "Quiesced": False, "Transferred": False, "Verified": False, "Active": False}
ANSWER_S = 90.0
SMALL_PARTS = 4 << 10  # bytes: several parts even of tiny models


@pytest.fixture(scope="module")
def engines(kind: Kind, site: Site, models: Models) -> Iterator[list[EngineProcess]]:
    """A fleet, each engine a pod of its own."""
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    command = [str(venv / "bin" / "python"), "-m", "rollfleet_engine.launch"]
    starting = [
        run_engine(
            kind,
            site,
            f"sdk-{number}",
            models.folder(0),
            models,
            command=lambda _: command,
            weightTransfer={"backend": "gloo"},
            podUid=f"pod-{number}",
        )
        for number in range(2 if kind.name == SIMULATOR else 1)
    ]
    started = [next(each) for each in starting]
    yield started
    for each in starting:
        next(each, None)


class Process:
    """The trainer's: it takes seconds to start, so all tests have one."""

    def __init__(self, module: str = "tests.contract.sdk_process") -> None:
        path = f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}"
        self._process = subprocess.Popen(
            [str(vllm_venv.venv_path() / "bin" / "python"), "-m", module],
            cwd=ROOT,
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, **order: Any) -> dict[str, Any]:
        """Tell the trainer's process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": what} | order), file=self._process.stdin, flush=True)
        patience = threading.Timer(ANSWER_S, self._process.kill)  # then the line is empty
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        assert line, f"no answer to {what}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """It ends with its input."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def process(engines: list[EngineProcess]) -> Iterator[Process]:
    one = Process()
    yield one
    one.close()


class Scene:
    """Operator and trainer of these engines."""

    def __init__(self, engines: list[EngineProcess], site: Site, models: Models, process: Process) -> None:
        self.engines, self.site, self.models = engines, site, models
        self.operators = [Operator(engine, site) for engine in engines]
        self.epoch = max(operator.state().epoch for operator in self.operators)
        self.holder = ""
        self.do = process.do

    def open(self, **options: Any) -> None:
        """Tokens are each good at one engine."""
        tokens = {
            engine.config.audience: operator.make_token(subject=SUBJECT, uid=UID)
            for engine, operator in zip(self.engines, self.operators, strict=True)
        }
        ca = base64.b64encode(self.site.authority.pem).decode()
        with socket.create_server(("127.0.0.1", 0)) as free:
            store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.do("open", ca=ca, tokens=tokens, backend="gloo", store=store, **options)

    def ask(self, version: int, form: str, what: str = "update", **options: Any) -> int:
        """The trainer asks for the next version, whose weights are this checkpoint's; its number."""
        told = self.do(what, checkpoint=str(self.models.folder(version)), form=form, **options)
        self.holder = told["holder"]
        assert self.holder.startswith("grpo/")
        assert told["annotations"] == {"rollfleet.io/offers": f"uid-qwen-policy/{told['version']}"}
        return int(told["version"])

    # --- what the operator does

    def quiesce(self, number: int) -> None:
        """All closed, drained and armed, and told so. The trainer may call before its door is open."""
        self.epoch += 1
        for operator in self.operators:
            operator.close(self.epoch, number)
            operator.do("arm", self.epoch)
        targets, offset = [], 1
        for place, (engine, operator) in enumerate(zip(self.engines, self.operators, strict=True)):
            target = {"name": f"qwen-{place}", "podUid": engine.config.pod_uid, "url": engine.control_url}
            target |= {"incarnation": operator.state().incarnation, "rankOffset": offset, "worldSize": 1}
            targets.append(target)
            offset += 1
        self.tell("Transferring", {"Quiesced": True}, targets=targets, sender={"holder": self.holder})

    def tell(self, phase: str, holds: dict[str, Any], **status: Any) -> None:
        """Write a status."""
        self.do("status", status={"phase": phase, "epoch": self.epoch, "holds": STEPS | holds} | status)

    def order(self, number: int, workers_of_the_last: int = 1) -> None:
        """Transfer: from here on the native routes are open to the trainer."""
        size = 1 + len(self.operators)
        for place, operator in enumerate(self.operators):
            workers = workers_of_the_last if place == len(self.operators) - 1 else 1
            push = {"sender": {"subject": SUBJECT, "uid": UID}, "backend": "gloo", "workers": workers}
            push |= {"rankOffset": 1 + place, "worldSize": size, "holder": self.holder}
            operator.do("transfer", self.epoch, version=number, push=push, deadlineSeconds=STEP_TIMEOUT_S)

    def transferred(self, number: int) -> list[EngineState]:
        """After both, and the trainer's last word: what every engine says."""
        self.quiesce(number)
        self.order(number)
        return [self.ended(operator) for operator in self.operators]

    def ended(self, operator: Operator) -> EngineState:
        state = operator.state()
        while operation_of(state).status is OperationStatus.RUNNING:
            state = operator.state(after=state.sequence, wait_s=30)
        return state

    def commit(self, number: int, digest: str) -> None:
        """Verified everywhere, told, and open."""
        for operator in self.operators:
            operator.verify(self.epoch, number, digest)
            operator.do("open", self.epoch, version=number, digest=digest)
        active = {"Transferred": True, "Verified": True, "Active": True}
        self.tell("Active", active, digest=digest, digestSource="Trainer", pausedSeconds="1.5")

    def succeed(self, number: int, version: int) -> list[EngineState]:
        """A push that must succeed with this checkpoint's bytes."""
        states = self.transferred(number)
        for state in states:
            assert operation_of(state).status is OperationStatus.SUCCEEDED, operation_of(state)
            assert held(state) == (WeightsState.LOADED, number, self.models.digest(version))
        self.commit(number, self.models.digest(version))
        return states

    def close(self) -> None:
        """End the trainer."""
        told = self.do("close")
        assert told["holder"] in (None, ""), "the Lease was given back"
        for operator in self.operators:
            operator.close_client()


@pytest.fixture
def scene(engines: list[EngineProcess], site: Site, models: Models, process: Process) -> Iterator[Scene]:
    one = Scene(engines, site, models, process)
    yield one
    one.close()


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_an_update_ends_with_what_the_fleet_serves(scene: Scene, face: str):
    scene.open()
    for version, form in ((1, "mapping"), (2, "parameters"), (3, "callable")):
        number = scene.ask(version, form, face=face, step=f"{version}00")
        assert number == version
        states = scene.succeed(number, version)
        result = scene.do("result")
        update = result["update"]
        assert (update["version"], update["digest"]) == (number, scene.models.digest(version))
        assert (update["digest_source"], update["paused_s"]) == ("Trainer", 1.5)
        assert update["engines"] == [f"qwen-{place}" for place in range(len(scene.engines))]
        assert result["phases"][-1] == "Active/0"
        assert "Transferring/0" in result["phases"]
        assert sorted(result["audiences"]) == sorted(engine.config.audience for engine in scene.engines)
        assert scene.do("lease")["annotations"] == {}, "nothing is offered between updates"
        for state in states:
            assert state.transferred is not None
            assert state.transferred.digest_source is DigestSource.TRAINER
            assert ("init" in state.transferred.phase_seconds) is (version == 1), "the group is kept"


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
    number = scene.ask(2, "sharded")
    scene.quiesce(number)
    scene.tell("Failed", {"Active": "SenderLost: its Lease was gone"})
    result = scene.do("result")
    for said in (result, result["second"]):
        assert said["type"] == "SenderLost"
        assert "its Lease was gone" in said["error"]
    recover(scene)


def recover(scene: Scene) -> None:
    """As the operator does after a push that came to nothing: whole weights by a checkpoint."""
    for operator in scene.operators:
        operator.update(1, "step-1")
    scene.epoch = max(operator.state().epoch for operator in scene.operators)


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
