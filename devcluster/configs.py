"""The configuration files of the components, as text: pure functions of the paths and the address plan.

JSON where a component reads YAML: every JSON document is one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.network import (
    BRIDGE,
    CGROUP,
    CLUSTER_DOMAIN,
    CNI_NETWORK,
    FIRST_POD_OFFSET,
    MAX_PODS,
    NODE,
    AddressPlan,
)
from devcluster.paths import Paths

CNI_PLUGINS = Path("/usr/lib/cni")  # where Debian's containernetworking-plugins puts them
PAUSE_IMAGE = "docker.io/rollfleet-devcluster/pause:1"
HOST_RESOLVERS = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))


def host_resolver() -> Path:
    """systemd-resolved's own file if it is there: /etc/resolv.conf then names a loopback address, no use in a pod."""
    return next((path for path in HOST_RESOLVERS if path.exists()), HOST_RESOLVERS[-1])


def cni(plan: AddressPlan, paths: Paths) -> dict[str, Any]:
    """A bridge whose address is the node's; pods are reached from the machine directly."""
    ipam = {
        "type": "host-local",
        "dataDir": str(paths.home / "cni"),
        "ranges": [[{"subnet": str(plan.pods), "rangeStart": str(plan.pods[FIRST_POD_OFFSET])}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "1.0.0", "name": CNI_NETWORK, "plugins": [bridge]}


def containerd(paths: Paths) -> str:
    """Everything under our own folder, network namespaces too, so that `down` finds it by path."""
    home = paths.home
    return f'''version = 2
root = "{home}/containerd/root"
state = "{paths.containerd_state}"

[grpc]
  address = "{paths.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true # a machine in a container or small VM often lacks CAP_SYS_RESOURCE
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{paths.config}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{paths.containerd_state}/runc"
'''


def kubelet(plan: AddressPlan, paths: Paths) -> dict[str, Any]:
    """Client certificates and tokens are checked, rights are asked of the API server, nobody is anonymous."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": str(plan.gateway),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True, "cacheTTL": "10s"},
            "x509": {"clientCAFile": f"{paths.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{paths.pki}/kubelet.crt",
        "tlsPrivateKeyFile": f"{paths.pki}/kubelet.key",
        "healthzBindAddress": str(plan.gateway),
        "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "memory.available": "50Mi"},
        # Images come from no registry: one that is collected could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": MAX_PODS,
        "clusterDNS": [str(plan.dns_service)],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(host_resolver()),
        # A device plugin's devices reach the node object with the next status, by default only after 10 s.
        "nodeStatusUpdateFrequency": "2s",
        "makeIPTablesUtilChains": False,
        "podLogsDir": f"{paths.logs}/pods",
        "volumePluginDir": f"{paths.home}/volume-plugins",
        "containerLogMaxSize": "10Mi",
        "containerLogMaxFiles": 2,
        "shutdownGracePeriod": "0s",
    }


def proxy(plan: AddressPlan, paths: Paths) -> dict[str, Any]:
    """nftables, since iptables' kernel half is missing on some machines; conntrack limits stay as they are."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{paths.config}/proxy.kubeconfig"},
        "mode": "nftables",
        "hostnameOverride": NODE,
        "bindAddress": str(plan.gateway),
        "healthzBindAddress": f"{plan.gateway}:10256",
        "metricsBindAddress": f"{plan.gateway}:10249",
        "clusterCIDR": str(plan.pods),
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "100ms"},  # one second by default: pods come and go in quick tests
    }


def corefile(plan: AddressPlan, paths: Paths, *, forward: bool) -> str:
    """The cluster's DNS. `forward` is whether the machine itself has a resolver for names outside."""
    outside = f"    forward . {host_resolver()}\n    loop\n" if forward else ""
    return f""".:{plan.dns_port} {{
    bind {plan.gateway}
    errors
    ready {plan.gateway}:{plan.dns_ready_port}
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {paths.config}/coredns.kubeconfig devcluster
        pods verified
        ttl 2
    }}
    cache 5 {{
        success 2048 2
        denial 2048 1
    }}
{outside}}}
"""


def nftables(plan: AddressPlan) -> str:
    """Pods reach the outside by the machine's own address. Adding and deleting first makes it idempotent."""
    family = "ip rollfleet_devcluster"
    return f'''table {family}
delete table {family}
table {family} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat;
    ip saddr {plan.pods} ip daddr != {plan.pods} oifname != "{BRIDGE}" masquerade
  }}
}}
'''


def render(plan: AddressPlan, paths: Paths, *, forward: bool) -> Mapping[Path, str]:
    """Every configuration file with its text."""
    return {
        paths.config / "cni" / "10-bridge.conflist": _json(cni(plan, paths)),
        paths.config / "containerd.toml": containerd(paths),
        paths.config / "kubelet.json": _json(kubelet(plan, paths)),
        paths.config / "proxy.json": _json(proxy(plan, paths)),
        paths.config / "Corefile": corefile(plan, paths, forward=forward),
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
