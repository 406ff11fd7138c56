"""Putting the machine back. One way for a cluster that is well, half up, or killed: look, kill, remove, look again."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from devcluster import machine, sysctls
from devcluster.components import DEVICE_PLUGIN_FOLDER
from devcluster.errors import LeftBehindError
from devcluster.paths import Paths

CNI_RESULTS = Path("/var/lib/cni/results")  # libcni's cache; its place is not configurable through containerd
SHIM_SOCKETS = Path("/run/containerd/s")
CONTAINER_LOG_LINKS = Path("/var/log/containers")  # fixed in the kubelet
KEPT_IN_HOME = frozenset({"logs", "lock"})
DEVICE_PLUGIN_FILES = ("kubelet.sock", "kubelet_internal_checkpoint", "huawei.com_Ascend910.sock", "DEPRECATION")


def tear_down(paths: Paths) -> None:
    """Remove everything; raises LeftBehindError if something remains.

    The supervisor goes with the rest: the first round of signals meets it too, so that it cannot start anything again.
    """
    sockets = _shim_sockets(paths)
    machine.kill_all(lambda: machine.marked_pids(paths.home), "processes of the cluster")
    machine.kill_all(machine.cgroup_pids, "processes of pods")
    machine.unmount_under(paths.home)
    machine.remove_links()
    machine.remove_tables()
    machine.remove_cgroups()
    sysctls.restore(paths.host_before)
    for file in [*sockets, *_stray_files(paths)]:
        file.unlink(missing_ok=True)
    for folder in (DEVICE_PLUGIN_FOLDER, CNI_RESULTS, SHIM_SOCKETS, CONTAINER_LOG_LINKS):
        _remove_if_empty(folder)
        _remove_if_empty(folder.parent)
    _clear_home(paths)
    left = leftovers(paths)
    if any(left.values()):
        raise LeftBehindError(f"left on the machine: {left}", "Remove it by hand and run `down` again.")


def leftovers(paths: Paths) -> Mapping[str, list[str]]:
    """What of a cluster is on the machine now, by kind: all empty after `down`."""
    return {
        "processes": [str(pid) for pid in machine.marked_pids(paths.home)],
        "podProcesses": [str(pid) for pid in machine.cgroup_pids()],
        "mounts": machine.mounts_under(paths.home),
        "interfaces": machine.our_links(),
        "nftTables": [f"{family} {name}" for family, name in machine.our_tables()],
        "cgroups": [str(folder) for folder in machine.cgroup_folders()],
        "files": [str(file) for file in _stray_files(paths)],
    }


def _shim_sockets(paths: Paths) -> list[Path]:
    """containerd keeps each shim's address in the task's bundle; the socket lies in a folder shared with others."""
    bundles = paths.containerd_state / "io.containerd.runtime.v2.task" / "k8s.io"
    addresses = [file.read_text().strip() for file in bundles.glob("*/address")]
    return [Path(address.removeprefix("unix://")) for address in addresses]


def _stray_files(paths: Paths) -> list[Path]:
    """Files outside our folders, at places that the components do not let us choose."""
    logs = f"{paths.logs}/"
    links = [link for link in _entries(CONTAINER_LOG_LINKS) if _target(link).startswith(logs)]
    namespaces = f"{paths.containerd_state}/"  # a result names the network namespace that it was for
    results = [file for file in _entries(CNI_RESULTS) if namespaces in _text(file)]
    plugin = [] if machine.foreign_kubelet() else [DEVICE_PLUGIN_FOLDER / name for name in DEVICE_PLUGIN_FILES]
    return [*links, *results, *(file for file in plugin if file.exists())]


def _target(link: Path) -> str:
    """Where a link leads; empty for what is none, or has gone meanwhile."""
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:  # the pod has gone meanwhile
        return ""


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _clear_home(paths: Paths) -> None:
    """Nothing is mounted below any more: removing cannot reach another file system. Logs stay, for the curious."""
    for entry in _entries(paths.home):
        if entry.name in KEPT_IN_HOME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
