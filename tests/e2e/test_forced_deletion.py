"""A pod is deleted by force in mid-update: its containers run on for a while, and nobody may be answered by them.

`kubectl delete --force --grace-period=0` takes the object away at once. The kubelet, which learns of it later, stops
the containers; the operator waits for the word of the engine's own guard, or until the kubelet of a Ready node has had
its time.
"""

import asyncio
import signal
import time
from typing import Any

import pytest

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from rollfleet_operator.core.policies import KUBELET_S
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import watching
from tests.e2e.strikes import strike
from tests.support.victims import give_signal, processes_of

REPLICAS = 3
GRACE_S = 40  # drainTimeoutSeconds of the fleet, and 30
PREPARE_S = 500
GUARDS_WORD_S = 60.0


async def _remembered(fleet: Fleet, uid: str) -> dict[str, Any] | None:
    """What the fleet's status tells of the member, while it does."""
    status = (await get("rolloutengine", fleet.name, fleet.namespace))["status"]
    return next((member for member in status.get("members", []) if member["uid"] == uid), None)


async def _let_go(fleet: Fleet, uid: str, timeout_s: float) -> bool:
    """Wait until the status has forgotten the member; whether it told of it as one that vanished."""
    vanished, deadline = False, time.monotonic() + timeout_s
    while (member := await _remembered(fleet, uid)) is not None:
        vanished = vanished or "vanishedSince" in member
        assert time.monotonic() < deadline, member
        await asyncio.sleep(0.5)
    return vanished


@pytest.mark.parametrize(
    ("guard", "phase"),
    [
        ("speaks", "Preparing"),
        pytest.param("speaks", "Transferring", marks=pytest.mark.full),
        pytest.param("is silent", "Preparing", marks=pytest.mark.full),
    ],
)
async def test_a_pod_deleted_by_force_is_fenced(environment: Environment, fleet: Fleet, guard: str, phase: str) -> None:
    kind, known = environment.simulated(slow=True), known_outputs(environment, SIMULATED)
    paths = [folder.name for folder in folders(kind.models)]
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    victim = (await fleet.pods())[0]["metadata"]
    processes = processes_of(victim["uid"])
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=3, pace_s=0.05)
    async with Load(plan) as load, watching(fleet) as update:

        async def take_its_voice() -> None:
            if guard == "is silent":  # it can say nothing while the kubelet ends it
                give_signal(processes, signal.SIGSTOP)

        deadlines = {"prepareSeconds": PREPARE_S}
        struck = await strike(
            fleet, update, phase, take_its_voice, lambda version: paths[version % 4], deadlines=deadlines
        )
        gone = ("pod", victim["name"], "-n", fleet.namespace, "--force", "--grace-period=0", "--wait=false")
        await kubectl("delete", *gone)
        vanished = await _let_go(fleet, victim["uid"], KUBELET_S + GRACE_S + 60)
        took = time.monotonic() - struck.at
        await fleet.active(struck.version, timeout_s=120)
        await fleet.serving(REPLICAS)
        await load.until(struck.version, 60)
    print(f"deleted by force in {phase}, its guard {guard}: let go after {took:.1f} s, seen {vanished}")
    if guard == "is silent":
        assert vanished, "status told of it"
        assert took >= KUBELET_S, "nobody had said that its containers ended"
    else:
        assert took <= GUARDS_WORD_S, "its own guard said so"
    assert checks.wrong_answers(load.samples, {each: known[each % 4] for each in range(struck.version + 1)}) == []
    assert checks.stale_answers(load.samples) == []
    pods = [pod["metadata"]["name"] for pod in await fleet.pods()]
    assert checks.overlapping_versions(await fleet.gate_changes(pods)) == []
