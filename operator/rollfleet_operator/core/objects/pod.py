"""The pod of one engine.

Ports 8000 (inference, probes) and 8001 (control, TLS); the model and the checkpoints read-only below /rollfleet; the
fleet's certificate; the pod's own ServiceAccount token, with which the guard reads the API server's public keys. The
container's command is the image's own. All probes ask /livez: ready means alive and under control, not open.
"""

import json
from typing import Any

from rollfleet_operator.api.meta import ANNOTATION_TEMPLATE, LABEL_ENGINE
from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineSpec
from rollfleet_operator.api.volumes import VolumeSource
from rollfleet_operator.core.objects.common import (
    COMPONENT_ENGINE,
    CONTROL_PORT,
    SAFE_CONTAINER,
    SAFE_POD,
    SERVING_PORT,
    Manifest,
    content_hash,
    metadata,
)
from rollfleet_operator.core.objects.launch import launch_settings
from rollfleet_operator.core.objects.nodes import node_affinity
from rollfleet_operator.core.observed import Settings
from rollfleet_protocol.engine_config import (
    DEVICES_VARIABLE,
    ENGINE_CONFIG_ENV,
    PLACE_ENV,
    POD_UID_ENV,
    AcceleratorConfig,
    EngineConfig,
    FleetIdentity,
    Hold,
    ModelConfig,
    OperatorIdentity,
    Place,
)

CONTAINER = "engine"
MODEL_DIR = "/rollfleet/model"
CHECKPOINTS_DIR = "/rollfleet/checkpoints"
TLS_DIR = "/etc/rollfleet/tls"
RUN_DIR = "/run/rollfleet"
HOME = "/var/lib/rollfleet"  # of any user; the image keeps its caches below it
STARTUP_PERIOD_S = 2  # a fast engine is ready in seconds
GRACE_S = 30  # after draining: aborting slow readers, stopping the engine
FROM_THE_POD = (DEVICES_VARIABLE, POD_UID_ENV, PLACE_ENV)  # by the downward API, or told to each pod
PRE_STOP = ("python3", "-m", "rollfleet_engine.prestop")


def headless_name(fleet: str) -> str:
    """The Service that gives engines their DNS names."""
    return f"{fleet}-engines"


def tls_secret_name(fleet: str) -> str:
    """The fleet's certificate, made by the runtime."""
    return f"{fleet}-engine-tls"


def build_pod(fleet: RolloutEngine, settings: Settings, ordinal: int, name: str) -> Manifest:
    """The complete manifest of an engine's only pod, or of the one that leads."""
    pod = pod_template(fleet, settings, ordinal)
    pod["metadata"]["name"] = name
    pod["metadata"]["annotations"] = {ANNOTATION_TEMPLATE: template_hash(fleet, settings)}
    if fleet.spec.parallelism.nodes > 1:
        place_in(pod, fleet, ordinal, Place(node=0, leader=name, leader_host=leader_host(fleet, ordinal)))
    return pod


def template_hash(fleet: RolloutEngine, settings: Settings) -> str:
    """Of everything that all pods of the fleet have in common."""
    template = pod_template(fleet, settings, 0)
    return content_hash({"labels": template["metadata"]["labels"], "spec": template["spec"]})


def leader_host(fleet: RolloutEngine, ordinal: int) -> str:
    """Where the pods of an engine find the one that leads, by DNS; a pod before it may still have the name too."""
    name, namespace = fleet.metadata.name, fleet.metadata.namespace
    return f"{name}-{ordinal}-0.{headless_name(name)}.{namespace}.svc"


def place_in(pod: Manifest, fleet: RolloutEngine, ordinal: int, place: Place) -> None:
    """Tell a pod of several which one it is."""
    pod["spec"]["hostname"] = f"{fleet.metadata.name}-{ordinal}-{place.node}"
    told = place.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    pod["spec"]["containers"][0]["env"].append({"name": PLACE_ENV, "value": json.dumps(told, sort_keys=True)})


def pod_template(fleet: RolloutEngine, settings: Settings, ordinal: int) -> Manifest:
    name, spec = fleet.metadata.name, fleet.spec
    meta = metadata(fleet, "", COMPONENT_ENGINE)
    meta["labels"][LABEL_ENGINE] = str(ordinal)
    pod_spec: Manifest = {
        "hostname": f"{name}-{ordinal}-0",
        "subdomain": headless_name(name),
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": spec.drain_timeout_seconds + GRACE_S,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": SAFE_POD,
        "containers": [_container(fleet, settings)],
        "volumes": _volumes(fleet),
    }
    pod_spec |= _optional(spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec}


def _optional(spec: RolloutEngineSpec) -> Manifest:
    """What is there only where it was asked for."""
    wanted: Manifest = {
        "serviceAccountName": spec.service_account_name,
        "nodeSelector": spec.node_selector,
        "affinity": node_affinity(spec.accelerator.profile),
        "tolerations": list(spec.tolerations),
        "imagePullSecrets": list(spec.image_pull_secrets),
    }
    return {key: value for key, value in wanted.items() if value}


def _container(fleet: RolloutEngine, settings: Settings) -> Manifest:
    spec = fleet.spec
    container: Manifest = {
        "name": CONTAINER,
        "image": spec.image,
        "env": _env(fleet, settings),
        "ports": [
            {"name": "serving", "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        "securityContext": SAFE_CONTAINER,
        "startupProbe": _probe(
            STARTUP_PERIOD_S, failures=max(1, -(-spec.startup.timeout_seconds // STARTUP_PERIOD_S)), timeout_s=2
        ),
        "livenessProbe": _probe(10, failures=3, timeout_s=5),
        "readinessProbe": _probe(5, failures=2, timeout_s=5),
        "lifecycle": {"preStop": {"exec": {"command": list(PRE_STOP)}}},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": _mounts(spec),
    }
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.image_pull_policy.value
    return container


def _probe(period_s: int, *, failures: int, timeout_s: int) -> Manifest:
    return {
        "httpGet": {"path": "/livez", "port": "serving", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
        "successThreshold": 1,
    }


def _env(fleet: RolloutEngine, settings: Settings) -> list[Manifest]:
    given = {variable.name: variable.value for variable in fleet.spec.env if variable.name not in FROM_THE_POD}
    config = engine_config(fleet, settings).model_dump(mode="json", by_alias=True)
    own = {ENGINE_CONFIG_ENV: json.dumps(config, sort_keys=True), "HOME": given.get("HOME", HOME)}
    return [*({"name": name, "value": value} for name, value in {**given, **own}.items()), *_announced(fleet.spec)]


def _announced(spec: RolloutEngineSpec) -> list[Manifest]:
    """What differs from pod to pod: its uid, and the chips that scheduler or device plugin wrote down for it.

    Both do so under the resource's name (MindCluster: docs/en/scheduling/api/k8s.md). Empty where nobody did.
    """
    pod_uid = {"name": POD_UID_ENV, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid", "apiVersion": "v1"}}}
    if not spec.accelerator.per_pod:
        return [pod_uid]
    annotation = {"fieldPath": f"metadata.annotations['{spec.accelerator.resource}']", "apiVersion": "v1"}
    return [pod_uid, {"name": DEVICES_VARIABLE, "valueFrom": {"fieldRef": annotation}}]


def engine_config(fleet: RolloutEngine, settings: Settings) -> EngineConfig:
    """What the launcher is told."""
    spec, meta, hold = fleet.spec, fleet.metadata, fleet.spec.router.when_closed.hold
    model = MODEL_DIR if spec.model.path == "." else f"{MODEL_DIR}/{spec.model.path}"
    return EngineConfig(
        fleet=FleetIdentity(namespace=meta.namespace, name=meta.name, uid=meta.uid),
        operator=OperatorIdentity(subject=settings.operator_subject, uid=settings.operator_uid),
        model=ModelConfig(path=model, served_name=spec.model.served_name),
        checkpoints_path=None if spec.volumes.checkpoints is None else CHECKPOINTS_DIR,
        engine_args=spec.engine.args,
        accelerator=_accelerator_config(spec),
        additional_config=spec.engine.additional_config,
        compilation_config=spec.engine.compilation_config,
        **launch_settings(spec),
        serving_port=SERVING_PORT,
        control_port=CONTROL_PORT,
        tls_dir=TLS_DIR,
        run_dir=RUN_DIR,
        drain_timeout_seconds=spec.drain_timeout_seconds,
        hold=None if hold is None else Hold(seconds=hold.seconds, max_requests=hold.max_requests),
    )


def _accelerator_config(spec: RolloutEngineSpec) -> AcceleratorConfig | None:
    asked = spec.accelerator
    if not asked.per_pod:
        return None
    return AcceleratorConfig(resource_name=asked.resource, per_pod=asked.per_pod, profile=asked.profile)


def _resources(spec: RolloutEngineSpec) -> Manifest:
    """The accelerator goes to limits and requests: an extended resource must be equal in both."""
    given: dict[str, Any] = spec.resources or {}
    device = {spec.accelerator.resource: str(spec.accelerator.per_pod)} if spec.accelerator.per_pod else {}
    merged = {kind: {**(given.get(kind) or {}), **device} for kind in ("limits", "requests")}
    return {kind: values for kind, values in merged.items() if values}


def _mounts(spec: RolloutEngineSpec) -> list[Manifest]:
    mounts: list[Manifest] = [{"name": "model", "mountPath": MODEL_DIR, "readOnly": True}]
    if spec.volumes.checkpoints is not None:
        mounts.append({"name": "checkpoints", "mountPath": CHECKPOINTS_DIR, "readOnly": True})
    mounts += [
        {"name": f"extra-{extra.name}", "mountPath": extra.mount_path, "readOnly": True} for extra in spec.volumes.extra
    ]
    return [
        *mounts,
        {"name": "tls", "mountPath": TLS_DIR, "readOnly": True},
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "home", "mountPath": HOME},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where vLLM's workers share memory
    ]


def _volumes(fleet: RolloutEngine) -> list[Manifest]:
    spec = fleet.spec
    volumes = [_volume("model", spec.volumes.model)]
    if spec.volumes.checkpoints is not None:
        volumes.append(_volume("checkpoints", spec.volumes.checkpoints))
    volumes += [_volume(f"extra-{extra.name}", extra.source) for extra in spec.volumes.extra]
    return [
        *volumes,
        {"name": "tls", "secret": {"secretName": tls_secret_name(fleet.metadata.name), "defaultMode": 0o444}},
        {"name": "run", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _volume(name: str, source: VolumeSource) -> Manifest:
    if source.persistent_volume_claim is not None:
        return {"name": name, "persistentVolumeClaim": {**source.persistent_volume_claim, "readOnly": True}}
    if source.host_path is not None:
        return {"name": name, "hostPath": {**source.host_path, "type": "Directory"}}
    return {"name": name, "csi": {**(source.csi or {}), "readOnly": True}}
