"""Kernel settings that the cluster changes, kubelet and kube-proxy included: noted before, put back after."""

import json
import shutil
from pathlib import Path

from devcluster.errors import MissingPrerequisiteError
from devcluster.shell import run

# What must hold. bridge-nf-call: an answer from pod to pod over the bridge must pass the Service's address translation.
WANTED = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}
# What kubelet (pkg/kubelet/cm, setupKernelTunables) and kube-proxy (pkg/proxy/conntrack) may set.
TOUCHED_BY_COMPONENTS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/conf/all/route_localnet",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
)
PROC = Path("/proc/sys")


def read_all() -> dict[str, str]:
    names = [*WANTED, *TOUCHED_BY_COMPONENTS]
    return {name: (PROC / name).read_text().strip() for name in names if (PROC / name).exists()}


def apply(record: Path) -> None:
    """Note the values that were there before the first change, then set ours."""
    if not (PROC / "net/bridge").exists() and shutil.which("modprobe"):
        run(["modprobe", "br_netfilter"], timeout_s=30)
    if not record.exists():
        record.write_text(json.dumps(read_all(), indent=1))
    for name, value in WANTED.items():
        if not (PROC / name).exists():
            raise MissingPrerequisiteError(
                f"the kernel has no {name}", "Load the module br_netfilter (modprobe br_netfilter)."
            )
        (PROC / name).write_text(value)


def restore(record: Path) -> None:
    """Put back what has changed since; without a record nothing was changed by us."""
    if not record.exists():
        return
    for name, value in json.loads(record.read_text()).items():
        file = PROC / name
        if file.exists() and file.read_text().strip() != value:
            file.write_text(value)
    record.unlink()
