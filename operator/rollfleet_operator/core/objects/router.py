"""vllm-router with its ServiceAccount and the right to watch pods.

Circuit breaker and retries are off and health is not tied to the gate: with its defaults some ten refusals open the
breaker, and traffic comes back tens of seconds after the engines; without, the guard's 503 with Retry-After passes
through and the first answer comes 15 ms after opening (measured with vllm-router 0.1.17).
"""

from rollfleet_operator.api.meta import LABEL_SERVING
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.objects.common import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    SAFE_CONTAINER,
    SAFE_POD,
    SERVING_PORT,
    Manifest,
    labels,
    metadata,
)
from rollfleet_operator.core.observed import Settings

RBAC = "rbac.authorization.k8s.io"
# Without a request it would be the first to starve on a busy node, and every answer goes through it.
REQUESTS = {"cpu": "200m", "memory": "128Mi"}
METRICS_PORT = 29000
NOBODY = 65532


def router_name(fleet: str) -> str:
    """Of the router's Deployment, ServiceAccount, Role and RoleBinding."""
    return f"{fleet}-router"


def build_router(fleet: RolloutEngine, settings: Settings) -> tuple[Manifest, ...]:
    """All objects of the router, in the order in which they are needed."""
    return build_service_account(fleet), build_role(fleet), build_role_binding(fleet), build_deployment(fleet, settings)


def build_service_account(fleet: RolloutEngine) -> Manifest:
    """Its own, so that its rights are nobody else's."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(fleet, router_name(fleet.metadata.name), COMPONENT_ROUTER),
        "automountServiceAccountToken": False,
    }


def build_role(fleet: RolloutEngine) -> Manifest:
    """Service discovery watches pods of its namespace."""
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": metadata(fleet, router_name(fleet.metadata.name), COMPONENT_ROUTER),
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }


def build_role_binding(fleet: RolloutEngine) -> Manifest:
    """Gives the one to the other."""
    name, namespace = router_name(fleet.metadata.name), fleet.metadata.namespace
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(fleet, name, COMPONENT_ROUTER),
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def build_deployment(fleet: RolloutEngine, settings: Settings) -> Manifest:
    """The router's pods."""
    selector = labels(fleet, COMPONENT_ROUTER)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(fleet, router_name(fleet.metadata.name), COMPONENT_ROUTER),
        "spec": {
            "replicas": fleet.spec.router.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": selector}, "spec": _pod_spec(fleet, settings)},
        },
    }


def _pod_spec(fleet: RolloutEngine, settings: Settings) -> Manifest:
    spec: Manifest = {
        "serviceAccountName": router_name(fleet.metadata.name),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": {**SAFE_POD, "runAsNonRoot": True, "runAsUser": NOBODY, "runAsGroup": NOBODY},
        "containers": [_container(fleet, settings)],
    }
    if fleet.spec.image_pull_secrets:
        spec["imagePullSecrets"] = list(fleet.spec.image_pull_secrets)
    return spec


def _container(fleet: RolloutEngine, settings: Settings) -> Manifest:
    container: Manifest = {
        "name": "router",
        "image": fleet.spec.router.image or settings.router_image,
        "command": ["vllm-router"],
        "args": _args(fleet),
        "ports": [
            {"name": "http", "containerPort": SERVING_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": REQUESTS},
        "securityContext": SAFE_CONTAINER,
        # On a busy node its start takes long; only what was up once can be found dead.
        "startupProbe": {
            "tcpSocket": {"port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 300,
        },
        # True once it has found an engine that is in: before that it would refuse what others can answer.
        "readinessProbe": {
            "httpGet": {"path": "/readiness", "port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 10,
        },
        "livenessProbe": {
            "tcpSocket": {"port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
    if fleet.spec.image_pull_policy is not None:
        container["imagePullPolicy"] = fleet.spec.image_pull_policy.value
    return container


def _args(fleet: RolloutEngine) -> list[str]:
    served = {**labels(fleet, COMPONENT_ENGINE), LABEL_SERVING: "true"}
    return [
        "--host=0.0.0.0",
        f"--port={SERVING_PORT}",
        "--service-discovery",
        "--selector",
        *(f"{key}={value}" for key, value in served.items()),
        f"--service-discovery-namespace={fleet.metadata.namespace}",
        f"--service-discovery-port={SERVING_PORT}",
        f"--policy={fleet.spec.router.policy.value}",
        "--disable-circuit-breaker",
        "--disable-retries",
        "--health-check-endpoint=/readyz",
        "--health-check-interval-secs=1",
        "--health-failure-threshold=3",  # one slow answer on a busy node is none; the guard refuses by itself anyway
        "--health-success-threshold=1",
        "--prometheus-host=0.0.0.0",
        f"--prometheus-port={METRICS_PORT}",
    ]
