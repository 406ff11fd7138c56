"""The processes of a cluster as data: what to run, after what, and how to see that it is ready."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from devcluster.network import CLUSTER_DOMAIN, NODE, AddressPlan
from devcluster.paths import Paths

NPU_RESOURCE = "huawei.com/Ascend910"
NPU_COUNT = 16  # two Atlas A2 boards of eight
DEVICE_PLUGIN_FOLDER = Path("/var/lib/kubelet/device-plugins")  # fixed in the kubelet, whatever its --root-dir


@dataclass(frozen=True)
class Component:
    """One supervised process.

    `ready` is the URL that answers 200 (or unix:PATH that takes a connection) once it works; empty: running is enough.
    """

    name: str
    argv: tuple[str, ...]
    after: tuple[str, ...] = ()
    ready: str = ""
    restart: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Component":
        return cls(
            name=value["name"],
            argv=tuple(value["argv"]),
            after=tuple(value["after"]),
            ready=value["ready"],
            restart=value["restart"],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# What tests kill, and what ends by itself when the API server was away for too long to renew a lease.
RESTARTED = ("device-plugin", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")


def components(plan: AddressPlan, paths: Paths, binaries: Path) -> tuple[Component, ...]:
    """In the order of start."""
    made = (
        Component(
            "containerd",
            ("containerd", "--config", f"{paths.config}/containerd.toml"),
            ready=f"unix:{paths.containerd_socket}",
        ),
        _etcd(plan, paths, binaries),
        # First of the kubelet's friends, so that the devices are registered the moment that the kubelet listens.
        Component("device-plugin", _device_plugin(binaries)),
        _apiserver(plan, paths, binaries),
        _controller_manager(plan, paths, binaries),
        _scheduler(plan, paths, binaries),
        _kubelet(plan, paths, binaries),
        Component(
            "kube-proxy",
            (f"{binaries}/kube-proxy", f"--config={paths.config}/proxy.json"),
            after=("kube-apiserver",),
            ready=f"http://{plan.gateway}:10256/healthz",
        ),
        Component(
            "coredns",
            (f"{binaries}/coredns", "-conf", f"{paths.config}/Corefile"),
            after=("kube-apiserver",),
            ready=f"http://{plan.gateway}:{plan.dns_ready_port}/ready",
        ),
    )
    return tuple(replace(each, restart=each.name in RESTARTED) for each in made)


def _device_plugin(binaries: Path) -> tuple[str, ...]:
    program = f"{binaries}/ascend-device-plugin"
    folder = f"-directory={DEVICE_PLUGIN_FOLDER}"
    return (program, folder, f"-resource={NPU_RESOURCE}", f"-count={NPU_COUNT}")


def _etcd(plan: AddressPlan, paths: Paths, binaries: Path) -> Component:
    argv = (
        f"{binaries}/etcd",
        "--name=devcluster",
        f"--data-dir={paths.home}/etcd",
        f"--listen-client-urls={plan.etcd_url}",
        f"--advertise-client-urls={plan.etcd_url}",
        f"--listen-peer-urls={plan.etcd_peer_url}",
        f"--initial-advertise-peer-urls={plan.etcd_peer_url}",
        f"--initial-cluster=devcluster={plan.etcd_peer_url}",
        "--unsafe-no-fsync",  # nothing here outlives `down`
    )
    return Component("etcd", argv, ready=f"{plan.etcd_url}/readyz")


def _apiserver(plan: AddressPlan, paths: Paths, binaries: Path) -> Component:
    pki = paths.pki
    argv = (
        f"{binaries}/kube-apiserver",
        f"--etcd-servers={plan.etcd_url}",
        f"--bind-address={plan.gateway}",
        f"--advertise-address={plan.gateway}",
        f"--secure-port={plan.api_port}",
        f"--service-cluster-ip-range={plan.services}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",  # the node's name resolves nowhere
        f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        f"--service-account-key-file={pki}/service-account.pub",
        f"--service-account-signing-key-file={pki}/service-account.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--shutdown-delay-duration=0s",
    )
    return Component("kube-apiserver", argv, after=("etcd",), ready=f"{plan.api_url}/readyz")


def _controller_manager(plan: AddressPlan, paths: Paths, binaries: Path) -> Component:
    kubeconfig = f"{paths.config}/controller-manager.kubeconfig"
    argv = (
        f"{binaries}/kube-controller-manager",
        *_served(plan, paths, "controller-manager", kubeconfig),
        f"--service-account-private-key-file={paths.pki}/service-account.key",
        "--use-service-account-credentials",
        f"--root-ca-file={paths.pki}/ca.crt",
        f"--cluster-signing-cert-file={paths.pki}/ca.crt",
        f"--cluster-signing-key-file={paths.pki}/ca.key",
    )
    ready = f"https://{plan.gateway}:10257/healthz"
    return Component("kube-controller-manager", argv, after=("kube-apiserver",), ready=ready)


def _scheduler(plan: AddressPlan, paths: Paths, binaries: Path) -> Component:
    served = _served(plan, paths, "scheduler", f"{paths.config}/scheduler.kubeconfig")
    argv = (f"{binaries}/kube-scheduler", *served)
    ready = f"https://{plan.gateway}:10259/healthz"
    return Component("kube-scheduler", argv, after=("kube-apiserver",), ready=ready)


def _served(plan: AddressPlan, paths: Paths, name: str, kubeconfig: str) -> tuple[str, ...]:
    """What controller manager and scheduler have in common: one copy of each, so nothing to elect."""
    return (
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={plan.gateway}",
        f"--tls-cert-file={paths.pki}/{name}.crt",
        f"--tls-private-key-file={paths.pki}/{name}.key",
        "--leader-elect=false",
    )


def _kubelet(plan: AddressPlan, paths: Paths, binaries: Path) -> Component:
    argv = (
        f"{binaries}/kubelet",
        f"--config={paths.config}/kubelet.json",
        f"--kubeconfig={paths.config}/kubelet.kubeconfig",
        f"--root-dir={paths.kubelet_root}",
        f"--hostname-override={NODE}",
        f"--node-ip={plan.gateway}",
    )
    ready = f"http://{plan.gateway}:10248/healthz"
    return Component("kubelet", argv, after=("kube-apiserver", "containerd"), ready=ready)


# Which kubeconfig each certificate's owner gets: the file's name without its suffix.
KUBECONFIGS = ("controller-manager", "scheduler", "proxy", "coredns", "kubelet")
