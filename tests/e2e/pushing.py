"""Trainers that push to a fleet of the local cluster, each a process of this machine, and what is asked of them.

They have the rights of examples/training/rbac.yaml and no others: they run by a token of their ServiceAccount.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from devtools import trainer_packages
from examples.demo.environment import ROOT, Environment
from examples.demo.fleet import Fleet
from examples.demo.manifests import EngineKind, rollout_engine
from tests.e2e.training import ACCOUNT, kubeconfig

LONGEST_LINE = 1 << 20
PUSHED_TO: dict[str, Any] = {"weightTransfer": {"backend": "gloo"}, "trainers": [{"serviceAccountName": ACCOUNT}]}
Line = dict[str, Any]


def spec_of(environment: Environment, kind: EngineKind) -> dict[str, Any]:
    """Of a fleet that is pushed to by gloo, which takes torch: simulated engines run under vLLM's interpreter too."""
    if not kind.simulated:
        return PUSHED_TO
    real, own = (rollout_engine("-", "-", each, 1)["spec"] for each in (environment.real(), kind))
    path = next(each for each in real["env"] if each["name"] == "PATH")
    volumes = {**own["volumes"], "extra": real["volumes"]["extra"]}
    return {**PUSHED_TO, "volumes": volumes, "env": [*own["env"], path], "resources": real["resources"]}


class Pusher:
    """One trainer process. `lines` are those of the push that it was told last."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[Line] = []
        self._changed = asyncio.Condition()
        self._over = False

    async def push(self, **order: Any) -> None:
        """Tell it what to push; push_process.py says in which words."""
        assert self.process.stdin is not None
        self.lines.clear()
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await self.process.stdin.drain()

    async def half(self, timeout_s: float) -> None:
        """Until half of the tensors have been sent, and no more than that."""
        await self._until(lambda line: "half" in line, timeout_s)

    async def ended(self, timeout_s: float) -> Line:
        """How the push ended for the trainer. AssertionError where it has no end in time, or the process died."""
        return await self._until(lambda line: "ended" in line, timeout_s)

    async def _until(self, wanted: Callable[[Line], bool], timeout_s: float) -> Line:
        def found() -> Line | None:
            return next((line for line in self.lines if wanted(line)), None)

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._over or found() is not None)
        except TimeoutError:
            raise AssertionError(f"the trainer still waits after {timeout_s:g} s: {self.lines[-3:]}") from None
        line = found()
        assert line is not None, f"the trainer has ended: {self.lines[-3:]}"
        return line

    def kill(self) -> None:
        """As the kernel does it when memory runs out."""
        self.process.send_signal(signal.SIGKILL)

    async def read(self) -> None:
        """Until the process is no more."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        async with self._changed:
            self._over = True
            self._changed.notify_all()


@asynccontextmanager
async def pusher(fleet: Fleet, environment: Environment, folder: Path, like: Path) -> AsyncIterator[Pusher]:
    """A trainer of the fleet, ended with the block; `folder` for its kubeconfig, `like` a checkpoint of the model."""
    packages = await asyncio.to_thread(trainer_packages.ensure)
    account = await kubeconfig(fleet, folder / "grpo.json")
    paths = [ROOT, ROOT / "engine", ROOT / "kernels", packages]
    process = await asyncio.create_subprocess_exec(
        *(str(environment.venv / "bin" / "python"), "-m", "tests.e2e.push_process"),
        *("--fleet", f"{fleet.namespace}/{fleet.name}", "--kubeconfig", str(account), "--like", str(like)),
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    made = Pusher(process)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
