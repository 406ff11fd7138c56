"""examples/training on the cluster: its manifests, and its loop as a process of this machine with torch.

The trainer has the rights of examples/training/rbac.yaml and no others: it runs by a token of its ServiceAccount.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from devtools import trainer_packages
from examples.demo.environment import ROOT, Environment
from examples.demo.fleet import Fleet
from examples.demo.kubectl import apply, kubectl
from examples.demo.manifests import rollout_engine

EXAMPLE = ROOT / "examples" / "training"
ACCOUNT = "grpo"
OF_THE_CLUSTER = ("image", "imagePullPolicy", "env")  # of the example's spec, what is this machine's
LONGEST_LINE = 1 << 20
END_S = 60.0


async def create(
    fleet: Fleet, environment: Environment, checkpoints: Path, models: Path, dtype: str, **router: Any
) -> None:
    """The example's fleet and rights, in the fleet's namespace; further fields of spec.router by keyword."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": fleet.namespace}}
    await apply(namespace)
    await grant(fleet)
    manifest = yaml.safe_load((EXAMPLE / "rolloutengine.yaml").read_text(encoding="utf-8"))
    assert manifest["metadata"]["name"] == fleet.name
    manifest["metadata"]["namespace"] = fleet.namespace
    here = rollout_engine(fleet.name, fleet.namespace, environment.real(), 2)["spec"]
    manifest["spec"] |= {name: here[name] for name in OF_THE_CLUSTER}
    manifest["spec"]["volumes"] = {
        **here["volumes"],
        "model": {"hostPath": {"path": str(models)}},
        "checkpoints": {"hostPath": {"path": str(checkpoints)}},
    }
    args = manifest["spec"]["engine"]["args"]
    manifest["spec"]["engine"]["args"] = [dtype if word == "float32" else word for word in args]
    manifest["spec"]["router"] |= router
    await apply(manifest)


async def grant(fleet: Fleet) -> None:
    """The trainer's account and rights."""
    for document in yaml.safe_load_all((EXAMPLE / "rbac.yaml").read_text(encoding="utf-8")):
        document["metadata"]["namespace"] = fleet.namespace
        await apply(document)


async def kubeconfig(fleet: Fleet, file: Path) -> Path:
    """The cluster's, with a token of the trainer's account in place of ours."""
    config = json.loads(await kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    token = await kubectl("create", "token", ACCOUNT, "-n", fleet.namespace, "--duration=1h")
    config["users"][0]["user"] = {"token": token.strip()}
    await asyncio.to_thread(file.write_text, json.dumps(config), encoding="utf-8")
    return file


@dataclass
class Training:
    """A loop that runs: what it has told so far."""

    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: bool = False

    @property
    def versions(self) -> list[dict[str, Any]]:
        """A line for each."""
        return [line for line in self.lines if "result" not in line]

    async def until(self, holds: Callable[[list[dict[str, Any]]], bool], timeout_s: float) -> None:
        """Wait for something to be told; AssertionError where the loop has ended without it."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.ended or holds(self.versions))
        assert holds(self.versions), self.lines[-1:]

    async def result(self, timeout_s: float) -> dict[str, Any]:
        """What was learned; AssertionError where the loop did not come to its end."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.ended)
        assert await self.process.wait() == 0, self.lines[-1:]
        found: dict[str, Any] = self.lines[-1]["result"]
        return found

    async def read(self) -> None:
        """Until the process closes its output."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            await self._tell(json.loads(line))
        self.ended = True
        await self._tell(None)

    async def _tell(self, line: dict[str, Any] | None) -> None:
        async with self.changed:
            if line is not None:
                self.lines.append(line)
            self.changed.notify_all()

    async def interrupt(self) -> None:
        """As a person at the terminal does."""
        self.process.send_signal(signal.SIGINT)
        await asyncio.wait_for(self.process.wait(), END_S)


def heed_interrupts() -> None:
    """Who starts the tests in the background of a shell lets all their processes ignore what a terminal sends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def training(
    fleet: Fleet, environment: Environment, account: Path, model: Path, *options: str
) -> AsyncIterator[Training]:
    """The example's loop from these weights, ended with the block."""
    packages = await asyncio.to_thread(trainer_packages.ensure)
    command = [str(environment.venv / "bin" / "python"), "-m", "examples.training.train"]
    command += ["--fleet", f"{fleet.namespace}/{fleet.name}", "--endpoint", await fleet.url(), "--model", str(model)]
    command += ["--kubeconfig", str(account), "--hold", "300", *options]
    paths = [ROOT, ROOT / "engine", ROOT / "kernels", packages]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
        preexec_fn=heed_interrupts,
    )
    made = Training(process)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
