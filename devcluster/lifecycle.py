"""`up` and `down`."""

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from devcluster import (
    api,
    base,
    binaries,
    bootstrap,
    configs,
    images,
    machine,
    pki,
    prerequisites,
    status,
    supervisor,
    sysctls,
    teardown,
)
from devcluster.components import DEVICE_PLUGIN_FOLDER, KUBECONFIGS, NPU_COUNT, components
from devcluster.errors import NotReadyError, NotRunningError, OccupiedError
from devcluster.network import NODE, AddressPlan
from devcluster.paths import SOURCE, Paths
from devcluster.shell import run, say, step, tail_of, wait_until

LOCK_TIMEOUT_S = 1800.0  # another `up` may be building
COMPONENT_TIMEOUT_S = 120.0
NODE_TIMEOUT_S = 60.0


@contextlib.contextmanager
def locked(file: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """One at a time; the kernel lets go of the lock with the process that held it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:

        def take() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not take():
            if timeout_s > 0:
                say("waiting for another devcluster command to end")
            wait_until(take, f"the lock {file}", timeout_s, lambda: f"See who holds it: fuser {file}")
        yield


def _if_nobody_builds(paths: Paths, work: Callable[[], None]) -> None:
    """Tidying up waits for nobody: the next command does it."""
    with contextlib.suppress(NotReadyError), locked(paths.build_lock, timeout_s=0.0):
        work()


def _prune(paths: Paths) -> None:
    binaries.prune(paths, time.time())
    images.prune(paths, time.time())


def build(paths: Paths) -> tuple[Path, dict[str, Path]]:
    """Everything that `up` needs, made once: prerequisites, programs, images."""
    prerequisites.check_machine()
    needed = {**prerequisites.RUNTIME, **prerequisites.IMAGES}
    if not prerequisites.missing_packages(needed) and not binaries.missing(paths):
        folder = binaries.ensure(paths)
        if not base.missing(paths, folder):
            return folder, base.made(paths, folder)  # no need to wait for somebody else's build
    with locked(paths.build_lock):
        prerequisites.ensure(needed)
        folder = binaries.ensure(paths)
        return folder, base.ensure(paths, folder)


def up(plan: AddressPlan, paths: Paths) -> None:
    """Idempotent: a cluster that is well is left alone, one that is not is made anew."""
    folder, archives = build(paths)
    with locked(paths.lock):
        refuse_if_not_ours(paths)
        if status.read(plan, paths).state == "Up":
            _already_up(plan, paths, folder)
        else:
            teardown.tear_down(paths)
            refuse_if_foreign_kubelet()
            with step("starting the cluster"):
                _start(plan, paths, folder, archives)
    _if_nobody_builds(paths, lambda: _prune(paths))


def image(plan: AddressPlan, paths: Paths, wanted: images.Build) -> None:
    """Build an image and, if there is a cluster, load it."""
    build(paths)
    with locked(paths.build_lock):
        archive = images.build(paths, wanted)
    with locked(paths.lock):
        if status.read(plan, paths).state == "Down":
            raise NotRunningError(
                f"built, but there is no cluster to load it into: {archive}", "Run: python3 -m devcluster up"
            )
        images.load(paths, wanted.tag, archive)


def _already_up(plan: AddressPlan, paths: Paths, folder: Path) -> None:
    say("already up")
    if paths.plan.read_text() != _plan_text(plan, paths, folder):
        say("  started by another version of devcluster: `down` and `up` renew it")


def refuse_if_not_ours(paths: Paths) -> None:
    """Another home's cluster shares our names on the machine: taking ours down would break it."""
    owner = machine.bridge_owner()
    if owner and owner != str(paths.home):
        raise OccupiedError(
            f"a cluster of {owner} is on this machine", f"Run: DEVCLUSTER_HOME={owner} python3 -m devcluster down"
        )


def refuse_if_foreign_kubelet() -> None:
    if machine.foreign_kubelet():
        raise OccupiedError(
            f"another kubelet listens in {DEVICE_PLUGIN_FOLDER}", "Stop it: one kubelet per machine has device plugins."
        )


def _has_resolver() -> bool:
    file = configs.host_resolver()
    return file.exists() and any(line.startswith("nameserver") for line in file.read_text().splitlines())


def _plan_text(plan: AddressPlan, paths: Paths, folder: Path) -> str:
    return json.dumps({"components": [c.to_json() for c in components(plan, paths, folder)]}, indent=1)


def _write_files(plan: AddressPlan, paths: Paths, folder: Path) -> None:
    pki.create(paths.pki, plan)
    for file, text in configs.render(plan, paths, forward=_has_resolver()).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in KUBECONFIGS:
        pki.write_kubeconfig(paths.config / f"{name}.kubeconfig", plan.api_url, paths.pki, name)
    pki.write_kubeconfig(paths.kubeconfig, plan.api_url, paths.pki, "admin")
    paths.plan.write_text(_plan_text(plan, paths, folder))


def _prepare_machine(plan: AddressPlan, paths: Paths) -> None:
    sysctls.apply(paths.host_before)
    machine.create_bridge(plan.gateway, plan.pods.prefixlen, paths.home)
    machine.create_cgroups()
    run(["nft", "--file", "-"], timeout_s=30, stdin=configs.nftables(plan))


def _fresh_logs(paths: Paths) -> None:
    """Keep the logs of the run before, and no more."""
    previous = paths.home / "logs.previous"
    shutil.rmtree(previous, ignore_errors=True)
    if paths.logs.exists():
        paths.logs.rename(previous)
    paths.logs.mkdir(parents=True)


def _start(plan: AddressPlan, paths: Paths, folder: Path, archives: dict[str, Path]) -> None:
    _fresh_logs(paths)
    _write_files(plan, paths, folder)
    _prepare_machine(plan, paths)
    supervisor.spawn(paths, sys.executable, SOURCE)
    # First what others wait for (DNS its rights), then what takes long, then the rest.
    for name in ("containerd", "etcd", "kube-apiserver"):
        _wait_component(paths, name)
    bootstrap.apply(plan, folder / "kubectl", paths.kubeconfig)
    for tag, archive in archives.items():
        images.load(paths, tag, archive)
    for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "device-plugin", "kube-proxy", "coredns"):
        _wait_component(paths, name)
    _wait_node(plan, paths)


def _wait_component(paths: Paths, name: str) -> None:
    """Until the supervisor saw it ready. One that died is not waited for; the device plugin may be on its way back."""

    def find() -> status.ComponentStatus | None:
        return next((c for c in status.read_components(paths)[1] if c.name == name), None)

    def ready() -> bool:
        seen = find()
        if seen is not None and seen.exits and not seen.restarts:
            raise NotReadyError(f"{name} ended: {seen.exits[-1]}", _log_of(paths, name))
        return seen is not None and seen.is_well

    wait_until(ready, f"{name} answers", COMPONENT_TIMEOUT_S, lambda: _log_of(paths, name))
    seen = find()
    if seen is not None:
        say(f"  {name}: ready after {seen.ready_after_s:.1f} s")


def _log_of(paths: Paths, name: str) -> str:
    log = paths.logs / f"{name}.log"
    supervisor_log = tail_of(paths.logs / "supervisor.log")
    return f"{log} ends with:\n{tail_of(log)}\n{supervisor_log}".rstrip()


def _wait_node(plan: AddressPlan, paths: Paths) -> None:
    """Ready, with all its NPUs, and pods can be made: their namespace has its ServiceAccount."""

    def ready() -> bool:
        node = status.node_summary(api.get(plan, paths, f"/api/v1/nodes/{NODE}"))
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        return node["ready"] and node["npus"] == NPU_COUNT and api.get(plan, paths, account) is not None

    logs = ("kubelet", "device-plugin")
    wait_until(
        ready, "the node is Ready with its NPUs", NODE_TIMEOUT_S, lambda: "\n".join(_log_of(paths, log) for log in logs)
    )


def down(paths: Paths) -> None:
    """Put the machine back, whatever state it is in."""
    prerequisites.check_machine()
    with locked(paths.lock), step("removing the cluster"):
        refuse_if_not_ours(paths)
        teardown.tear_down(paths)
    # What a killed build has left mounted; a running one is let be.
    _if_nobody_builds(paths, lambda: machine.unmount_under(paths.buildah))
