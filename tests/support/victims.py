"""Whom the end-to-end tests kill, as a crash does it: SIGKILL to the processes, no goodbye to anybody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from examples.demo.environment import ROOT, SYSTEM_NAMESPACE
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError, kubectl

SANDBOX = "pause"  # holds a pod's network; a crash of the container leaves it
API_TIMEOUT_S = 60.0
OPERATOR = "app.kubernetes.io/name=rollfleet"

# Who is to die is found beforehand, so that the shot falls in the phase that was waited for.
Shot = Callable[[], Awaitable[None]]
Aim = Callable[[Fleet], Awaitable[Shot]]


def processes_of(pod_uid: str) -> list[int]:
    """Processes of a pod on this machine, but its sandbox, by their cgroups."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            inside = f"pod{pod_uid}" in (folder / "cgroup").read_text()
            if inside and (folder / "comm").read_text().strip() != SANDBOX:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def give_signal(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """To all of them, as nobody but a crash, or a machine that stands still, does it."""
    assert pids, "nothing to kill: the process was not found on this machine"
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it went with its parent


async def _pods(namespace: str, selector: str) -> list[str]:
    document = json.loads(await kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))
    return [pod["metadata"]["uid"] for pod in document["items"]]


def _at(pids: list[int]) -> Shot:
    async def shoot() -> None:
        give_signal(pids)

    return shoot


async def operator(_: Fleet) -> Shot:
    """The kubelet restarts it."""
    return await pods_at(SYSTEM_NAMESPACE, OPERATOR)


async def pods_at(namespace: str, selector: str) -> Shot:
    """All processes of these pods."""
    return _at([pid for uid in await _pods(namespace, selector) for pid in processes_of(uid)])


async def fresh_operator() -> None:
    """A new pod in the operator's place: the kubelet lets a container that was killed wait longer each time."""
    await fresh(SYSTEM_NAMESPACE, OPERATOR)


async def fresh_router(fleet: Fleet) -> None:
    """A new pod in the router's place, for the same reason."""
    await fresh(fleet.namespace, _router_of(fleet))


async def fresh(namespace: str, selector: str) -> None:
    """A new pod in the place of the one that there is."""
    which = ("pods", "-n", namespace, "-l", selector)
    await kubectl("delete", *which, "--wait=true")
    await kubectl("wait", *which, "--for=create", "--timeout=20s")
    await kubectl("wait", *which, "--for=condition=Ready", "--timeout=50s")


async def engine(fleet: Fleet) -> Shot:
    """The engine with the fewest restarts; the kubelet restarts its container, with the weights of model.path."""
    running = {pod["metadata"]["uid"]: _restarts(pod) for pod in await fleet.pods()}
    alive = (uid for uid in sorted(running, key=lambda uid: running[uid]) if processes_of(uid))
    return _at(processes_of(next(alive)))


def _restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses") or ())


def _router_of(fleet: Fleet) -> str:
    return f"rollfleet.io/fleet={fleet.name},rollfleet.io/component=router"


async def router(fleet: Fleet) -> Shot:
    """The fleet's only router."""
    return await pods_at(fleet.namespace, _router_of(fleet))


async def component(name: str) -> list[int]:
    """The process of the local cluster's component; `supervisor` is the one that starts the others again."""
    command = (sys.executable, "-m", "devcluster", "status", "-o", "json")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), API_TIMEOUT_S)
    told = json.loads(out)
    if name == "supervisor":
        return [told["supervisor"]]
    return [each["pid"] for each in told["components"] if each["name"] == name and each["pid"]]


async def answers(path: str) -> None:
    """Wait until the API server answers this path."""
    async with asyncio.timeout(API_TIMEOUT_S):
        while True:
            try:
                await kubectl("get", "--raw", path, timeout_s=5)
            except KubectlError:
                await asyncio.sleep(0.2)
            else:
                return


async def api_server(_: Fleet) -> Shot:
    """It is started again at once; until it answers nobody can read or write anything."""
    pids = await component("kube-apiserver")

    async def shoot() -> None:
        give_signal(pids)
        await answers("/readyz")

    return shoot


async def kubelet(fleet: Fleet) -> Shot:
    """Containers go on without it; it is started again at once, and knows its pods a few seconds later."""
    names = [pod["metadata"]["name"] for pod in await fleet.pods()]
    pids = await component("kubelet")

    async def shoot() -> None:
        give_signal(pids)
        for name in names:
            await answers(f"/api/v1/namespaces/{fleet.namespace}/pods/{name}/log?container=engine&tailLines=1")

    return shoot


VICTIMS: dict[str, Aim] = {
    "operator": operator,
    "engine": engine,
    "router": router,
    "kube-apiserver": api_server,
    "kubelet": kubelet,
}
# Whose death a client may see as something else than 200 and 503 with Retry-After.
IN_THE_WAY = ("engine", "router")
