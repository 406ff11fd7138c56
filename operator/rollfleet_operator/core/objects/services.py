"""Services: DNS names for engines, and the address for clients."""

from rollfleet_operator.api.meta import LABEL_SERVING
from rollfleet_operator.api.rolloutengine import RolloutEngine, RouterMode
from rollfleet_operator.core.objects.common import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    CONTROL_PORT,
    SERVING_PORT,
    Manifest,
    labels,
    metadata,
)
from rollfleet_operator.core.objects.pod import headless_name


def build_headless(fleet: RolloutEngine) -> Manifest:
    """Names engines from their birth, not only when they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(fleet, headless_name(fleet.metadata.name), COMPONENT_ENGINE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(fleet, COMPONENT_ENGINE),
            "ports": [_port("serving", SERVING_PORT), _port("control", CONTROL_PORT)],
        },
    }


def build_client(fleet: RolloutEngine) -> Manifest:
    """Leads clients to the router, or straight to the engines of the serving set."""
    routed = fleet.spec.router.mode is RouterMode.ENABLED
    selector = labels(fleet, COMPONENT_ROUTER) if routed else {**labels(fleet, COMPONENT_ENGINE), LABEL_SERVING: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(fleet, fleet.metadata.name, COMPONENT_ROUTER if routed else COMPONENT_ENGINE),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": [_port("http", SERVING_PORT)]},
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": number, "protocol": "TCP"}
