"""The engines of `make bench-loops`: two of a fleet behind their guards, and two vLLM servers without one, all in pods.

Both kinds have the same image, environment with vLLM, model, arguments and resources. The guard refuses vLLM's own
control routes to whoever is not the sender of an update of the fleet's, so one process cannot be both.
"""

import json
from pathlib import Path
from typing import Any

from examples.demo.environment import ROOT, Environment
from examples.demo.fleet import Fleet
from examples.demo.kubectl import apply, kubectl, until
from examples.demo.manifests import SERVED_NAME, rollout_engine
from tests.bench.plain_words import BACKEND
from tests.e2e.training import create

ENGINES = 2
START_S = 600.0
PORT = 8000
EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a pod
MODEL_DIR = "/rollfleet/model"
HELD = {"type": "Hold", "hold": {"seconds": 60}}  # as vLLM's servers do while they are paused


def plain_pod(name: str, namespace: str, environment: Environment, models: Path) -> dict[str, Any]:
    """A vLLM server as its documentation has it for RL: development routes on, nothing in front."""
    spec = rollout_engine(name, namespace, environment.real(), 1)["spec"]
    venv = str(environment.venv)
    command = [
        *(f"{venv}/bin/python3", "-m", "vllm.entrypoints.openai.api_server"),
        *(
            "--model",
            f"{MODEL_DIR}/base",
            "--served-model-name",
            SERVED_NAME,
            "--host",
            EVERYWHERE,
            "--port",
            str(PORT),
        ),
        *("--disable-uvicorn-access-log", *spec["engine"]["args"]),
        *("--worker-extension-cls", "tests.bench.plain_transfer.PlainExtension"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
    ]
    # The image has the product's packages there; this file's neighbours come after them.
    own = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"/opt/rollfleet/site:{ROOT}"}
    own |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}  # as the launcher does on CPUs
    paths = {"model": (models, MODEL_DIR), "vllm": (environment.venv, venv), "bench": (ROOT, str(ROOT))}
    container: dict[str, Any] = {
        "name": "engine",
        "image": spec["image"],
        "imagePullPolicy": spec["imagePullPolicy"],
        "command": command,
        "env": [*spec["env"], *({"name": key, "value": value} for key, value in own.items())],
        "resources": spec["resources"],
        "startupProbe": {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": 2,
            "failureThreshold": int(START_S / 2),
        },
        "volumeMounts": [{"name": key, "mountPath": there, "readOnly": True} for key, (_, there) in paths.items()],
    }
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # vLLM's processes talk through it
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    volumes += [{"name": key, "hostPath": {"path": str(here)}} for key, (here, _) in paths.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [container], "volumes": volumes, "restartPolicy": "Never"},
    }


async def start(fleet: Fleet, environment: Environment, models: Path, checkpoints: Path) -> tuple[list[str], list[str]]:
    """Where the fleet's engines serve, and where the others do. The fleet's namespace has all of them."""
    await create(fleet, environment, checkpoints, models, "float32", whenClosed=HELD)
    names = [f"plain-{number}" for number in range(ENGINES)]
    for name in names:
        await apply(plain_pod(name, fleet.namespace, environment, models))
    await fleet.serving(ENGINES)
    guarded = [pod["status"]["podIP"] for pod in await fleet.pods()]
    plain = [await _running(name, fleet.namespace) for name in names]
    return [f"http://{ip}:{PORT}" for ip in guarded], [f"http://{ip}:{PORT}" for ip in plain]


async def _running(name: str, namespace: str) -> str:
    """Its address, once it answers. RuntimeError with its last words where it has ended."""

    def is_decided(pod: dict[str, Any]) -> bool:
        status = pod.get("status", {})
        ready = any(each["ready"] for each in status.get("containerStatuses", ()))
        return ready or status.get("phase") == "Failed"

    pod = await until("pod", name, namespace, is_decided, START_S)
    if pod["status"]["phase"] == "Failed":
        raise RuntimeError(f"{name}: {await kubectl('logs', name, '-n', namespace, '--tail=20')}")
    return str(pod["status"]["podIP"])
