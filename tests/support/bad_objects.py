"""Objects of our kinds that an API server refuses, each with words of the refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from tests.support.kubectl import Object

Change = Callable[[Object], Any]


def fleet(namespace: str, name: str = "qwen", **spec: Any) -> Object:
    """A legal fleet without pods."""
    kind = EngineKind("engine:1", Path("/models"), npus=1)
    return rollout_engine(name, namespace, kind, 0, **spec)


def version(namespace: str, number: int = 1, **spec: Any) -> Object:
    """A legal WeightVersion of the fleet "qwen"."""
    return weight_version("qwen", namespace, number, f"step-{number}", **spec)


def setting(path: str, value: Any) -> Change:
    """A change of one field, by its dotted path."""

    def change(document: Object) -> None:
        *parents, last = path.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else place[int(parent)]
        place[last] = value

    return change


EXTRA = "spec.volumes.extra"
CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


def extra(name: str, mount_path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": mount_path, "source": CLAIM}


def fields(**wanted: Any) -> Change:
    """Several fields of the spec at once."""

    def change(document: dict[str, Any]) -> None:
        document["spec"].update(wanted)

    return change


BAD_FLEETS = {
    "unknown field": (setting("spec.replica", 1), 'unknown field "spec.replica"'),
    "ipc with Disaggregated": (
        setting("spec.weightTransfer", {"backend": "ipc"}),
        "spec.weightTransfer.backend ipc and shm need spec.mode Colocated",
    ),
    "hccl with Colocated": (
        fields(mode="Colocated", sleepMode="Enabled", weightTransfer={"backend": "hccl"}),
        "spec.weightTransfer.backend hccl needs spec.mode Disaggregated",
    ),
    "consent without handles": (
        setting("spec.weightTransfer", {"backend": "hccl", "insecureSerialization": "Allowed"}),
        "spec.weightTransfer.insecureSerialization may be Allowed for backend ipc of mode Colocated only",
    ),
    "a backend of others": (
        setting("spec.weightTransfer", {"backend": "nccl"}),
        'spec.weightTransfer.backend: Unsupported value: "nccl"',
    ),
    "Colocated without sleep": (setting("spec.mode", "Colocated"), "spec.sleepMode must be Enabled"),
    "cleanup without sleep": (
        setting("spec.rlConfig", {"sleepModeExtraCleanup": True}),
        "spec.rlConfig.sleepModeExtraCleanup needs spec.sleepMode Enabled",
    ),
    "a key that rl_config does not have": (
        setting("spec.rlConfig.refresh", True),
        'unknown field "spec.rlConfig.refresh"',
    ),
    "a word for a boolean": (setting("spec.rlConfig.enabled", "yes"), "spec.rlConfig.enabled: Invalid value"),
    "tools without chat": (
        setting("spec.features", {"tokenEndpoint": "TokensOnly", "toolCalling": {"parser": "hermes"}}),
        "spec.features.tokenEndpoint TokensOnly excludes spec.features.toolCalling",
    ),
    "traces without an endpoint": (
        setting("spec.features", {"traceReplay": "Enabled"}),
        "spec.features.traceReplay needs spec.features.tokenEndpoint",
    ),
    "a mode of log-probabilities": (
        setting("spec.features", {"logprobs": {"mode": "raw"}}),
        "spec.features.logprobs.mode: Unsupported value",
    ),
    "more workers than devices": (
        fields(parallelism={"tensor": 4, "data": 2}, accelerator={"perPod": 4}),
        "spec.parallelism: tensor x pipeline x data must not exceed spec.accelerator.perPod",
    ),
    "ranks on several nodes": (
        fields(parallelism={"tensor": 2, "data": 2, "nodes": 2}),
        "spec.parallelism.data must be 1 where spec.parallelism.nodes is more",
    ),
    "workers that nodes cannot share": (
        fields(parallelism={"tensor": 4, "nodes": 3}),
        "spec.parallelism: tensor x pipeline must be divisible by nodes",
    ),
    "handles between nodes": (
        fields(
            parallelism={"tensor": 2, "nodes": 2},
            mode="Colocated",
            sleepMode="Enabled",
            weightTransfer={"backend": "shm"},
        ),
        "spec.weightTransfer.backend ipc and shm need spec.parallelism.nodes 1",
    ),
    "nodes as a flag": (setting("spec.engine.args", ["--nnodes", "2"]), "has a field: spec.parallelism"),
    "tensor as a flag": (setting("spec.engine.args", ["--tensor-parallel-size", "2"]), "has a field: spec.parallelism"),
    "sleep as a flag": (setting("spec.engine.args", ["--enable_sleep_mode"]), "has a field: spec.sleepMode"),
    "a key of JSON as a flag": (
        setting("spec.engine.args", ["--additional-config.rl_config.enabled=true"]),
        "has a field: spec.engine.additionalConfig",
    ),
    "tools as a flag": (
        setting("spec.engine.args", ["--tool-call-parser=x"]),
        "has a field: spec.features.toolCalling",
    ),
    "a flag that nobody has": (setting("spec.engine.args", ["--dp-routing-config", "x"]), "X-data-parallel-rank"),
    "a misspelt claim": (
        setting("spec.volumes.model", {"persistentVolumeClaim": {"claim": "c"}}),
        'unknown field "spec.volumes.model.persistentVolumeClaim.claim"',
    ),
    "replicas -1": (setting("spec.replicas", -1), "spec.replicas: Invalid value: -1"),
    "replicas as text": (setting("spec.replicas", "four"), "spec.replicas: Invalid value"),
    "a mode of others": (setting("spec.mode", "Hybrid"), 'spec.mode: Unsupported value: "Hybrid"'),
    "no image": (lambda document: document["spec"].pop("image"), "spec.image: Required value"),
    "no model": (lambda document: document["spec"].pop("model"), "spec.model: Required value"),
    "model path with ..": (setting("spec.model.path", "../secrets"), "spec.model.path must be relative"),
    "absolute model path": (setting("spec.model.path", "/etc"), "spec.model.path must be relative"),
    "volume with two sources": (
        setting("spec.volumes.model", {**CLAIM, "hostPath": {"path": "/m"}}),
        "spec.volumes.model: Invalid value",
    ),
    "volume with no source": (setting("spec.volumes.model", {}), "spec.volumes.model: Invalid value"),
    "host path with ..": (setting("spec.volumes.model", {"hostPath": {"path": "/a/../b"}}), "hostPath.path must not"),
    "same name twice": (setting(EXTRA, [extra("a", "/x"), extra("a", "/y")]), "spec.volumes.extra[1]: Duplicate value"),
    "same mount twice": (setting(EXTRA, [extra("a", "/x"), extra("b", "/x")]), "mountPath is used twice"),
    "mount under ours": (setting(EXTRA, [extra("a", "/rollfleet/model")]), "mountPath must not cover or lie under"),
    "mount under our home": (
        setting(EXTRA, [extra("a", "/var/lib/rollfleet/x")]),
        "mountPath must not cover or lie under",
    ),
    "mount over ours": (setting(EXTRA, [extra("a", "/etc")]), "mountPath must not cover or lie under"),
    "mount of the root": (setting(EXTRA, [extra("a", "/")]), "spec.volumes.extra[0].mountPath: Invalid value"),
    "same variable twice": (
        setting("spec.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "spec.env[1]: Duplicate value",
    ),
    "our own variable": (setting("spec.env", [{"name": "PYTHONPATH", "value": "/x"}]), "spec.env must not set"),
    "a flag round the guard": (setting("spec.engine.args", ["--middleware=x.Y"]), "spec.engine.args must not set"),
    "a flag of the spec": (setting("spec.engine.args", ["--served_model_name", "x"]), "spec.engine.args must not set"),
    "negative devices": (setting("spec.accelerator.perPod", -1), "spec.accelerator.perPod: Invalid value: -1"),
    "a resource without domain": (setting("spec.accelerator.resourceName", "npu"), "spec.accelerator.resourceName"),
    "devices named twice": (
        setting("spec.resources", {"limits": {"huawei.com/Ascend910": 1}}),
        "spec.resources must not name spec.accelerator.resourceName",
    ),
    "a router policy of another router": (
        setting("spec.router.policy", "fastest"),
        "spec.router.policy: Unsupported value",
    ),
    "Hold without bounds": (
        setting("spec.router.whenClosed", {"type": "Hold"}),
        "spec.router.whenClosed.hold must be set if, and only if, spec.router.whenClosed.type is Hold",
    ),
    "bounds of nothing": (
        setting("spec.router.whenClosed", {"type": "Reject", "hold": {"seconds": 5}}),
        "spec.router.whenClosed.hold must be set if, and only if, spec.router.whenClosed.type is Hold",
    ),
    "no rank": (setting("spec.parallelism.data", 0), "spec.parallelism.data: Invalid value: 0"),
    "ranks as a flag": (setting("spec.engine.args", ["--data-parallel-size=2"]), "spec.engine.args must not set"),
    "a name too long for pods": (setting("metadata.name", "q" * 41), "metadata.name must start with a letter"),
    "a name that no Service may have": (setting("metadata.name", "7b"), "metadata.name must start with a letter"),
}

BAD_VERSIONS = {
    "version 0": (setting("spec.version", 0), "spec.version: Invalid value: 0"),
    "path with ..": (
        setting("spec.source.checkpoint.path", "a/../../b"),
        "spec.source.checkpoint.path must be relative",
    ),
    "absolute path": (setting("spec.source.checkpoint.path", "/a"), "spec.source.checkpoint.path must be relative"),
    "path with an empty segment": (
        setting("spec.source.checkpoint.path", "a//b"),
        "spec.source.checkpoint.path must be",
    ),
    "Checkpoint without checkpoint": (
        lambda document: document["spec"]["source"].pop("checkpoint"),
        "spec.source.checkpoint must be set if, and only if, spec.source.type is Checkpoint",
    ),
    "a source that is not built": (
        setting("spec.source", {"type": "Delta"}),
        'spec.source.type: Unsupported value: "Delta"',
    ),
    "a trainer beside a checkpoint": (
        setting("spec.source.trainer", {}),
        "spec.source.trainer is only for spec.source.type Trainer",
    ),
    "a copy of a checkpoint": (
        setting("spec.recovery", {"checkpoint": {"path": "copy"}}),
        "spec.recovery is only for spec.source.type Trainer",
    ),
    "a copy of a version that nobody has asked for": (
        setting("spec.stored", {"version": 2**40, "checkpoint": {"path": "copy"}}),
        "spec.stored.version must not exceed spec.version",
    ),
    "no fleet": (lambda document: document["spec"].pop("engineRef"), "spec.engineRef: Required value"),
    "a pause mode that vLLM has not": (
        setting("spec.pause.mode", "drop"),
        'spec.pause.mode: Unsupported value: "drop"',
    ),
    "waiting for longer than quiescing may take": (
        setting("spec.pause", {"mode": "wait", "drainTimeoutSeconds": 120}),
        "spec.pause.drainTimeoutSeconds must be less than spec.deadlines.quiesceSeconds",
    ),
    "strategy that does not exist": (
        setting("spec.strategy.type", "Sideways"),
        "spec.strategy.type: Unsupported value",
    ),
    "a batch of a strategy without any": (
        setting("spec.strategy", {"type": "Atomic", "rolling": {"maxUnavailable": 2}}),
        "spec.strategy.rolling is only for spec.strategy.type Rolling",
    ),
    "a batch of nobody": (
        setting("spec.strategy", {"type": "Rolling", "rolling": {"maxUnavailable": 0}}),
        "spec.strategy.rolling.maxUnavailable",
    ),
    "one probe token": (setting("spec.verify.probe.tokens", [1]), "spec.verify.probe.tokens"),
    "a negative token": (
        setting("spec.verify.probe.tokens", [1, -2]),
        "spec.verify.probe.tokens[1]: Invalid value: -2",
    ),
    "expected logprobs of another number": (
        setting("spec.verify.probe", {"tokens": [1, 2, 3], "expectedLogprobs": ["-1.5"]}),
        "spec.verify.probe.expectedLogprobs has one value for each of spec.verify.probe.tokens after the first",
    ),
    "an expected probability above one": (
        setting("spec.verify.probe", {"tokens": [1, 2], "expectedLogprobs": ["0.5"]}),
        "spec.verify.probe.expectedLogprobs[0]",
    ),
    "a deadline of nothing": (
        setting("spec.deadlines.transferSeconds", 0),
        "spec.deadlines.transferSeconds: Invalid value",
    ),
    "attempts of a policy without any": (
        setting("spec.onFailure", {"type": "Hold", "maxAttempts": 2}),
        "spec.onFailure.maxAttempts is only for spec.onFailure.type Retry",
    ),
    "no engine serving": (setting("spec.minServing", 0), "spec.minServing"),
    "a label that steers a terminal": (setting("spec.step", "\x1b[2J"), "spec.step"),
    "a request of two lines": (setting("spec.retryRequest", "a\nb"), "spec.retryRequest"),
}
