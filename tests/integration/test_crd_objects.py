"""Our kinds at a real API server: what it refuses and in which words, what it keeps, and how kubectl prints it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_objects import BAD_FLEETS, BAD_VERSIONS, fleet, setting, version
from tests.support.crds import installed_crds, no_operator, temporary_namespace
from tests.support.kubectl import KubectlError, Object, get, kubectl
from tests.support.objects import full_fleet_status, full_weight_version_status

pytestmark = pytest.mark.integration
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))  # and what stands beside fleets


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    with no_operator(), installed_crds(), temporary_namespace("crd") as name:
        yield name


def apply(document: Object, *, dry_run: bool = True) -> None:
    kubectl("apply", *(["--dry-run=server"] if dry_run else []), "-f", "-", manifest=document)


def refusal(document: Object) -> str:
    with pytest.raises(KubectlError) as caught:
        apply(document)
    return str(caught.value)


def test_legal_objects_are_taken(namespace: str) -> None:
    """Else every refusal below could have another cause."""
    apply(fleet(namespace))
    apply(version(namespace))
    for example in EXAMPLES:
        kubectl("apply", "--dry-run=server", "--namespace", namespace, "-f", str(example))
    assert {"examples", "hccl", "ipc"} <= {example.parent.name for example in EXAMPLES}


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
