"""Everything that demo, end-to-end tests and benchmarks need around the fleet: cluster, images, chart, models."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools import tiny_models, vllm_venv
from examples.demo.kubectl import kubectl
from examples.demo.manifests import EngineKind

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_NAMESPACE = "rollfleet-system"
CHECKPOINTS = 3
COMMAND_TIMEOUT_S = 3600.0
OPERATOR_IMAGE = "rollfleet/operator:dev"
ENGINE_IMAGE = "rollfleet/engine:dev"
ROUTER_IMAGE = "rollfleet/router:dev"


class SetupError(RuntimeError):
    """Something around the fleet is missing; the message says what to do."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """A progress line with its time."""
    print(f"  {title} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"  {title}: {time.monotonic() - started:.1f} s", flush=True)


@dataclass(frozen=True)
class Images:
    """Names of the images in the cluster."""

    operator: str = OPERATOR_IMAGE
    engine: str = ENGINE_IMAGE
    router: str = ROUTER_IMAGE


@dataclass(frozen=True)
class Models:
    """Where the tiny models lie on the node, and what greedy decoding of them gives."""

    real: Path
    simulated: Path


def run(*command: str, cwd: Path = ROOT, timeout_s: float = COMMAND_TIMEOUT_S, quiet: bool = False) -> str:
    """Run a command; its standard error is shown as it comes, its standard output returned."""
    done = subprocess.run(
        command,
        cwd=cwd,
        timeout=timeout_s,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
    )
    if done.returncode != 0:
        said = (done.stderr or "") + done.stdout[-2000:]
        raise SetupError(f"{shlex.join(command)} failed with exit status {done.returncode}: {said}")
    return done.stdout


def use_cluster() -> bool:
    """Make KUBECONFIG and PATH point at a cluster: the one in KUBECONFIG, or the local one, started if need be.

    Returns whether it is the local one (whose images and host paths are this machine's).
    """
    foreign = os.environ.get("KUBECONFIG")
    if foreign and not _is_local(foreign):
        return False
    print("cluster", flush=True)
    if subprocess.run(_devcluster("up"), cwd=ROOT, check=False, timeout=COMMAND_TIMEOUT_S).returncode != 0:
        raise SetupError("the local cluster did not start; see its message above")
    for line in run(*_devcluster("env")).splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = shlex.split(value)[0]
    return True


def _devcluster(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "devcluster", *arguments]


def _is_local(kubeconfig: str) -> bool:
    status = subprocess.run(
        _devcluster("status", "-o", "json"), cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, timeout=60
    )
    try:
        return bool(json.loads(status.stdout).get("kubeconfig") == kubeconfig)
    except json.JSONDecodeError:
        return False


def _image(dockerfile: str, tag: str, *, build_args: Mapping[str, str]) -> str:
    arguments = [word for name, value in build_args.items() for word in ("--build-arg", f"{name}={value}")]
    run(*_devcluster("image", "--file", dockerfile, "--context", str(ROOT), "--tag", tag, *arguments))
    return tag


def build_images(*, local: bool) -> Images:
    """Build and load the images; on a foreign cluster they must be named in the environment."""
    if not local:
        names = {key: os.environ.get(f"ROLLFLEET_{key.upper()}_IMAGE") for key in ("operator", "engine", "router")}
        missing = [f"ROLLFLEET_{key.upper()}_IMAGE" for key, value in names.items() if not value]
        if missing:
            raise SetupError(f"KUBECONFIG names a cluster that is not the local one: set {', '.join(missing)}")
        return Images(**{key: str(value) for key, value in names.items()})
    base = {"BASE": os.environ["DEVCLUSTER_BASE_IMAGE"]}
    print("images", flush=True)
    return Images(
        operator=_image("Dockerfile.operator", OPERATOR_IMAGE, build_args=base),
        engine=_image("Dockerfile.engine", ENGINE_IMAGE, build_args=base),
        router=_image("Dockerfile.router", ROUTER_IMAGE, build_args=base),
    )


def make_models(venv: Path) -> Models:
    """The tiny models, made once and kept outside the tree."""
    options = ("--checkpoints", str(CHECKPOINTS), "--shards", "2")
    with step("the tiny models"):
        try:
            return Models(
                real=tiny_models.tiny_model(venv / "bin/python", *options),
                simulated=tiny_models.tiny_model(Path(sys.executable), "--simulated", *options),
            )
        except subprocess.SubprocessError as error:
            raise SetupError(f"the tiny models could not be made: {error}; its own words are above") from error


def known_outputs(models: Path) -> dict[int, dict[str, list[int]]]:
    """Version -> prompt -> greedy tokens, as written beside each real checkpoint by the tool that made it."""
    known = {}
    for version in range(CHECKPOINTS + 1):
        folder = models / ("base" if version == 0 else f"step-{version}")
        document = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
        known[version] = {item["prompt"]: item["tokenIds"] for item in document["prompts"]}
    return known


async def install_chart(images: Images) -> None:
    """Install or upgrade the chart, and wait until the operator is there."""
    values = {
        "image.repository": images.operator.rpartition(":")[0],
        "image.tag": images.operator.rpartition(":")[2],
        "image.pullPolicy": "IfNotPresent",
        "router.image": images.router,
        "hostPathVolumes.allowed": "true",
    }
    settings = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    with step("installing the chart"):
        await asyncio.to_thread(
            run, "helm", "upgrade", "--install", "rollfleet", str(ROOT / "charts/rollfleet"),
            "--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s", *settings,
            "--take-ownership", "--force-conflicts",  # CRDs may have been applied without Helm, by tests or by hand
        )  # fmt: skip
        # A new image under the same tag does not change the Deployment: the pod must be made anew.
        await kubectl("rollout", "restart", "deployment/rollfleet-operator", "-n", SYSTEM_NAMESPACE)
        rollout = ("rollout", "status", "deployment/rollfleet-operator", "-n", SYSTEM_NAMESPACE, "--timeout=180s")
        await kubectl(*rollout, timeout_s=200)


@dataclass(frozen=True)
class Environment:
    """What a fleet can be made with."""

    images: Images
    models: Models
    venv: Path

    def real(self, **more: Any) -> EngineKind:
        """Real vLLM on the CPU."""
        return EngineKind(image=self.images.engine, models=self.models.real, venv=self.venv, **more)

    def simulated(self, **more: Any) -> EngineKind:
        """Simulated engines."""
        return EngineKind(image=self.images.engine, models=self.models.simulated, **more)


def prepare() -> Environment:
    """Cluster, environment with vLLM, images, models: whatever is missing is made. Then the chart is installed."""
    local = use_cluster()
    venv = vllm_venv.ensure()
    images = build_images(local=local)
    models = make_models(venv)
    asyncio.run(install_chart(images))
    return Environment(images, models, venv)


def print_env() -> None:
    """Exports for a shell: the cluster that `use_cluster` takes, without starting one."""
    foreign = os.environ.get("KUBECONFIG")
    if not foreign or _is_local(foreign):
        print(run(*_devcluster("env")), end="")


def main(what: str) -> int:
    """`cluster`, `all` or `env`."""
    try:
        if what == "env":
            print_env()
        elif what == "cluster":
            use_cluster()
        else:
            prepare()
    except (SetupError, vllm_venv.VenvError) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


def folders(models: Path) -> Sequence[Path]:
    """The folders of all versions, in order."""
    return [models / ("base" if version == 0 else f"step-{version}") for version in range(CHECKPOINTS + 1)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
