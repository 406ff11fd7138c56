"""Whoever is killed, and in whatever phase: the update ends Active, and no client ever sees a wrong answer.

A few pairs run with every test run; `make kills` runs each victim in each phase, and ten pairs with real vLLM.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME, EngineKind
from tests.e2e.conftest import REAL, SIMULATED
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import PHASES, watching
from tests.e2e.strikes import committed, strike
from tests.support.victims import IN_THE_WAY, VICTIMS, fresh_operator, fresh_router

MAIN = {
    ("engine", "Preparing"),
    ("engine", "Transferring"),
    ("router", "Quiescing"),
    ("kube-apiserver", "Transferring"),
    ("kubelet", "Verifying"),
    ("operator", "Transferring"),
}
# The ten with real vLLM. What only a real engine has is its own process tree, its way of dying with weights half loaded
# or its scheduler paused, and a start that takes a minute: so the engine from Quiescing on. The operator where an order
# of it is under way in vLLM and only the guard's answer tells how it ended (Transferring, Verifying), and between the
# commit and opening. API server and kubelet while weights are half new, when nobody can say so or restart anything, and
# the router when traffic comes back. In Preparing vLLM is not touched: there a simulated engine is the same.
REAL_PAIRS = [
    ("engine", "Quiescing"),
    ("engine", "Transferring"),
    ("engine", "Verifying"),
    ("engine", "Opening"),
    ("operator", "Transferring"),
    ("operator", "Verifying"),
    ("operator", "Opening"),
    ("kube-apiserver", "Transferring"),
    ("kubelet", "Transferring"),
    ("router", "Opening"),
]
PAIRS = [
    pytest.param(SIMULATED, victim, phase, marks=[] if (victim, phase) in MAIN else [pytest.mark.full])
    for victim in VICTIMS
    for phase in PHASES
] + [pytest.param(REAL, victim, phase, marks=pytest.mark.full) for victim, phase in REAL_PAIRS]


@dataclass(frozen=True)
class Scene:
    """A fleet for all pairs of its kind: every one leaves it serving, and begins with a higher version."""

    engines: str
    fleet: Fleet
    replicas: int
    paths: tuple[str, ...]
    pace: dict[str, float]
    update_s: float
    start_s: float  # an engine that was killed is back

    def path_of(self, version: int) -> str:
        """Checkpoints repeat; versions do not."""
        return self.paths[version % len(self.paths)]


class Scenes:
    """The fleets, each made when it is needed first."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.made: dict[str, Scene] = {}

    async def of(self, engines: str) -> Scene:
        """Simulated engines whose steps take a second, or real ones, which start slowly beside a load."""
        if engines not in self.made:
            self.made[engines] = scene = self._scene(engines)
            await scene.fleet.create(self._kind(engines), scene.replicas)
            await scene.fleet.serving(scene.replicas)
        return self.made[engines]

    def _kind(self, engines: str) -> EngineKind:
        return self._environment.real() if engines == REAL else self._environment.simulated(slow=True)

    def _scene(self, engines: str) -> Scene:
        is_real = engines == REAL
        pace = {"clients": 2, "pace_s": 0.2, "sentinel_pause_s": 0.25} if is_real else {"clients": 3, "pace_s": 0.05}
        paths = tuple(folder.name for folder in folders(self._kind(engines).models))
        times = (420.0, 420.0) if is_real else (180.0, 120.0)
        return Scene(engines, Fleet("qwen", f"e2e-kills-{engines}"), 2 if is_real else 4, paths, pace, *times)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scenes(environment: Environment) -> AsyncIterator[Scenes]:
    """For the whole matrix."""
    made = Scenes(environment)
    yield made
    for scene in made.made.values():
        await scene.fleet.delete()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("engines", "victim", "phase"), PAIRS)
async def test_whoever_is_killed_the_update_ends(
    environment: Environment, scenes: Scenes, engines: str, victim: str, phase: str
) -> None:
    serving = await scenes.of(engines)
    fleet, known = serving.fleet, known_outputs(environment, serving.engines)
    first = await committed(fleet)
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), **serving.pace)
    async with Load(plan) as load, watching(fleet) as update:
        shoot = await VICTIMS[victim](fleet)
        struck = await strike(fleet, update, phase, shoot, serving.path_of)
        ended = await fleet.active(struck.version, timeout_s=serving.update_s)
        await fleet.serving(serving.replicas, timeout_s=serving.start_s)
        await load.until(struck.version, 60)
    status = ended["status"]
    print(
        f"{serving.engines}: {victim} killed in {phase}: Active at attempt {status['attempt']}, "
        f"paused {status['pausedSeconds']} s, {json.dumps(status['phaseSeconds'])}"
    )
    versions = range(first, struck.version + 1)
    assert checks.wrong_answers(load.samples, {each: known[each % len(known)] for each in versions}) == []
    assert checks.stale_answers(load.samples) == []
    if victim not in IN_THE_WAY:
        assert dict(checks.bad_refusals(load.samples)) == {}
    pods = [pod["metadata"]["name"] for pod in await fleet.pods()]
    assert checks.overlapping_versions(await fleet.gate_changes(pods)) == []
    if victim == "operator":
        await fresh_operator()
    if victim == "router":
        await fresh_router(fleet)
