"""Our CRDs in a cluster, a namespace to try objects in, and nobody else at work on them."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from rollfleet_operator.api.crd import KINDS, build_crd
from tests.support.kubectl import KubectlError, kubectl


@contextmanager
def installed_crds() -> Iterator[None]:
    """The CRDs as the models have them now. Those that somebody has brought stay, those that were missing go again."""
    made = []
    for kind in KINDS:
        crd = build_crd(kind)
        try:
            kubectl("get", "crd", kind.crd_name)
        except KubectlError:
            kubectl("create", "-f", "-", manifest=crd)
            made.append(kind.crd_name)
        else:
            kubectl("patch", "crd", kind.crd_name, "--type", "merge", "-p", json.dumps({"spec": crd["spec"]}))
        kubectl("wait", "--for=condition=Established", f"crd/{kind.crd_name}", "--timeout=30s")
    try:
        yield
    finally:
        for name in made:
            kubectl("delete", "crd", name, "--wait=false")


@contextmanager
def no_operator() -> Iterator[None]:
    """Operators that charts have installed would write the status that a test writes: they rest meanwhile."""
    label = "app.kubernetes.io/part-of=rollfleet"
    listed = json.loads(kubectl("get", "deployments", "--all-namespaces", "--selector", label, "--output", "json"))
    running = [
        (item["metadata"]["namespace"], item["metadata"]["name"], item["spec"]["replicas"])
        for item in listed["items"]
        if item["spec"]["replicas"]
    ]
    for namespace, name, _ in running:
        kubectl("scale", "deployment", name, "--namespace", namespace, "--replicas=0")
        selector = "app.kubernetes.io/name=rollfleet"
        kubectl("wait", "--for=delete", "pods", "--selector", selector, "--namespace", namespace, "--timeout=50s")
    try:
        yield
    finally:
        for namespace, name, replicas in running:
            kubectl("scale", "deployment", name, "--namespace", namespace, f"--replicas={replicas}")


@contextmanager
def temporary_namespace(prefix: str) -> Iterator[str]:
    """A namespace of its own."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
