"""The process that outlives `up`: it starts the components in order, restarts what may be restarted, bounds the logs,
and writes down what it sees. It decides nothing else; `down` ends it together with everything it started.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from devcluster.components import Component
from devcluster.network import CLUSTER_DOMAIN
from devcluster.paths import Paths

PROBE_TIMEOUT_S = 1.0
STARTING_POLL_S = 0.05
STEADY_POLL_S = 0.5
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
STOP_TIMEOUT_S = 60.0  # the API server waits for open watches
LOG_LIMIT_BYTES = 20 * 1024 * 1024
KEPT_EXITS = 5

CLUSTER_NO_PROXY = f"localhost,127.0.0.1,198.18.0.0/15,.svc,.{CLUSTER_DOMAIN}"

MARK = "ROLLFLEET_DEVCLUSTER_OF"  # in the environment of every process of a cluster: `down` finds them by it


@dataclass
class Seen:
    """What is known of one component; written to the status file."""

    name: str
    pid: int | None = None
    started_at: float | None = None  # seconds since the epoch
    ready_after_s: float | None = None
    restarts: int = 0
    exits: list[str] = field(default_factory=list)


@dataclass
class Child:
    component: Component
    seen: Seen
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0  # monotonic
    not_before: float = 0.0  # monotonic; when a restart is due
    delay: float = FIRST_DELAY_S / 2  # before the last restart; doubles while it keeps dying young

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.seen.ready_after_s is not None


def probe(ready: str, trust: ssl.SSLContext | None) -> bool:
    """Whether a component answers; every refusal means not yet."""
    try:
        if ready.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PROBE_TIMEOUT_S)
                connection.connect(ready.removeprefix("unix:"))
                return True
        context = trust if ready.startswith("https:") else None
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # a proxy of the environment has no way to the bridge
            *([urllib.request.HTTPSHandler(context=context)] if context else []),
        )
        with opener.open(ready, timeout=PROBE_TIMEOUT_S) as answer:
            return int(answer.status) == 200
    except (OSError, http.client.HTTPException):
        return False


def no_proxy(environment: Mapping[str, str]) -> str:
    """The user's exceptions from a proxy, and the cluster's own addresses."""
    given = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    return ",".join([*([given] if given else []), CLUSTER_NO_PROXY])


def child_environment(own: Mapping[str, str], paths: Paths) -> dict[str, str]:
    """The user's environment (containerd may need its proxy), but the cluster's own traffic never leaves by a proxy."""
    kept = {name: value for name, value in own.items() if name not in {"PYTHONPATH", "no_proxy"}}
    return kept | {"NO_PROXY": no_proxy(own), MARK: str(paths.home)}


class Supervisor:
    """One loop over all children; no threads, so that a fork is always safe."""

    def __init__(self, paths: Paths, components: Sequence[Component]) -> None:
        self._paths = paths
        self._children = {c.name: Child(c, Seen(c.name)) for c in components}
        self._environment = child_environment(os.environ, paths)
        self._stopping = False
        self._written = ""
        self._logs_due = 0.0

    def run(self) -> None:
        """Until a signal asks for the end; then the children are ended in reverse order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        trust = ssl.create_default_context(cafile=str(self._paths.pki / "ca.crt"))
        while not self._stopping:
            self.look(trust)
            steady = all(child.is_ready for child in self._children.values())
            time.sleep(STEADY_POLL_S if steady else STARTING_POLL_S)
        self.stop()

    def look(self, trust: ssl.SSLContext) -> None:
        """One pass over all children."""
        for child in self._children.values():
            self._advance(child, trust)
        self._bound_logs()
        self._write()

    def stop(self) -> None:
        for child in reversed(self._children.values()):
            if child.process is not None:
                child.process.terminate()
                child.process.wait(timeout=STOP_TIMEOUT_S)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _advance(self, child: Child, trust: ssl.SSLContext) -> None:
        if child.process is None:
            may_start = not child.seen.exits or child.component.restart
            if may_start and time.monotonic() >= child.not_before and self._all_ready(child.component.after):
                self._start(child)
            return
        code = child.process.poll()
        if code is not None:
            self._ended(child, f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}")
        elif child.seen.ready_after_s is None and (not child.component.ready or probe(child.component.ready, trust)):
            child.seen.ready_after_s = round(time.monotonic() - child.began, 2)

    def _all_ready(self, names: Sequence[str]) -> bool:
        return all(self._children[name].is_ready for name in names)

    def _start(self, child: Child) -> None:
        child.began = time.monotonic()
        try:
            with (self._paths.logs / f"{child.component.name}.log").open("ab") as log:
                child.process = subprocess.Popen(
                    child.component.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    cwd="/",
                )
        except OSError as error:
            self._ended(child, f"cannot start: {error}")
            return
        child.seen.pid = child.process.pid
        child.seen.started_at = round(time.time(), 3)
        child.seen.ready_after_s = None

    def _ended(self, child: Child, how: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        child.seen.exits = [*child.seen.exits, f"{stamp} {how}"][-KEPT_EXITS:]
        child.seen.pid = None
        child.process = None
        lived = time.monotonic() - child.began
        child.delay = FIRST_DELAY_S if lived > LONGEST_DELAY_S else min(2 * child.delay, LONGEST_DELAY_S)
        child.not_before = time.monotonic() + child.delay
        if child.component.restart:
            child.seen.restarts += 1

    def _bound_logs(self) -> None:
        """Keep one older piece of a log that has grown too long. Children append, so cutting the file is safe."""
        if time.monotonic() < self._logs_due:
            return
        self._logs_due = time.monotonic() + 10.0
        for name in self._children:
            log = self._paths.logs / f"{name}.log"
            if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)

    def _write(self) -> None:
        seen = [asdict(child.seen) for child in self._children.values()]
        text = json.dumps({"supervisor": os.getpid(), "components": seen}, indent=1)
        if text != self._written:
            new = self._paths.status.with_suffix(".new")
            new.write_text(text)
            new.replace(self._paths.status)
            self._written = text


def main(paths: Paths) -> None:
    """Entry of the process that `up` starts in the background."""
    plan = json.loads(paths.plan.read_text())
    Supervisor(paths, [Component.from_json(value) for value in plan["components"]]).run()


def spawn(paths: Paths, python: str, source: Path) -> int:
    """Start the supervisor apart from this terminal."""
    environment = {
        **os.environ,
        MARK: str(paths.home),
        "PYTHONPATH": str(source.parent),
        "DEVCLUSTER_HOME": str(paths.home),
        "DEVCLUSTER_CACHE": str(paths.cache),
    }
    with (paths.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [python, "-m", "devcluster", "supervise"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    return process.pid
