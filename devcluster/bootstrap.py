"""The few objects that a cluster needs beside its processes: DNS, and rights for DNS and for the API server's calls."""

import json
from pathlib import Path
from typing import Any

from devcluster.network import AddressPlan
from devcluster.shell import run

APPLY_TIMEOUT_S = 60.0
RBAC = "rbac.authorization.k8s.io"


def _cluster_role(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}


def _binding(name: str, role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }


def _dns_service(plan: AddressPlan) -> list[dict[str, Any]]:
    """CoreDNS is a process of the machine, so the Service has no selector and its one endpoint is given."""
    ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {
            "clusterIP": str(plan.dns_service),
            "ports": [
                {"name": name, "protocol": kind, "port": 53, "targetPort": plan.dns_port} for name, kind in ports
            ],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "ports": [{"name": name, "protocol": kind, "port": plan.dns_port} for name, kind in ports],
        "endpoints": [{"addresses": [str(plan.gateway)], "conditions": {"ready": True}}],
    }
    return [service, endpoints]


def objects(plan: AddressPlan) -> list[dict[str, Any]]:
    watch = ["list", "watch"]
    dns_rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": watch},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": watch},
    ]
    return [
        _cluster_role("system:coredns", dns_rules),
        _binding("system:coredns", "system:coredns", "system:coredns"),
        # exec, logs and port-forward: the API server asks the kubelet as this user.
        _binding("devcluster:kubelet-api", "system:kubelet-api-admin", "kube-apiserver-kubelet-client"),
        *_dns_service(plan),
    ]


def apply(plan: AddressPlan, kubectl: Path, kubeconfig: Path) -> None:
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects(plan)})
    command = [kubectl, "--kubeconfig", kubeconfig, "apply", "--server-side", "--field-manager=devcluster", "-f", "-"]
    run(command, timeout_s=APPLY_TIMEOUT_S, stdin=document)
