"""What a cluster has put on the machine, found by looking at the machine and not at records: a crash leaves no records.

Processes are found by a mark in their environment, containers by their cgroup, mounts by their path, interfaces by the
bridge, rules by their table's name.
"""

import json
import os
import re
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from devcluster.components import DEVICE_PLUGIN_FOLDER
from devcluster.errors import CommandFailedError, LeftBehindError
from devcluster.network import BRIDGE, CGROUP, NFT_TABLE
from devcluster.shell import run
from devcluster.supervisor import MARK

KILL_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 30.0
UMOUNT_BATCH = 100
PROXY_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def marked_pids(home: Path) -> list[int]:
    """Every process that a cluster's supervisor started, with what these started (containerd's shims)."""
    mark = f"{MARK}={home}".encode()
    return [pid for pid in all_pids() if pid != os.getpid() and mark in _environment_of(pid)]


def mount_points(mountinfo: str) -> list[tuple[str, str]]:
    """(path, file system type) of each line of /proc/self/mountinfo (proc_pid_mountinfo(5)), oldest first."""
    found = []
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), fields.split()[4])
        found.append((path, source.split()[0]))
    return found


def current_mounts() -> list[tuple[str, str]]:
    return mount_points(Path("/proc/self/mountinfo").read_text())


def mounts_under(folder: Path) -> list[str]:
    """The newest first: the order to take them away in."""
    prefix = f"{folder}/"
    return [path for path, _ in reversed(current_mounts()) if path.startswith(prefix)]


def cgroup_folders() -> list[Path]:
    """Our cgroup in each hierarchy (v1 has many, v2 one) that it exists in."""
    roots = {Path(path) for path, kind in current_mounts() if kind in {"cgroup", "cgroup2"}}
    return sorted(root / CGROUP for root in roots if (root / CGROUP).is_dir())


def cgroup_pids() -> list[int]:
    """Processes of pods."""
    found: set[int] = set()
    for root in cgroup_folders():
        for folder, _, _ in os.walk(root):  # unlike rglob it bears with groups that go meanwhile
            try:
                found.update(int(word) for word in Path(folder, "cgroup.procs").read_text().split())
            except OSError:
                continue
    return sorted(found)


def links() -> list[dict[str, Any]]:
    """All interfaces, as iproute2 tells them; without it on the machine there was never a cluster."""
    if shutil.which("ip") is None:
        return []
    parsed: list[dict[str, Any]] = json.loads(run(["ip", "-json", "link", "show"], timeout_s=COMMAND_TIMEOUT_S) or "[]")
    return parsed


def our_links() -> list[str]:
    """The bridge last: its ports first."""
    ports = [link["ifname"] for link in links() if link.get("master") == BRIDGE]
    return ports + [link["ifname"] for link in links() if link["ifname"] == BRIDGE]


def bridge_owner() -> str:
    """The home that the bridge was made for; empty: there is no bridge."""
    owners = [link.get("ifalias", "") for link in links() if link["ifname"] == BRIDGE]
    return owners[0] or "unknown" if owners else ""


def our_tables() -> list[tuple[str, str]]:
    """The cluster's tables. kube-proxy's name is fixed: with another kubelet on the machine it may be theirs."""
    if shutil.which("nft") is None:
        return []
    listed = json.loads(run(["nft", "--json", "list", "tables"], timeout_s=COMMAND_TIMEOUT_S))
    tables = [entry["table"] for entry in listed["nftables"] if "table" in entry]
    wanted = {("ip", NFT_TABLE)} if foreign_kubelet() else {*PROXY_TABLES, ("ip", NFT_TABLE)}
    return [(t["family"], t["name"]) for t in tables if (t["family"], t["name"]) in wanted]


def kill_all(find: Callable[[], Iterable[int]], what: str) -> None:
    """SIGKILL until none is found: nothing of a throw-away cluster needs to say goodbye."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := list(find()):
        if time.monotonic() > deadline:
            raise LeftBehindError(f"{what} do not die: {pids}", "Look at /proc/PID/stack; a reboot clears them.")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def unmount_under(folder: Path) -> None:
    """Take away every mount below; lazily, since something dead may still hold one."""
    points = mounts_under(folder)
    for start in range(0, len(points), UMOUNT_BATCH):
        run(["umount", "--lazy", "--no-canonicalize", *points[start : start + UMOUNT_BATCH]], timeout_s=60)
    left = mounts_under(folder)
    if left:
        raise LeftBehindError(f"still mounted: {', '.join(left)}", "Unmount them by hand and run `down` again.")


def foreign_kubelet() -> bool:
    """Whether a kubelet answers on the machine that this cluster did not start."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(DEVICE_PLUGIN_FOLDER / "kubelet.sock"))
        except OSError:
            return False
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", peer)[0]
    return not any(entry.startswith(f"{MARK}=".encode()) for entry in _environment_of(pid))


def remove_links() -> None:
    """A pod's interface may go by itself between being seen and being deleted: the kernel ends namespaces later."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while names := our_links():
        try:
            for name in names:
                run(["ip", "link", "delete", name], timeout_s=COMMAND_TIMEOUT_S)
        except CommandFailedError:
            if time.monotonic() > deadline:
                raise


def remove_tables() -> None:
    for family, name in our_tables():
        run(["nft", "delete", "table", family, name], timeout_s=COMMAND_TIMEOUT_S)


def remove_cgroups() -> None:
    """Innermost first; a group whose last process has just died is busy for a moment."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for root in cgroup_folders():
        folders = [path for path in root.rglob("*") if path.is_dir()]
        for folder in sorted([root, *folders], key=lambda path: len(path.parts), reverse=True):
            _remove_cgroup(folder, deadline)


def _remove_cgroup(folder: Path, deadline: float) -> None:
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LeftBehindError(f"cgroup {folder}: {error.strerror}", "See its cgroup.procs.") from error
            time.sleep(0.05)


def create_cgroups() -> None:
    """The kubelet wants its root group to be there in every hierarchy that it uses."""
    for mount, kind in current_mounts():
        folder = Path(mount) / CGROUP
        if kind == "cgroup2" and (Path(mount) / "cgroup.controllers").read_text().strip():
            folder.mkdir(exist_ok=True)
            available = (Path(mount) / "cgroup.controllers").read_text().split()
            (Path(mount) / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in available))
        elif kind == "cgroup":
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group of v1, which then takes no process
                if (folder / name).exists() and not (folder / name).read_text().strip():
                    (folder / name).write_text((Path(mount) / name).read_text())


def create_bridge(gateway: IPv4Address, prefix: int, home: Path) -> None:
    """The alias says whose it is."""
    if not bridge_owner():
        # Without an address of its own a bridge takes the lowest of its ports', and changes it as pods come and go.
        mac = ["address", "0a:58:" + ":".join(f"{byte:02x}" for byte in gateway.packed)]
        run(["ip", "link", "add", BRIDGE, *mac, "type", "bridge"], timeout_s=COMMAND_TIMEOUT_S)
        run(["ip", "link", "set", BRIDGE, "alias", str(home)], timeout_s=COMMAND_TIMEOUT_S)
    run(["ip", "address", "replace", f"{gateway}/{prefix}", "dev", BRIDGE], timeout_s=COMMAND_TIMEOUT_S)
    run(["ip", "link", "set", BRIDGE, "up"], timeout_s=COMMAND_TIMEOUT_S)
