"""`rollfleet` in the operator's own pod, with nothing installed anywhere: it reads and asks, and may change nothing."""

import json

import pytest

from examples.demo.environment import SYSTEM_NAMESPACE, Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError, kubectl

REPLICAS = 2
POD = "deploy/rollfleet-operator"


async def _rollfleet(*arguments: str) -> str:
    return await kubectl("exec", "-n", SYSTEM_NAMESPACE, POD, "--", "rollfleet", *arguments)


async def test_what_reads_and_asks_works_there_and_what_changes_is_refused(
    environment: Environment, fleet: Fleet
) -> None:
    kind = environment.simulated()
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    await fleet.url()
    await fleet.bump(1, folders(kind.models)[1].name)
    await fleet.active(1)
    await fleet.serving(REPLICAS)
    here, names = ("-n", fleet.namespace), {pod["metadata"]["name"] for pod in await fleet.pods()}

    everywhere = await _rollfleet("status", "-A")
    assert fleet.namespace in everywhere
    one = json.loads(await _rollfleet("status", fleet.name, *here, "-o", "json"))
    assert one["serving"] == REPLICAS
    (entry,) = json.loads(await _rollfleet("history", fleet.name, *here, "-o", "json"))
    assert (entry["version"], entry["outcome"]) == (1, "Active")
    watched = await _rollfleet("watch", fleet.name, *here, "--until-active", "1", "--timeout", "20")
    assert fleet.name in watched

    planned = json.loads(await _rollfleet("plan", fleet.name, *here, "-o", "json"))
    assert (planned["actions"], planned["status_changes"], planned["unreachable"]) == ([], [], [])
    found = json.loads(await _rollfleet("diagnose", fleet.name, *here, "-o", "json"))
    assert found["findings"] == []
    assert {guard["pod"] for guard in found["guards"] if guard["state"]["gate"] == "Open"} == names
    verified = json.loads(await _rollfleet("verify", fleet.name, *here, "-o", "json"))
    assert (verified["holds"], verified["committed"]) == (True, 1)
    assert {each["engine"] for each in verified["engines"]} == names

    for change in (("bump", fleet.name, "--checkpoint", "step-2"), ("rollback", fleet.name, "--to", "1")):
        with pytest.raises(KubectlError, match="cannot patch resource"):
            await _rollfleet(*change, *here)
