"""A trainer of the contract suite: the operator's words that arm an engine, and a process with torch that sends."""

import json
import subprocess
from typing import Any

from devtools import vllm_venv
from rollfleet_protocol.state import EngineState, OperationStatus
from tests.contract.client import STEP_TIMEOUT_S, Operator, operation_of
from tests.contract.models import Models
from tests.contract.process import ROOT, EngineProcess, Site

SUBJECT, UID = "system:serviceaccount:rl:grpo", "grpo-uid"


class Trainer:
    """Who sends: an operator's words to arm the engine, and a process that pushes (`pusher`, a module)."""

    def __init__(
        self,
        engine: EngineProcess,
        site: Site,
        models: Models,
        pusher: str = "tests.contract.pusher",
        **environ: str,
    ) -> None:
        self.operator = Operator(engine, site)
        self._engine, self._site, self._models = engine, site, models
        self._process = subprocess.Popen(
            [str(vllm_venv.venv_path() / "bin" / "python"), "-m", pusher],
            cwd=ROOT,
            env={
                "PYTHONPATH": ":".join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels", *engine.kind.python_path))),
                "PATH": "/usr/bin:/bin",
                **environ,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def token(self) -> str:
        """The trainer's, a new one each time: its life is shorter than that of a module's trainer may be."""
        return self.operator.make_token(subject=SUBJECT, uid=UID)

    def close(self) -> None:
        """End the process: it ends with its input."""
        self._process.communicate(timeout=30)
        self.operator.close_client()

    def arm(self, epoch: int, version: int) -> None:
        """Closed, quiesced, armed."""
        self.operator.close(epoch, version)
        self.operator.do("arm", epoch)

    def order(self, epoch: int, version: int, backend: str, **changes: Any) -> EngineState:
        """The operator's Transfer: from here on the native routes are open to the trainer."""
        fields = {"deadlineSeconds": changes.pop("deadlineSeconds", STEP_TIMEOUT_S)}
        if "digest" in changes:
            fields["digest"] = changes.pop("digest")
        push = {"sender": {"subject": SUBJECT, "uid": UID}, "backend": backend, "rankOffset": 1, "worldSize": 2}
        return self.operator.do("transfer", epoch, version=version, push=push | {"workers": 1} | changes, **fields)

    def send(self, backend: str, version: int, **changes: Any) -> dict[str, Any]:
        """The trainer's process; what it says of how it went."""
        settings = {
            "url": self._engine.control_url,
            "token": self.token,
            "ca": self._site.authority.pem.decode(),
            "serverName": self._engine.config.fleet.control_server_name,
            "rankOffset": 1,
            "workers": 1,
            "backend": backend,
            "checkpoint": str(self._models.folder(version)),
            "label": str(version),
        } | changes
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self._process.wait(30)}"}
        return answer

    def ended(self) -> EngineState:
        """The state once the operation that runs has ended."""
        state = self.operator.state()
        while operation_of(state).status is OperationStatus.RUNNING:
            state = self.operator.state(after=state.sequence, wait_s=30)
        return state

    def update(self, version: int, backend: str, **changes: Any) -> EngineState:
        """A whole update, up to open."""
        epoch = self.operator.next_epoch()
        self.arm(epoch, version)
        self.order(epoch, version, backend)
        answer = self.send(backend, version, **changes)
        state = self.ended()
        assert operation_of(state).status is OperationStatus.SUCCEEDED, operation_of(state)
        assert answer == {"digest": self._models.digest(version)}, answer
        digest = self._models.digest(version)
        self.operator.verify(epoch, version, digest)
        return self.operator.do("open", epoch, version=version, digest=digest)

    def fail(self, backend: str, version: int, **changes: Any) -> tuple[str, EngineState]:
        """A push that must fail: what the trainer was told, and the state."""
        epoch = self.operator.next_epoch()
        self.arm(epoch, version)
        self.order(epoch, version, backend)
        answer = self.send(backend, version, **changes)
        state = self.ended()
        assert operation_of(state).status is OperationStatus.FAILED, operation_of(state)
        return str(answer["error"]), state

    def call(self, route: str, body: Any = None, **arguments: Any) -> tuple[int, str]:
        """One native call of the trainer's: status and message."""
        answer = self.operator.request("POST", f"/{route}", json={} if body is None else body, token=self.token)
        document = answer.json()
        return answer.status_code, str(document.get("error", document).get("message"))
