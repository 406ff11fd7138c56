"""Operator and trainer around real guards: the test is the operator, a process with torch is the trainer."""

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import EngineState, OperationStatus, WeightsState
from tests.contract.client import STEP_TIMEOUT_S, Operator, held, operation_of
from tests.contract.conftest import run_engine
from tests.contract.models import Models
from tests.contract.process import ROOT, EngineProcess, Kind, Site
from tests.contract.trainer import SUBJECT, UID
from tests.support.ports import free_port

STEPS = {"Accepted": True, "Quiesced": False, "Transferred": False, "Verified": False, "Active": False}
ANSWER_S = 90.0


@contextmanager
def running_engines(
    kind: Kind, site: Site, models: Models, name: str, count: int, **changes: Any
) -> Iterator[list[EngineProcess]]:
    """A fleet, each engine a pod of its own, under the interpreter that has torch."""
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    command = [str(venv / "bin" / "python"), "-m", "rollfleet_engine.launch"]
    starting = [
        run_engine(
            kind,
            site,
            f"{name}-{number}",
            models.folder(0),
            models,
            command=lambda _: command,
            weightTransfer={"backend": "gloo"},
            podUid=f"pod-{number}",
            **changes,
        )
        for number in range(count)
    ]
    try:
        yield [next(each) for each in starting]
    finally:
        for each in starting:
            each.close()


class Process:
    """The trainer's: it takes seconds to start, so all tests of a module have one."""

    def __init__(
        self, module: str = "tests.contract.sdk_process", *over: Path, answer_s: float = ANSWER_S, **environ: str
    ) -> None:
        self._answer_s = answer_s
        path = ":".join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels", *over)))
        self._process = subprocess.Popen(
            [str(vllm_venv.venv_path() / "bin" / "python"), "-m", module],
            cwd=ROOT,
            env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, **order: Any) -> dict[str, Any]:
        """Tell the trainer's process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": what} | order), file=self._process.stdin, flush=True)
        patience = threading.Timer(self._answer_s, self._process.kill)  # then the line is empty
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        assert line, f"no answer to {what}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> int:
        """It ends with its input: by which code."""
        self._process.communicate(timeout=60)
        return int(self._process.returncode)


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
        store = f"tcp://127.0.0.1:{free_port()}"
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


def recover(scene: Scene) -> None:
    """As the operator does after a push that came to nothing: whole weights by a checkpoint."""
    for operator in scene.operators:
        operator.update(1, "step-1")
    scene.epoch = max(operator.state().epoch for operator in scene.operators)
