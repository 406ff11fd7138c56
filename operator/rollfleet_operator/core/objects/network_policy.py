"""Who may connect to engines: anybody to 8000, operator and trainers to the control port, ranks to the rest.

Ranks are engines of the fleet and, of a fleet with spec.trainers, pods of its namespace that bear the label
rollfleet.io/trainer with the fleet's name: a policy cannot name ServiceAccounts.

A second lock before the guard's own, where the cluster's network honours NetworkPolicies; where it does not, the object
does nothing. The rest is what vLLM and torch choose to find their ranks by (a TCPStore on every address, no identity,
pickled objects), which nobody but the ranks may speak to.
"""

from rollfleet_operator.api.meta import LABEL_TRAINER
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.objects.common import (
    COMPONENT_ENGINE,
    CONTROL_PORT,
    SERVING_PORT,
    Manifest,
    labels,
    metadata,
)
from rollfleet_operator.core.observed import Settings

KIND = "NetworkPolicy"
LAST_PORT = 65535
NAMESPACE_LABEL = "kubernetes.io/metadata.name"  # every namespace has it since Kubernetes 1.22


def network_policy_name(fleet: str) -> str:
    """As the headless Service: what is about all engines."""
    return f"{fleet}-engines"


def build_network_policy(fleet: RolloutEngine, settings: Settings) -> Manifest:
    """For all engines of the fleet. The operator's pods are told by namespace and labels."""
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_pods)},
    }
    engines = {"podSelector": {"matchLabels": labels(fleet, COMPONENT_ENGINE)}}  # of this namespace
    trainers = [{"podSelector": {"matchLabels": {LABEL_TRAINER: fleet.metadata.name}}}] if fleet.spec.trainers else []
    others = [
        {"protocol": "TCP", "port": 1, "endPort": CONTROL_PORT - 1},
        {"protocol": "TCP", "port": CONTROL_PORT + 1, "endPort": LAST_PORT},
        {"protocol": "UDP", "port": 1, "endPort": LAST_PORT},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": KIND,
        "metadata": metadata(fleet, network_policy_name(fleet.metadata.name), COMPONENT_ENGINE),
        "spec": {
            "podSelector": {"matchLabels": labels(fleet, COMPONENT_ENGINE)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"protocol": "TCP", "port": SERVING_PORT}]},
                {"from": [operator, *trainers], "ports": [{"protocol": "TCP", "port": CONTROL_PORT}]},
                {"from": [engines, *trainers], "ports": others},
            ],
        },
    }
