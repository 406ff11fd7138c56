"""The objects of the demo as plain data, for real engines on the CPU and for simulated ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

API_VERSION = "rollfleet.io/v1alpha1"
SERVED_NAME = "policy"


@dataclass(frozen=True)
class EngineKind:
    """What runs in the engines' pods, and what it needs from the node."""

    image: str
    models: Path  # on the node: base/, step-1/, step-2/, ...
    venv: Path | None = None  # on the node: the environment with vLLM for the CPU; None for simulated engines
    npus: int = 1
    token_ms: float = 5.0  # pace of simulated engines
    start_delay_s: float = 0.0  # how long a simulated engine loads
    slow: bool = False  # whether each step of an update of simulated engines takes a second

    @property
    def simulated(self) -> bool:
        """Whether these are simulated engines."""
        return self.venv is None


def _host_path(path: Path) -> dict[str, Any]:
    return {"hostPath": {"path": str(path)}}


def _env(kind: EngineKind) -> list[dict[str, str]]:
    if kind.venv is None:
        return [
            {"name": "ROLLFLEET_ENGINE", "value": "simulator"},
            {"name": "ROLLFLEET_SIMULATOR_TOKEN_MS", "value": str(kind.token_ms)},
            {"name": "ROLLFLEET_SIMULATOR_STARTUP_SECONDS", "value": str(kind.start_delay_s)},
            {"name": "ROLLFLEET_SIMULATOR_STEP_SECONDS", "value": "1" if kind.slow else "0"},
        ]
    return [
        {"name": "PATH", "value": f"{kind.venv}/bin:/usr/local/bin:/usr/bin:/bin"},
        {"name": "VLLM_TARGET_DEVICE", "value": "cpu"},
        {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"},
    ]


def rollout_engine(name: str, namespace: str, kind: EngineKind, replicas: int, **spec: Any) -> dict[str, Any]:
    """A fleet; further fields of the spec by keyword."""
    volumes: dict[str, Any] = {"model": _host_path(kind.models), "checkpoints": _host_path(kind.models)}
    if kind.venv is not None:
        volumes["extra"] = [{"name": "vllm", "mountPath": str(kind.venv), "source": _host_path(kind.venv)}]
    args = [] if kind.simulated else ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
    memory = "512Mi" if kind.simulated else "6Gi"
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutEngine",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "mode": "Disaggregated",
            "image": kind.image,
            "imagePullPolicy": "IfNotPresent",
            "model": {"path": "base", "servedName": SERVED_NAME},
            "volumes": volumes,
            "accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": kind.npus},
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": memory}},
            "env": _env(kind),
            "engine": {"args": args},
            "router": {"mode": "Enabled", "replicas": 1, "policy": "round_robin"},
            "startup": {"timeoutSeconds": 600},
            "drainTimeoutSeconds": 10,
            **spec,
        },
    }


def weight_version(fleet: str, namespace: str, version: int, path: str, **spec: Any) -> dict[str, Any]:
    """The weights that the fleet must hold."""
    return {
        "apiVersion": API_VERSION,
        "kind": "WeightVersion",
        "metadata": {"name": f"{fleet}-policy", "namespace": namespace},
        "spec": {
            "engineRef": {"name": fleet},
            "version": version,
            "step": path,
            "source": {"type": "Checkpoint", "checkpoint": {"path": path}},
            **spec,
        },
    }
