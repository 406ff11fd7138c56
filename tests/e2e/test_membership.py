"""Who belongs to the fleet: labels, slow starts, devices that are not there, and a fleet that is left in peace."""

import asyncio
import json
import time
from typing import Any

import pytest

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet, condition
from examples.demo.kubectl import kubectl, until
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.support.waiting import until as wait_until

IDLE_S = 60.0
CHILDREN = "pods,services,deployments,replicasets,secrets,serviceaccounts,roles,rolebindings"
SERVING_LABEL = "rollfleet.io/serving"


async def _pod_by_label(fleet: Fleet, name: str, present: bool, timeout_s: float = 30.0) -> None:
    await until(
        "pod", name, fleet.namespace, lambda o: (SERVING_LABEL in o["metadata"].get("labels", {})) is present, timeout_s
    )


async def test_c05_a_removed_label_is_restored_and_never_opens_a_closed_gate(
    environment: Environment, fleet: Fleet
) -> None:
    kind = environment.simulated()
    known = known_outputs(environment, SIMULATED)
    await fleet.create(kind, 2)
    await fleet.serving(2)
    pod = (await fleet.pods())[0]["metadata"]["name"]
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=4)
    async with Load(plan) as load:
        await kubectl("label", "pod", pod, "-n", fleet.namespace, f"{SERVING_LABEL}-")
        await _pod_by_label(fleet, pod, present=True)
        await kubectl("label", "pod", pod, "-n", fleet.namespace, f"{SERVING_LABEL}-")
        await fleet.bump(1, folders(kind.models)[1].name)
        await fleet.active(1)
        await _pod_by_label(fleet, pod, present=True)
        await load.until(1, timeout_s=30)
    assert checks.wrong_answers(load.samples, known) == []
    assert dict(checks.bad_refusals(load.samples)) == {}
    changes = await fleet.gate_changes([p["metadata"]["name"] for p in await fleet.pods()])
    assert checks.overlapping_versions(changes) == []


async def _pod_by_readiness(fleet: Fleet, name: str, ready: str, timeout_s: float = 60.0) -> None:
    await until("pod", name, fleet.namespace, lambda o: condition(o, "Ready").get("status") == ready, timeout_s)


async def test_c05_a_pod_that_is_said_not_to_be_ready_answers_nothing_wrong(
    environment: Environment, fleet: Fleet
) -> None:
    """Readiness is another's word: what serves is told by the gate, before, in and after an update."""
    kind = environment.simulated()
    known = known_outputs(environment, SIMULATED)
    await fleet.create(kind, 2)
    await fleet.serving(2)
    pod = (await fleet.pods())[0]["metadata"]["name"]
    patch = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "SaidByATest"}]}})
    not_ready = ("patch", "pod", pod, "-n", fleet.namespace, "--subresource=status", "-p", patch)
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=4)
    async with Load(plan) as load:
        for version in (1, 2):
            await kubectl(*not_ready)
            await fleet.bump(version, folders(kind.models)[version].name)
            await fleet.active(version)
            await _pod_by_readiness(fleet, pod, "True")
            await load.until(version, timeout_s=30)
        await fleet.serving(2)
    assert checks.wrong_answers(load.samples, known) == []
    assert checks.stale_answers(load.samples) == []
    assert dict(checks.bad_refusals(load.samples)) == {}


async def test_c06_slow_and_fast_starts(environment: Environment, fleet: Fleet) -> None:
    """A slow engine may load within its budget, a fast one is ready in seconds, past the budget status says so."""
    started = time.monotonic()
    await fleet.create(environment.simulated(), 1, startup={"timeoutSeconds": 600})
    await fleet.serving(1, timeout_s=300)
    assert time.monotonic() - started < 200, "a fast engine must not wait for the slow ones' budget"
    slow = Fleet("slow", fleet.namespace)
    await slow.create(environment.simulated(start_delay_s=25), 1, startup={"timeoutSeconds": 120})
    never = Fleet("never", fleet.namespace)
    await never.create(environment.simulated(start_delay_s=600), 1, startup={"timeoutSeconds": 10})
    await slow.serving(1, timeout_s=120)
    pod = (await slow.pods())[0]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    document = await until(
        "rolloutengine",
        never.name,
        never.namespace,
        lambda o: (
            "startup" in json.dumps(o.get("status", {})).lower()
            and "10" in condition(o, "Available").get("message", "")
        ),
        120,
    )
    assert condition(document, "Available")["status"] == "False"


async def test_npus_are_really_exhausted(environment: Environment, fleet: Fleet) -> None:
    """16 devices: two engines of 8 start, the third waits, and status says why."""
    await fleet.create(environment.simulated(npus=8), 3)
    document = await until(
        "rolloutengine",
        fleet.name,
        fleet.namespace,
        lambda o: (
            (o.get("status") or {}).get("servingReplicas") == 2
            and "Insufficient huawei.com/Ascend910" in json.dumps(o["status"])
        ),
        120,
    )
    details = document["status"]["engines"]["details"]
    assert [detail["state"] for detail in details] == ["Unschedulable"]


async def test_scaling_follows_replicas(environment: Environment, fleet: Fleet) -> None:
    kind = environment.simulated()
    await fleet.create(kind, 1)
    await fleet.serving(1)
    await fleet.bump(1, folders(kind.models)[1].name)
    await fleet.active(1)
    await kubectl("scale", "rolloutengine", fleet.name, "-n", fleet.namespace, "--replicas=3")
    await fleet.serving(3, timeout_s=60)
    await kubectl("scale", "rolloutengine", fleet.name, "-n", fleet.namespace, "--replicas=1")
    await fleet.serving(1, timeout_s=60)

    async def one_is_left() -> bool:  # the others close their gates and drain
        return len(await fleet.pods()) == 1

    await wait_until(one_is_left, 60)
    changes = await fleet.gate_changes([p["metadata"]["name"] for p in await fleet.pods()])
    assert changes[-1].opened
    assert changes[-1].version == 1


async def _versions(namespace: str) -> dict[str, str]:
    """resourceVersion of everything of ours in the namespace."""
    kinds = f"rolloutengines,weightversions,{CHILDREN}"
    document: dict[str, Any] = json.loads(await kubectl("get", kinds, "-n", namespace, "-o", "json"))
    return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in document["items"]}


@pytest.mark.full  # in `make test` by tests/integration/test_idle.py
async def test_c31_an_idle_fleet_is_left_in_peace(environment: Environment, fleet: Fleet) -> None:
    kind = environment.simulated()
    await fleet.create(kind, 4)
    await fleet.serving(4)
    await fleet.bump(1, folders(kind.models)[1].name)
    await fleet.active(1)
    await fleet.serving(4)
    await _settled(fleet.namespace)
    before = await _versions(fleet.namespace)
    assert len(before) >= 10
    await asyncio.sleep(IDLE_S)  # the claim is about this stretch of time itself
    assert await _versions(fleet.namespace) == before
    # A stranger's annotation must not set anything off either.
    await kubectl("annotate", "rolloutengine", fleet.name, "-n", fleet.namespace, "example.org/note=1")
    touched = await _versions(fleet.namespace)
    await asyncio.sleep(5)
    assert await _versions(fleet.namespace) == touched
    changed = {name for name in before if touched[name] != before[name]}
    assert changed == {f"RolloutEngine/{fleet.name}"}


async def _settled(namespace: str, quiet_s: float = 3.0, timeout_s: float = 60.0) -> None:
    """Wait until nothing has changed for a while: the router's Deployment reports late."""
    deadline = time.monotonic() + timeout_s
    seen, since = await _versions(namespace), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, "the fleet does not come to rest"
        await asyncio.sleep(0.5)
        now = await _versions(namespace)
        if now != seen:
            seen, since = now, time.monotonic()
