"""One engine of the contract suite: a real process tree, started by the launcher with a real configuration."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rollfleet_engine.simulator.adapter import RELEASE
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig
from tests.support.issuer import CertificateAuthority, Issuer
from tests.support.log_lines import json_lines
from tests.support.ports import free_ports

T = TypeVar("T")
CommandOf = Callable[[EngineConfig], list[str]]
ROOT = Path(__file__).resolve().parents[2]
SUBJECT = "system:serviceaccount:rollfleet:rollfleet-operator"
OPERATOR_UID = "3b0b8a63-operator"
FLEET = {"namespace": "rl", "name": "qwen", "uid": "f1e2-fleet"}
POD_UID = "9d8c-pod"
HOST_NAME = "qwen-0-0"
ENGINE_ARGS = ("--enforce-eager", "--max-model-len", "2048", "--enable-prompt-tokens-details", "--dtype", "float32")
DRAIN_TIMEOUT_S = 3
START_TIMEOUT_S = 240.0  # vLLM imports for 10 s on an idle machine, and this one is shared
_LOOK_S = 0.02


def launcher(_: EngineConfig) -> list[str]:
    """As the image starts an engine."""
    return [sys.executable, "-m", "rollfleet_engine.launch"]


def simulator(config: EngineConfig, *options: str, python: str = sys.executable) -> list[str]:
    """By hand, without the launcher: it would refuse what tests bring with them."""
    return [
        *(python, "-m", "rollfleet_engine.simulator", *options),
        *("--model", config.model.path, "--served-model-name", config.model.served_name),
        *("--host", config.bind_address, "--port", str(config.serving_port)),
        *ENGINE_ARGS,
    ]


@dataclass(frozen=True)
class Kind:
    """Which engine, and how it is started."""

    name: str  # simulator | vllm
    environ: dict[str, str]
    python_path: tuple[Path, ...] = ()  # beside our own sources
    release: str = RELEASE  # of vLLM, real or simulated


@dataclass(frozen=True)
class Site:
    """What all engines of a session share."""

    folder: Path
    issuer: Issuer
    authority: CertificateAuthority


def until(claim: Callable[[], T], timeout_s: float, what: str) -> T:
    """Ask again until the answer is true; the deadline says what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not (found := claim()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(_LOOK_S)
    return found


class EngineProcess:
    """Launcher, engine and guard; stop() when done."""

    def __init__(
        self,
        kind: Kind,
        site: Site,
        name: str,
        model: Path,
        checkpoints: Path,
        engine_args: tuple[str, ...] = ENGINE_ARGS,
        command: CommandOf = launcher,
        **changes: Any,
    ) -> None:
        self.kind = kind
        self._command = command
        # A fixture may be made again: pytest takes tests of other modules in between to spare starts of other engines.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=site.folder))
        self.log_file = self._folder / "log"
        self.termination_log = self._folder / "termination-log"
        serving, control = free_ports(2)
        tls = self._folder / "tls"
        self.config = EngineConfig.model_validate(
            {
                "fleet": FLEET,
                "podUid": POD_UID,
                "operator": {"subject": SUBJECT, "uid": OPERATOR_UID},
                "model": {"path": str(model), "servedName": "policy"},
                "checkpointsPath": str(checkpoints),
                "engineArgs": engine_args,
                "servingPort": serving,
                "controlPort": control,
                "bindAddress": "127.0.0.1",
                "tlsDir": str(tls),
                "runDir": str(self._folder),
                "drainTimeoutSeconds": DRAIN_TIMEOUT_S,
                "tokens": {
                    "apiServer": site.issuer.url,
                    "caFile": str(site.issuer.ca_file),
                    "tokenFile": str(site.issuer.token_file),
                },
            }
            | changes
        )
        site.authority.issue(tls, self.config.fleet.control_server_name)
        self.serving_url = f"http://127.0.0.1:{serving}"
        self.control_url = f"https://127.0.0.1:{control}"
        self._process = self._start()

    def environ(self) -> dict[str, str]:
        """What the container's environment would be."""
        return {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            **self.kind.environ,
            "HOSTNAME": HOST_NAME,
            ENGINE_CONFIG_ENV: self.config.model_dump_json(by_alias=True),
            "ROLLFLEET_TERMINATION_LOG": str(self.termination_log),
            "PYTHONPATH": ":".join(map(str, (ROOT / "engine", ROOT / "kernels", *self.kind.python_path))),
        }

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_file.open("wb") as sink:
            return subprocess.Popen(
                self._command(self.config),
                env=self.environ(),
                cwd=self._folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    def log(self) -> str:
        """Everything that launcher, guard and engine wrote."""
        return self.log_file.read_text(errors="replace")

    def guard_log(self) -> list[dict[str, object]]:
        """The guard's lines."""
        return json_lines(self.log(), '"logger": "rollfleet.guard"')

    def routes(self) -> set[tuple[str, str]]:
        """The route table that the engine printed at start: method and path."""
        found = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", self.log())
        return {(method.strip(), path) for path, methods in found for method in methods.split(",")}

    def wait_live(self) -> None:
        """Until /livez answers 200."""

        def live() -> bool:
            assert self._process.poll() is None, f"the launcher ended: {self.log()[-4000:]}"
            try:
                return httpx.get(f"{self.serving_url}/livez", timeout=2).status_code == 200
            except httpx.TransportError:
                return False

        until(live, START_TIMEOUT_S, f"{self.kind.name} is live")

    def core_pids(self) -> list[int]:
        """Processes of the engine core among the launcher's descendants."""
        return [pid for pid in self.descendants() if _comm(pid).startswith("VLLM::EngineCor")]

    def children(self) -> list[int]:
        """The launcher's own: the engine's first process."""
        return [pid for pid in self.descendants() if _parent(pid) == self.pid]

    def descendants(self) -> list[int]:
        """All processes below the launcher."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
                parents[int(entry.name)] = parent
        found, todo = [], [self.pid]
        while todo:
            parent = todo.pop()
            children = [pid for pid, its in parents.items() if its == parent]
            found += children
            todo += children
        return found

    def signal(self, number: signal.Signals) -> None:
        """To the launcher, as the kubelet does."""
        self._process.send_signal(number)

    def ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self._process.poll() is None:
            left = self.descendants()
            self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()
                for pid in left:
                    _kill(pid)
                self._process.wait(10)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
