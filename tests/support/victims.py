"""Whom the end-to-end tests kill, as a crash does it: SIGKILL to the processes, no goodbye to anybody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from examples.demo.environment import ROOT, SYSTEM_NAMESPACE
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError, kubectl

SANDBOX = "pause"  # holds a pod's network; a crash of the container leaves it
API_TIMEOUT_S = 60.0
OPERATOR = "app.kubernetes.io/name=rollfleet"

Kill = Callable[[Fleet], Awaitable[None]]


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


def _kill(pids: list[int]) -> None:
    assert pids, "nothing to kill: the process was not found on this machine"
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it went with its parent


async def _pods(namespace: str, selector: str) -> list[str]:
    document = json.loads(await kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))
    return [pod["metadata"]["uid"] for pod in document["items"]]


async def operator(_: Fleet) -> None:
    """The kubelet restarts it."""
    _kill([pid for uid in await _pods(SYSTEM_NAMESPACE, OPERATOR) for pid in processes_of(uid)])


async def engine(fleet: Fleet) -> None:
    """The first engine; the kubelet restarts its container, with the weights of model.path."""
    first = (await fleet.pods())[0]["metadata"]["uid"]
    _kill(processes_of(first))


async def router(fleet: Fleet) -> None:
    """The fleet's only router."""
    uids = await _pods(fleet.namespace, f"rollfleet.io/fleet={fleet.name},rollfleet.io/component=router")
    _kill([pid for uid in uids for pid in processes_of(uid)])


async def _component(name: str) -> None:
    command = (sys.executable, "-m", "devcluster", "status", "-o", "json")
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), API_TIMEOUT_S)
    pids = [each["pid"] for each in json.loads(out)["components"] if each["name"] == name and each["pid"]]
    _kill(pids)


async def _answers(path: str) -> None:
    """Wait until the API server answers this path."""
    async with asyncio.timeout(API_TIMEOUT_S):
        while True:
            try:
                await kubectl("get", "--raw", path, timeout_s=5)
            except KubectlError:
                await asyncio.sleep(0.2)
            else:
                return


async def api_server(_: Fleet) -> None:
    """It is started again at once; until it answers nobody can read or write anything."""
    await _component("kube-apiserver")
    await _answers("/readyz")


async def kubelet(fleet: Fleet) -> None:
    """Containers go on without it; it is started again at once, and knows its pods a few seconds later."""
    names = [pod["metadata"]["name"] for pod in await fleet.pods()]
    await _component("kubelet")
    for name in names:
        await _answers(f"/api/v1/namespaces/{fleet.namespace}/pods/{name}/log?container=engine&tailLines=1")


VICTIMS: dict[str, Kill] = {
    "operator": operator,
    "engine": engine,
    "router": router,
    "kube-apiserver": api_server,
    "kubelet": kubelet,
}
# Whose death a client may see as something else than 200 and 503 with Retry-After.
IN_THE_WAY = ("engine", "router")
