"""The operator dies at every phase of an update and comes back: the update goes on and ends."""

import json

import pytest

from examples.demo import checks
from examples.demo.environment import SYSTEM_NAMESPACE, Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import kubectl
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import PHASES, watching
from tests.e2e.replaced import replaced

REPLICAS = 4


async def _kill_operator() -> None:
    """As a node's death does it: no grace, no goodbye."""
    which = ("-n", SYSTEM_NAMESPACE, "-l", "app.kubernetes.io/name=rollfleet", "-o", "name")
    gone = await kubectl("delete", "pods", *which, "--force", "--grace-period=0", "--wait=false")
    assert gone.startswith("pod"), "there was no operator to kill"


async def test_an_update_survives_the_death_of_its_operator(environment: Environment, fleet: Fleet) -> None:
    kind = environment.simulated(slow=True)
    known = known_outputs(environment, SIMULATED)
    paths = [folder.name for folder in folders(kind.models)]
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    killed_in: dict[str, str] = {}
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=4)
    async with Load(plan) as load, watching(fleet) as update:
        for number, phase in enumerate(PHASES):
            version = number + 1
            # Checkpoints repeat; versions do not.
            await fleet.bump(version, paths[version % len(paths)])
            killed_in[phase] = await update.reached(version, phase)
            await _kill_operator()
            await fleet.active(version, timeout_s=180)
            await fleet.serving(REPLICAS, timeout_s=60)
    print(f"killed in: {json.dumps(killed_in)}")
    by_version = {version: known[version % len(paths)] for version in range(len(PHASES) + 1)}
    assert checks.wrong_answers(load.samples, by_version) == []
    assert checks.stale_answers(load.samples) == []
    assert dict(checks.bad_refusals(load.samples)) == {}
    assert (
        checks.overlapping_versions(await fleet.gate_changes([p["metadata"]["name"] for p in await fleet.pods()])) == []
    )


async def test_deleting_the_weight_version_leaves_the_fleet_where_it_is(environment: Environment, fleet: Fleet) -> None:
    kind = environment.simulated()
    await fleet.create(kind, 2)
    await fleet.serving(2)
    await fleet.bump(1, folders(kind.models)[1].name)
    await fleet.active(1)
    await kubectl("delete", "weightversion", fleet.weight_version, "-n", fleet.namespace, timeout_s=30)
    engine = await fleet.serving(2)
    assert engine["status"]["committed"]["version"] == 1
    pod = (await fleet.pods())[0]["metadata"]
    await fleet.remove_pod(pod["name"])
    await replaced(fleet, pod["uid"], 2)
    engine = await fleet.serving(2)
    assert engine["status"]["committed"]["version"] == 1


@pytest.mark.parametrize("what", ["weightversion", "rolloutengine"])
async def test_c22_objects_go_away_at_once(environment: Environment, fleet: Fleet, what: str) -> None:
    """C22: no finalizer of ours holds anything."""
    kind = environment.simulated(slow=True)
    await fleet.create(kind, 2)
    await fleet.serving(2)
    async with watching(fleet) as update:
        await fleet.bump(1, folders(kind.models)[1].name)
        await update.reached(1, "Preparing")
    name = fleet.weight_version if what == "weightversion" else fleet.name
    await kubectl("delete", what, name, "-n", fleet.namespace, timeout_s=20)
    if what == "weightversion":
        engine = await fleet.serving(2, timeout_s=60)
        assert engine["status"]["committed"]["version"] in (0, 1)
