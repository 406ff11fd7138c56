"""The objects that a fleet owns."""

import json
from typing import Any

import kubernetes_validate
import pytest

from rollfleet_operator.api.launch import (
    EngineOptions,
    Features,
    InsecureSerialization,
    Logprobs,
    Parallelism,
    RlConfig,
    SleepMode,
    Switch,
    ToolCalling,
    WeightTransfer,
)
from rollfleet_operator.api.rolloutengine import (
    EnvVar,
    Hold,
    Model,
    Router,
    RouterMode,
    Startup,
    WhenClosed,
    WhenClosedType,
)
from rollfleet_operator.api.volumes import ExtraVolume, Volumes, VolumeSource
from rollfleet_operator.core.actions import ApplyObject, DeleteObject
from rollfleet_operator.core.objects.common import content_hash
from rollfleet_operator.core.objects.network_policy import build_network_policy
from rollfleet_operator.core.objects.pod import build_pod, engine_config, template_hash
from rollfleet_operator.core.objects.router import build_router
from rollfleet_operator.core.objects.services import build_client, build_headless
from rollfleet_operator.core.plan_children import plan_children
from rollfleet_protocol.engine_config import (
    DEVICES_VARIABLE,
    ENGINE_CONFIG_ENV,
    POD_UID_ENV,
    EngineConfig,
)
from rollfleet_protocol.launch_settings import FleetMode, LogprobsMode, TokenEndpoint, TransferBackend
from tests.support.builders import make_claim, make_fleet, make_observed, make_settings

SETTINGS = make_settings()
LOCKED = make_settings(operator_namespace="rollfleet-system", operator_pods=(("app.kubernetes.io/name", "rollfleet"),))


def pod(**spec: Any) -> dict[str, Any]:
    return build_pod(make_fleet(**spec), SETTINGS, 1, "qwen-1-0-abcdef")


def container(**spec: Any) -> dict[str, Any]:
    (found,) = pod(**spec)["spec"]["containers"]
    return dict(found)


def plain(env: list[dict[str, Any]]) -> dict[str, str]:
    """The variables whose values are written down."""
    return {each["name"]: each["value"] for each in env if "value" in each}


def every_object() -> list[dict[str, Any]]:
    fleet = make_fleet()
    policy = build_network_policy(fleet, LOCKED)
    return [pod(), build_headless(fleet), build_client(fleet), *build_router(fleet, SETTINGS), policy]


@pytest.mark.parametrize("manifest", every_object(), ids=lambda manifest: manifest["kind"])
def test_everything_is_owned_by_the_fleet_and_carries_its_label(manifest: dict[str, Any]) -> None:
    (owner,) = manifest["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "rollfleet.io/v1alpha1",
        "kind": "RolloutEngine",
        "name": "qwen",
        "uid": "fleet-uid",
        "controller": True,
        "blockOwnerDeletion": False,
    }
    assert manifest["metadata"]["labels"]["rollfleet.io/fleet"] == "qwen"
    assert manifest["metadata"]["namespace"] == "rl"
    assert "finalizers" not in manifest["metadata"]
    assert json.loads(json.dumps(manifest)) == manifest


@pytest.mark.parametrize("manifest", every_object(), ids=lambda manifest: manifest["kind"])
@pytest.mark.parametrize("version", ["1.33", "1.36"])
def test_every_object_holds_to_kubernetes_own_schema(manifest: dict[str, Any], version: str) -> None:
    """Unknown fields are errors; 1.33 is the oldest release that is supported."""
    kubernetes_validate.validate(manifest, version, strict=True)


def pod_specs() -> list[dict[str, Any]]:
    fleet = make_fleet()
    return [pod()["spec"], build_router(fleet, SETTINGS)[-1]["spec"]["template"]["spec"]]


@pytest.mark.parametrize("spec", pod_specs(), ids=["engine", "router"])
def test_pods_are_safe_by_default(spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in spec["containers"]:
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in each["securityContext"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "tolerations"} & set(spec)


def test_the_launcher_is_told_whose_engine_it_starts() -> None:
    given = {"model": Model(path="models/Qwen3", served_name="policy"), "drain_timeout_seconds": 20}
    env = plain(container(**given)["env"])
    config = EngineConfig.model_validate_json(env[ENGINE_CONFIG_ENV])
    assert config.fleet.audience("pod-uid") == "rollfleet.io/rl/qwen/fleet-uid/pod-uid"
    assert config.operator.subject == "system:serviceaccount:rollfleet:rollfleet-operator"
    assert config.operator.uid == "operator-uid"
    assert config.model.path == "/rollfleet/model/models/Qwen3"
    assert config.checkpoints_path == "/rollfleet/checkpoints"
    assert config.drain_timeout_seconds == 20


def test_a_model_that_is_the_volume_itself() -> None:
    env = plain(container(model=Model(path=".", served_name="p"))["env"])
    assert EngineConfig.model_validate_json(env[ENGINE_CONFIG_ENV]).model.path == "/rollfleet/model"


def test_a_user_sets_variables_but_not_ours() -> None:
    own = {ENGINE_CONFIG_ENV: "{}", DEVICES_VARIABLE: "Ascend910-7", POD_UID_ENV: "another-pod"}
    given = {"A": "1", **own}
    env = container(env=tuple(EnvVar(name=name, value=value) for name, value in given.items()))["env"]
    assert len({each["name"] for each in env}) == len(env)
    values = plain(env)
    assert values["A"] == "1"
    assert values[ENGINE_CONFIG_ENV] != "{}"
    assert not {DEVICES_VARIABLE, POD_UID_ENV} & set(values)
    pod = {"name": POD_UID_ENV, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid", "apiVersion": "v1"}}}
    assert [each for each in env if each["name"] == POD_UID_ENV] == [pod]


@pytest.mark.parametrize(("timeout_s", "failures"), [(10, 5), (11, 6), (1800, 900)])
def test_c06_the_kubelet_waits_for_the_whole_start_up_budget(timeout_s: int, failures: int) -> None:
    found = container(startup=Startup(timeout_seconds=timeout_s))
    probe = found["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (2, failures)
    assert probe["periodSeconds"] * probe["failureThreshold"] >= timeout_s
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert found[name]["httpGet"] == {"path": "/livez", "port": "serving", "scheme": "HTTP"}


def test_stopping_leaves_time_to_drain() -> None:
    found = pod(drain_timeout_seconds=90)
    assert found["spec"]["terminationGracePeriodSeconds"] == 120
    command = found["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python3", "-m", "rollfleet_engine.prestop"]


def test_data_is_mounted_read_only_and_every_mount_has_its_volume() -> None:
    host = VolumeSource(host_path={"path": "/opt/venv"})
    csi = VolumeSource(csi={"driver": "nfs.example"})
    extra = (ExtraVolume(name="venv", mount_path="/venv", source=host),)
    found = pod(volumes=Volumes(model=make_claim("models"), checkpoints=csi, extra=extra))["spec"]
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    mounts = {mount["name"]: mount for mount in found["containers"][0]["volumeMounts"]}
    assert set(volumes) == set(mounts)
    for name in ("model", "checkpoints", "extra-venv", "tls"):
        assert mounts[name]["readOnly"] is True
    assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["checkpoints"]["csi"] == {"driver": "nfs.example", "readOnly": True}
    assert volumes["extra-venv"]["hostPath"] == {"path": "/opt/venv", "type": "Directory"}
    assert volumes["tls"]["secret"]["secretName"] == "qwen-engine-tls"
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert (mounts["shm"]["mountPath"], mounts["run"]["mountPath"]) == ("/dev/shm", "/run/rollfleet")


def test_an_engine_has_a_stable_name_in_dns_whatever_its_pod_is_called() -> None:
    found = pod()["spec"]
    assert (found["hostname"], found["subdomain"]) == ("qwen-1-0", "qwen-engines")
    service = build_headless(make_fleet())
    assert service["metadata"]["name"] == "qwen-engines"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod()["metadata"]["labels"].items()


def test_the_template_hash_is_that_of_all_pods_and_moves_with_the_template_only() -> None:
    base = template_hash(make_fleet(), SETTINGS)
    assert pod()["metadata"]["annotations"]["rollfleet.io/template-hash"] == base
    assert template_hash(make_fleet(replicas=7, router=Router(replicas=3)), SETTINGS) == base
    assert template_hash(make_fleet(image="registry.example/engine:2"), SETTINGS) != base
    assert template_hash(make_fleet(), make_settings(operator_uid="another")) != base
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_the_router_finds_the_serving_set_and_lets_refusals_pass() -> None:
    _account, role, binding, deployment = build_router(make_fleet(router=Router(replicas=2)), SETTINGS)
    (router,) = deployment["spec"]["template"]["spec"]["containers"]
    assert router["image"] == "registry.example/vllm-router:0.1.17"
    assert set(router["resources"]["requests"]) == {"cpu", "memory"}, "a router of class BestEffort starves first"
    assert router["readinessProbe"]["httpGet"] == {"path": "/readiness", "port": "http"}, (
        "none that knows no engine yet"
    )
    args = router["args"]
    at = args.index("--selector")
    assert args[at + 1 : at + 4] == [
        "rollfleet.io/fleet=qwen",
        "rollfleet.io/component=engine",
        "rollfleet.io/serving=true",
    ]
    for flag in ("--disable-circuit-breaker", "--disable-retries", "--health-check-endpoint=/readyz"):
        assert flag in args
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "qwen-router", "namespace": "rl"}]
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "qwen-router"
    assert deployment["spec"]["replicas"] == 2


def test_clients_are_led_to_the_router_or_to_the_serving_engines() -> None:
    routed = build_client(make_fleet())
    assert routed["spec"]["selector"] == {"rollfleet.io/fleet": "qwen", "rollfleet.io/component": "router"}
    direct = build_client(make_fleet(router=Router(mode=RouterMode.DISABLED)))
    assert direct["spec"]["selector"] == {
        "rollfleet.io/fleet": "qwen",
        "rollfleet.io/component": "engine",
        "rollfleet.io/serving": "true",
    }
    assert routed["spec"]["ports"][0]["port"] == 8000


def applied(*manifests: ApplyObject | DeleteObject) -> dict[str, str]:
    return {
        f"{each.manifest['kind']}/{each.manifest['metadata']['name']}": each.content_hash
        for each in manifests
        if isinstance(each, ApplyObject)
    }


def test_children_are_applied_once_and_again_only_where_they_changed() -> None:
    first = plan_children(make_observed())
    assert len(first) == 6
    assert plan_children(make_observed(children=applied(*first))) == ()
    grown = plan_children(make_observed(make_fleet(router=Router(replicas=3)), children=applied(*first)))
    assert list(applied(*grown)) == ["Deployment/qwen-router"]


def test_a_router_that_is_no_longer_wanted_is_removed() -> None:
    there = applied(*plan_children(make_observed()))
    without = make_fleet(router=Router(mode=RouterMode.DISABLED))
    changes = plan_children(make_observed(without, children=there))
    assert [each.kind for each in changes if isinstance(each, DeleteObject)] == [
        "Deployment",
        "RoleBinding",
        "Role",
        "ServiceAccount",
    ]
    assert list(applied(*changes)) == ["Service/qwen"]
    assert not [each for each in plan_children(make_observed(without)) if isinstance(each, DeleteObject)]


def test_the_engine_is_told_how_many_requests_it_holds_and_how_long() -> None:
    assert engine_config(make_fleet(), make_settings()).hold is None
    when_closed = WhenClosed(type=WhenClosedType.HOLD, hold=Hold(seconds=9, max_requests=7))
    told = engine_config(make_fleet(router=Router(when_closed=when_closed)), make_settings()).hold
    assert told is not None
    assert (told.seconds, told.max_requests) == (9, 7)


def test_the_launcher_is_told_every_word_about_the_launch() -> None:
    told = engine_config(
        make_fleet(
            mode=FleetMode.COLOCATED,
            sleep_mode=SleepMode.ENABLED,
            rl_config=RlConfig(enable_batch_invariant=True, enable_training_consistency=True),
            weight_transfer=WeightTransfer(
                backend=TransferBackend.IPC, insecure_serialization=InsecureSerialization.ALLOWED
            ),
            features=Features(
                token_endpoint=TokenEndpoint.ENABLED,
                routed_experts=Switch.ENABLED,
                trace_replay=Switch.ENABLED,
                tool_calling=ToolCalling(parser="hermes"),
                logprobs=Logprobs(mode=LogprobsMode.PROCESSED_LOGPROBS, max=20),
            ),
            parallelism=Parallelism(tensor=4, pipeline=2, data=3, expert=Switch.ENABLED),
            engine=EngineOptions(additional_config={"a": {"b": 1}}, compilation_config={"mode": 3}),
        ),
        make_settings(),
    )
    dumped = told.model_dump(mode="json", by_alias=True)
    assert {
        "mode": "Colocated",
        "sleepMode": True,
        "rlConfig": {
            "enabled": True,
            "sleepModeExtraCleanup": False,
            "enableTrainingConsistency": True,
            "enableBatchInvariant": True,
        },
        "weightTransfer": {"backend": "ipc", "insecureSerialization": True},
        "features": {
            "tokenEndpoint": "Enabled",
            "routedExperts": True,
            "traceReplay": True,
            "toolParser": "hermes",
            "logprobsMode": "processed_logprobs",
            "maxLogprobs": 20,
        },
        "tensorParallelSize": 4,
        "pipelineParallelSize": 2,
        "dataParallelSize": 3,
        "expertParallel": True,
        "additionalConfig": {"a": {"b": 1}},
        "compilationConfig": {"mode": 3},
    }.items() <= dumped.items()
