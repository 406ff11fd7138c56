"""Our kinds at a real API server: what it refuses and in which words, what it keeps, and how kubectl prints it."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from tests.support.crds import installed_crds, no_operator, temporary_namespace
from tests.support.kubectl import KubectlError, Object, get, kubectl
from tests.support.objects import full_fleet_status, full_weight_version_status

pytestmark = pytest.mark.integration
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
Change = Callable[[Object], Any]


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    with no_operator(), installed_crds(), temporary_namespace("crd") as name:
        yield name


def fleet(namespace: str, name: str = "qwen", **spec: Any) -> Object:
    """A legal fleet without pods."""
    kind = EngineKind("engine:1", Path("/models"), npus=1)
    return rollout_engine(name, namespace, kind, 0, **spec)


def version(namespace: str, number: int = 1, **spec: Any) -> Object:
    """A legal WeightVersion of the fleet "qwen"."""
    return weight_version("qwen", namespace, number, f"step-{number}", **spec)


def apply(document: Object, *, dry_run: bool = True) -> None:
    kubectl("apply", *(["--dry-run=server"] if dry_run else []), "-f", "-", manifest=document)


def refusal(document: Object) -> str:
    with pytest.raises(KubectlError) as caught:
        apply(document)
    return str(caught.value)


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
        setting("spec.source.type", "Trainer"),
        'spec.source.type: Unsupported value: "Trainer"',
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


def test_legal_objects_are_taken(namespace: str) -> None:
    """Else every refusal below could have another cause."""
    apply(fleet(namespace))
    apply(version(namespace))
    for example in EXAMPLES:
        kubectl("apply", "--dry-run=server", "--namespace", namespace, "-f", str(example))
    assert EXAMPLES


@pytest.mark.parametrize("case", BAD_FLEETS)
def test_bad_fleet_is_refused_by_field(namespace: str, case: str) -> None:
    change, words = BAD_FLEETS[case]
    document = fleet(namespace)
    change(document)
    assert words in refusal(document)


@pytest.mark.parametrize("case", BAD_VERSIONS)
def test_bad_version_is_refused_by_field(namespace: str, case: str) -> None:
    change, words = BAD_VERSIONS[case]
    document = version(namespace)
    change(document)
    assert words in refusal(document)


FORBIDDEN_CHANGES = {
    "version lowered": (setting("spec.version", 4), "spec.version only rises"),
    "source without version": (
        setting("spec.source.checkpoint.path", "step-9"),
        "spec.source changes only together with a higher spec.version",
    ),
    "another fleet": (setting("spec.engineRef.name", "other"), "spec.engineRef cannot change"),
}
ALLOWED_CHANGES = {
    "version with source": lambda document: (
        setting("spec.version", 6)(document),
        setting("spec.source.checkpoint.path", "step-6")(document),
    ),
    "version with the same source": setting("spec.version", 6),
    "deadline alone": setting("spec.deadlines", {"prepareSeconds": 5}),
    "step alone": setting("spec.step", "2100"),
    "another strategy": setting("spec.strategy", {"type": "Rolling", "rolling": {"maxUnavailable": 2}}),
    "a retry request": setting("spec.retryRequest", "folder put back"),
    "what follows a failure": setting("spec.onFailure", {"type": "Retry", "maxAttempts": 5}),
}


@pytest.fixture(scope="module")
def at_five(namespace: str) -> Object:
    document = version(namespace, 5)
    document["metadata"]["name"] = "at-five"
    apply(document, dry_run=False)
    return document


@pytest.mark.parametrize("case", FORBIDDEN_CHANGES)
def test_forbidden_change_is_refused_by_field(at_five: Object, case: str) -> None:
    change, words = FORBIDDEN_CHANGES[case]
    document = copy.deepcopy(at_five)
    change(document)
    assert words in refusal(document)


@pytest.mark.parametrize("case", ALLOWED_CHANGES)
def test_allowed_change_is_taken(at_five: Object, case: str) -> None:
    document = copy.deepcopy(at_five)
    ALLOWED_CHANGES[case](document)
    apply(document)


def test_every_word_about_the_launch_is_taken_and_kept(namespace: str) -> None:
    words = {
        "mode": "Colocated",
        "sleepMode": "Enabled",
        "rlConfig": {
            "enabled": True,
            "sleepModeExtraCleanup": True,
            "enableTrainingConsistency": True,
            "enableBatchInvariant": True,
        },
        "weightTransfer": {"backend": "ipc", "insecureSerialization": "Allowed"},
        "features": {
            "tokenEndpoint": "Enabled",
            "routedExperts": "Enabled",
            "traceReplay": "Enabled",
            "toolCalling": {"parser": "hermes"},
            "logprobs": {"mode": "processed_logprobs", "max": -1},
        },
        "parallelism": {"tensor": 4, "pipeline": 1, "data": 2, "nodes": 1, "expert": "Enabled"},
        "accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": 8},
        "engine": {
            "args": ["--max-model-len", "1024"],
            "additionalConfig": {"eplb_config": {"dynamic_eplb": True}},
            "compilationConfig": {"cudagraph_capture_sizes": [1, 2]},
        },
    }
    document = fleet(namespace, "launch")
    document["spec"].update(words)
    apply(document, dry_run=False)
    kept = get("roe", "launch", namespace)["spec"]
    assert {name: kept[name] for name in words} == words


def test_defaults_are_filled_in(namespace: str) -> None:
    document = fleet(namespace, "defaults")
    for name in ("mode", "accelerator", "router", "startup", "drainTimeoutSeconds"):
        del document["spec"][name]
    apply(document, dry_run=False)
    spec = get("roe", "defaults", namespace)["spec"]
    assert spec["mode"] == "Disaggregated"
    assert spec["accelerator"] == {"perPod": 8}
    assert spec["router"] == {
        "mode": "Enabled",
        "replicas": 1,
        "policy": "cache_aware",
        "whenClosed": {"type": "Reject"},
    }
    assert spec["rlConfig"] == {
        "enabled": True,
        "sleepModeExtraCleanup": False,
        "enableTrainingConsistency": False,
        "enableBatchInvariant": False,
    }
    assert spec["sleepMode"] == "Disabled"
    assert spec["parallelism"] == {"tensor": 1, "pipeline": 1, "data": 1, "nodes": 1, "expert": "Disabled"}
    assert spec["features"] == {"tokenEndpoint": "Disabled", "routedExperts": "Disabled", "traceReplay": "Disabled"}
    assert "weightTransfer" not in spec
    assert spec["startup"] == {"timeoutSeconds": 1800, "restartBudget": 5}
    assert spec["drainTimeoutSeconds"] == 60


def test_defaults_of_a_version_are_filled_in(namespace: str, at_five: Object) -> None:
    spec = get("wv", at_five["metadata"]["name"], namespace)["spec"]
    assert spec["verify"]["probe"] == {"tokens": [1, 2, 3, 5, 7, 11], "maxAbsLogprobDiff": "0.001"}
    assert spec["pause"] == {"mode": "abort", "drainTimeoutSeconds": 60}
    assert spec["strategy"] == {"type": "Atomic"}
    assert spec["deadlines"]["prepareSeconds"] == 600
    assert (spec["onFailure"], spec["minServing"]) == ({"type": "Retry"}, 1)


@pytest.mark.parametrize(
    ("kind", "make", "status"),
    [
        ("roe", lambda namespace: fleet(namespace, "round-trip"), full_fleet_status()),
        ("wv", version, full_weight_version_status()),
    ],
    ids=["roe", "wv"],
)
def test_c31_every_status_field_survives_a_read_back(namespace: str, kind: str, make: Any, status: Any) -> None:
    document = make(namespace)
    apply(document, dry_run=False)
    name = document["metadata"]["name"]
    written = status.dump()
    read = get(kind, name, namespace)
    kubectl("replace", "--subresource=status", "-f", "-", manifest={**read, "status": written})
    after = get(kind, name, namespace)
    assert after["status"] == written
    assert type(status).model_validate(after["status"]) == status
    assert after["metadata"]["generation"] == read["metadata"]["generation"], "a status write is no change of spec"


def test_spec_writes_do_not_touch_status(namespace: str) -> None:
    document = fleet(namespace, "no-status")
    document["status"] = full_fleet_status().dump()
    apply(document, dry_run=False)
    assert "status" not in get("roe", "no-status", namespace)


def test_columns_short_names_and_category(namespace: str) -> None:
    """One `kubectl get` for people: both kinds by short name, and all of them by category."""
    apply(fleet(namespace, "columns"), dry_run=False)
    read = get("roe", "columns", namespace)
    kubectl("replace", "--subresource=status", "-f", "-", manifest={**read, "status": full_fleet_status().dump()})
    header, row = kubectl("get", "roe", "columns", "--namespace", namespace).splitlines()
    assert header.split() == ["NAME", "MODE", "DESIRED", "SERVING", "VERSION", "STATE", "AGE"]
    assert row.split()[:6] == ["columns", "Disaggregated", "0", "2", "42", "CheckpointIncomplete"]
    document = version(namespace)
    document["metadata"]["name"] = "columns"
    apply(document, dry_run=False)
    read = get("wv", "columns", namespace)
    kubectl(
        "replace", "--subresource=status", "-f", "-", manifest={**read, "status": full_weight_version_status().dump()}
    )
    header, row = kubectl("get", "wv", "columns", "--namespace", namespace).splitlines()
    assert header.split() == ["NAME", "VERSION", "COMMITTED", "PHASE", "ENGINES", "PAUSED", "AGE", "REASON", "MESSAGE"]
    assert row.split()[:6] == ["columns", "1", "41", "Verifying", "1/2", "0.406"]
    listed = kubectl("get", "rollfleet", "--namespace", namespace, "--output", "name").split()
    assert {"rolloutengine.rollfleet.io/columns", "weightversion.rollfleet.io/columns"} <= set(listed)


def test_scale_subresource(namespace: str) -> None:
    apply(fleet(namespace, "scaled"), dry_run=False)
    kubectl("scale", "roe", "scaled", "--namespace", namespace, "--replicas", "3")
    assert get("roe", "scaled", namespace)["spec"]["replicas"] == 3
    with pytest.raises(KubectlError, match=r"replicas"):
        kubectl("scale", "roe", "scaled", "--namespace", namespace, "--replicas", "2000")


def test_explain_tells_what_a_field_is(namespace: str) -> None:
    assert "only rises" in kubectl("explain", "wv.spec.version")
    assert "Which weights the fleet serves" in kubectl("explain", "roe.status.committed")
