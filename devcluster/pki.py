"""The cluster's own certificate authority and what it signs. Made anew by each `up` after a `down`."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.network import CLUSTER_DOMAIN, NODE, AddressPlan
from devcluster.shell import run

VALID_DAYS = 365  # far longer than a throw-away cluster lives
OPENSSL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Certificate:
    """One leaf. Kubernetes reads the user from the common name and the groups from the organisations."""

    name: str
    common_name: str
    organisation: str = ""
    names: tuple[str, ...] = ()  # as openssl writes them: DNS:..., IP:...

    @property
    def subject(self) -> str:
        organisation = f"/O={self.organisation}" if self.organisation else ""
        return f"{organisation}/CN={self.common_name}"

    @property
    def usage(self) -> str:
        return "serverAuth,clientAuth" if self.names else "clientAuth"


def certificates(plan: AddressPlan) -> tuple[Certificate, ...]:
    """All leaves: one identity for each component, as the built-in RBAC roles expect."""
    at_gateway = f"IP:{plan.gateway}"
    api_names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    api_names.append(f"kubernetes.default.svc.{CLUSTER_DOMAIN}")
    api = (*(f"DNS:{name}" for name in api_names), f"IP:{plan.kubernetes_service}", at_gateway)
    return (
        Certificate("apiserver", "kube-apiserver", names=api),
        Certificate("apiserver-kubelet-client", "kube-apiserver-kubelet-client"),
        Certificate("admin", "admin", organisation="system:masters"),
        Certificate("controller-manager", "system:kube-controller-manager", names=(at_gateway,)),
        Certificate("scheduler", "system:kube-scheduler", names=(at_gateway,)),
        Certificate("proxy", "system:kube-proxy"),
        Certificate("coredns", "system:coredns"),
        Certificate("kubelet", f"system:node:{NODE}", "system:nodes", (at_gateway, f"DNS:{NODE}")),
    )


def _new_key(folder: Path, name: str) -> list[str]:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / f"{name}.key")]
    return ["openssl", "req", "-x509", *key, "-days", str(VALID_DAYS), "-out", str(folder / f"{name}.crt")]


def authority_command(folder: Path) -> list[str]:
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    return [*_new_key(folder, "ca"), "-subj", "/CN=rollfleet-devcluster-ca", *usage]


def leaf_command(folder: Path, leaf: Certificate) -> list[str]:
    command = [*_new_key(folder, leaf.name), "-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    command += ["-subj", leaf.subject, "-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-addext", "keyUsage=critical,digitalSignature", "-addext", f"extendedKeyUsage={leaf.usage}"]
    return [*command, "-addext", f"subjectAltName={','.join(leaf.names)}"] if leaf.names else command


def create(folder: Path, plan: AddressPlan) -> None:
    """Make the authority, every leaf, and the RSA pair that signs ServiceAccount tokens (RS256)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    run(authority_command(folder), timeout_s=OPENSSL_TIMEOUT_S)
    for leaf in certificates(plan):
        run(leaf_command(folder, leaf), timeout_s=OPENSSL_TIMEOUT_S)
    key = folder / "service-account.key"
    run(["openssl", "genrsa", "-out", key, "2048"], timeout_s=OPENSSL_TIMEOUT_S)
    public = ["openssl", "rsa", "-in", key, "-pubout", "-out", folder / "service-account.pub"]
    run(public, timeout_s=OPENSSL_TIMEOUT_S)


def kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig that carries all it needs, so that it can be copied elsewhere. JSON is YAML."""

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
    cluster = {"server": server, "certificate-authority-data": encoded(authority)}
    document: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": "devcluster", "user": user}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": "devcluster"}}],
        "current-context": "devcluster",
    }
    return json.dumps(document, indent=1) + "\n"


def write_kubeconfig(target: Path, server: str, folder: Path, name: str) -> None:
    files = [folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key"]
    authority, certificate, key = (file.read_bytes() for file in files)
    target.touch(mode=0o600)
    target.write_text(kubeconfig(server, authority, certificate, key))
