"""What is on the machine, looked at by other means than devcluster's own: its tests do not believe its words."""

import json
import subprocess
from pathlib import Path

WITHOUT_THE_HOME = {"ascend-device-plugin", "pause"}  # all others name a file of the cluster's home
WATCHED_FOLDERS = (
    "/var/lib/kubelet", "/var/lib/cni", "/run/containerd", "/run/netns", "/var/log/containers",
    "/var/log/pods", "/opt/containerd", "/etc/cni", "/var/lib/containerd",
)  # fmt: skip
SYSCTLS = (
    "net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/bridge/bridge-nf-call-iptables",
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes", "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_timeout_established", "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
)  # fmt: skip

State = dict[str, set[str]]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _processes(home: Path) -> set[str]:
    """Of this cluster: a test of somebody else may run an etcd or API server of its own."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text(errors="replace").split("\0") if entry.name.isdigit() else [""]
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if words[0] else ""
        except OSError:  # it has just ended
            continue
        name = Path(words[0]).name
        is_ours = name in WITHOUT_THE_HOME or "supervise" in words or any(str(home) in word for word in words)
        if state not in ("", "Z") and is_ours:
            found.add(f"{entry.name} {name}")
    return found


def _cgroups() -> set[str]:
    root = Path("/sys/fs/cgroup")
    return {
        str(path) for path in root.rglob("*") if path.is_dir() and ("kubepods" in path.name or "rollfleet" in path.name)
    }


def look(home: Path) -> State:
    """Everything of the machine that a cluster could have changed."""
    tables = json.loads(output("nft", "--json", "list", "tables"))["nftables"]
    folders = [Path(name) for name in WATCHED_FOLDERS]
    return {
        "processes": _processes(home),
        "mounts": {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()},
        "interfaces": {link["ifname"] for link in json.loads(output("ip", "-json", "link", "show"))},
        "routes": set(output("ip", "route", "show", "table", "all").splitlines()),
        "namespaces": set(output("ip", "netns", "list").split()),
        "tables": {f"{t['table']['family']} {t['table']['name']}" for t in tables if "table" in t},
        "cgroups": _cgroups(),
        "files": {str(path) for folder in folders for path in [folder, *folder.rglob("*")] if path.exists()},
        "sysctls": {f"{name}={(Path('/proc/sys') / name).read_text().strip()}" for name in SYSCTLS},
    }


def added(before: State, after: State) -> State:
    """What is there after and was not before, by kind, without the kinds that have nothing."""
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
