"""Whoever is killed, and in whatever phase: the update ends Active, and no client ever sees a wrong answer.

A few pairs run with every test run; `make test-full` runs each victim in each phase.
"""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import PHASES, watching
from tests.support.victims import IN_THE_WAY, VICTIMS, fresh_operator

REPLICAS = 4
MAIN = {
    ("engine", "Preparing"),
    ("engine", "Transferring"),
    ("router", "Quiescing"),
    ("kube-apiserver", "Transferring"),
    ("kubelet", "Verifying"),
    ("operator", "Transferring"),
}
PAIRS = [
    pytest.param(victim, phase, marks=[] if (victim, phase) in MAIN else [pytest.mark.full], id=f"{victim}-{phase}")
    for victim in VICTIMS
    for phase in PHASES
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(environment: Environment) -> AsyncIterator[Fleet]:
    """One fleet for all: every pair leaves it serving, and begins with a higher version."""
    fleet = Fleet("qwen", "e2e-kills")
    await fleet.create(environment.simulated(slow=True), REPLICAS)
    await fleet.serving(REPLICAS)
    yield fleet
    await fleet.delete()


async def _committed(fleet: Fleet) -> int:
    status = (await get("rolloutengine", fleet.name, fleet.namespace))["status"]
    return int(status["committed"]["version"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("victim", "phase"), PAIRS)
async def test_whoever_is_killed_the_update_ends(
    environment: Environment, serving: Fleet, victim: str, phase: str
) -> None:
    known = known_outputs(environment, SIMULATED)
    paths = [folder.name for folder in folders(environment.simulated().models)]
    version = await _committed(serving) + 1
    plan = Plan(await serving.url(), SERVED_NAME, tuple(known[0]), clients=3, pace_s=0.05)
    async with Load(plan) as load, watching(serving) as update:
        shoot = await VICTIMS[victim](serving)
        await serving.bump(version, paths[version % len(paths)])
        killed_in = await update.reached(version, phase)
        await shoot()
        ended = await serving.active(version, timeout_s=180)
        await serving.serving(REPLICAS, timeout_s=120)
        await load.until(version, 60)
    seconds = json.dumps(ended["status"]["phaseSeconds"])
    print(f"{victim} killed in {killed_in}: Active, paused {ended['status']['pausedSeconds']} s, {seconds}")
    by_version = {each: known[each % len(paths)] for each in (version - 1, version)}
    assert checks.wrong_answers(load.samples, by_version) == []
    assert checks.stale_answers(load.samples) == []
    if victim not in IN_THE_WAY:
        assert dict(checks.bad_refusals(load.samples)) == {}
    pods = [pod["metadata"]["name"] for pod in await serving.pods()]
    assert checks.overlapping_versions(await serving.gate_changes(pods)) == []
    if victim == "operator":
        await fresh_operator()
