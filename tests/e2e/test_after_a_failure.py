"""What follows a failure that touched weights, with real vLLM: each policy's end, and what people are told of it.

One engine dies in the middle of its transfer, or the files change after they were checked. Afterwards no engine is
paused without an owner, nothing is mixed, `kubectl get wv` says why in one line, `rollfleet diagnose` names cause and
remedy, and `rollfleet verify` finds by digest and probe what is said to be held, or says who holds it not.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from examples.demo import checks
from examples.demo.environment import Environment
from examples.demo.fleet import Fleet, condition
from examples.demo.kubectl import get, kubectl, until
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import REAL
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import PhaseWatch, watching
from tests.e2e.strikes import asked, committed, strike
from tests.support.damage import flipped_bit
from tests.support.rollfleet import Command, Ended
from tests.support.victims import engine as first_engine

REPLICAS = 2
START_S = 420.0  # an engine that was killed is back, beside a load
PATHS = ("base", "step-1", "step-2", "step-3")
WAIT = {"mode": "wait", "drainTimeoutSeconds": 20}  # Quiescing lasts as long as requests run
BOTH = {"minServing": REPLICAS}  # so that one engine's death is the update's failure

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Scene:
    """A fleet of real engines, and its checkpoints, which a test may damage and must put back."""

    fleet: Fleet
    models: Path
    rollfleet: Command

    async def reason(self, kind: str) -> str:
        """Of a condition of the fleet."""
        return str(condition(await get("rolloutengine", self.fleet.name, self.fleet.namespace), kind).get("reason"))

    async def until_reason(self, kind: str, reason: str) -> None:
        """Wait for it."""
        place = ("rolloutengine", self.fleet.name, self.fleet.namespace)
        await until(*place, lambda document: condition(document, kind).get("reason") == reason, START_S)

    async def line(self) -> str:
        """What `kubectl get wv` says."""
        where = ("-n", self.fleet.namespace, "--no-headers")
        (line,) = (await kubectl("get", "wv", self.fleet.weight_version, *where)).splitlines()
        return line

    async def guards(self) -> list[dict[str, Any]]:
        """Each engine's own word."""
        told = await self.rollfleet("diagnose", self.fleet.name, "-o", "json")
        assert told.code == 0, told.stderr
        return [guard["state"] for guard in told.document["guards"]]

    async def finding(self, reason: str) -> dict[str, str]:
        """What `rollfleet diagnose` makes of it: cause and remedy are never empty."""
        told = await self.rollfleet("diagnose", self.fleet.name, "-o", "json")
        assert told.code == 0, told.stderr
        found = [each for each in told.document["findings"] if each["reason"] == reason]
        assert found, told.document["findings"]
        assert found[0]["cause"]
        assert found[0]["remedy"]
        return dict(found[0])

    async def verified(self) -> Ended:
        """What `rollfleet verify` finds."""
        return await self.rollfleet("verify", self.fleet.name, "-o", "json")

    async def holds(self, version: int) -> None:
        """All engines hold this version by digest and probe, are open, and nobody is paused."""
        await self.fleet.serving(REPLICAS, timeout_s=START_S)
        found = await self.verified()
        assert found.code == 0, found.stderr
        assert (found.document["holds"], found.document["committed"]) == (True, version)
        assert [each["digest"] for each in found.document["engines"]] == [found.document["digest"]] * REPLICAS
        assert [(each["gate"], each["paused"]) for each in await self.guards()] == [("Open", False)] * REPLICAS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """One fleet for all: every test leaves it serving, on whole checkpoints."""
    folder = tmp_path_factory.mktemp("real")
    folder.chmod(0o755)  # root of the node reads it, whoever we are
    models = folder / "models"
    shutil.copytree(environment.models.real, models)
    fleet = Fleet("qwen", "e2e-after-a-failure")
    await fleet.create(replace(environment.real(), models=models), REPLICAS)
    await fleet.serving(REPLICAS)
    await fleet.bump(1, PATHS[1])
    await fleet.active(1)
    yield Scene(fleet, models, Command(fleet.namespace, Path(os.environ["KUBECONFIG"])))
    await fleet.delete()


@asynccontextmanager
async def load(environment: Environment, scene: Scene) -> AsyncIterator[tuple[Load, PhaseWatch]]:
    """A load and a watch; afterwards every answer is what its version gives, and no two versions answered at once."""
    known = known_outputs(environment, REAL)
    url = await scene.fleet.url()
    # Long requests: Quiescing waits for what is in flight, and lasts.
    plan = Plan(url, SERVED_NAME, tuple(known[0]), clients=2, long_every=1, pace_s=0.1, sentinel_pause_s=0.25)
    async with Load(plan) as running, watching(scene.fleet) as update:
        yield running, update
    versions = range(await asked(scene.fleet) + 1)
    assert checks.wrong_answers(running.samples, {each: known[each % len(PATHS)] for each in versions}) == []
    assert checks.stale_answers(running.samples) == []
    pods = [pod["metadata"]["name"] for pod in await scene.fleet.pods()]
    assert checks.overlapping_versions(await scene.fleet.gate_changes(pods)) == []


def path_of(version: int) -> str:
    return PATHS[version % len(PATHS)]


def answered(running: Load) -> set[int | None]:
    return {sample.version for sample in running.samples if sample.status == 200}


async def test_rollback_restores_the_version_before(environment: Environment, scene: Scene) -> None:
    async with load(environment, scene) as (running, update):
        shoot = await first_engine(scene.fleet)
        policy = {"onFailure": {"type": "Rollback"}, **BOTH}
        struck = await strike(scene.fleet, update, "Transferring", shoot, path_of, **policy)
        before = struck.before
        ended = await scene.fleet.finished(struck.version)
        assert ended["status"]["phase"] == "Failed"
        active = condition(ended, "Active")
        assert active["reason"] == "EnginesLost", active
        assert f"version {before} is restored from '{path_of(before)}'" in active["message"]
        line = await scene.line()
        for words in ("Failed", "EnginesLost", "is restored"):
            assert words in line
        await scene.finding("EnginesLost")
        await scene.holds(before)
    assert struck.version not in answered(running)
    assert await committed(scene.fleet) == before


async def test_retry_goes_on_once_the_engine_is_back(environment: Environment, scene: Scene) -> None:
    async with load(environment, scene) as (running, update):
        shoot = await first_engine(scene.fleet)
        struck = await strike(
            scene.fleet,
            update,
            "Transferring",
            shoot,
            path_of,
            onFailure={"type": "Retry", "maxAttempts": 2},
            **BOTH,
        )
        ended = await scene.fleet.active(struck.version, timeout_s=START_S)
        await running.until(struck.version, 60)
        await scene.holds(struck.version)
    status = ended["status"]
    assert status["attempt"] == 2
    assert status["lastAttempt"]["reason"] == "EnginesLost"


async def test_hold_keeps_what_was_touched_closed_until_somebody_decides(
    environment: Environment, scene: Scene
) -> None:
    before = await committed(scene.fleet)
    damaged, spare = scene.models / path_of(await asked(scene.fleet) + 1), scene.models / "spare"
    shutil.copytree(damaged, spare)

    async def damage() -> None:
        flipped_bit(damaged)

    async with load(environment, scene) as (running, update):
        policy = {"onFailure": {"type": "Hold"}}
        struck = await strike(scene.fleet, update, "Quiescing", damage, path_of, pause=WAIT, **policy)
        ended = await scene.fleet.finished(struck.version)
        assert ended["status"]["phase"] == "Failed", "files that change after they were checked are never served"
        assert condition(ended, "Active")["reason"] == "DigestMismatch"
        line = await scene.line()
        for words in ("Failed", "DigestMismatch", "spec.onFailure is Hold"):
            assert words in line
        await scene.until_reason("Available", "Held")
        for state in await scene.guards():
            assert (state["gate"], state["weights"]["state"]) == ("Closed", "Uncertain")
        await scene.finding("DigestMismatch")
        await scene.finding("Held")
        found = await scene.verified()
        assert found.code == 1
        for pod in await scene.fleet.pods():
            assert f"{pod['metadata']['name']}: " in found.stderr
        assert answered(running) <= {before}
        shutil.rmtree(damaged)
        spare.rename(damaged)
        again = await scene.rollfleet("retry", scene.fleet.name, "--wait", "--timeout", "100")
        assert again.code == 0, again.stderr
        await scene.holds(struck.version)


async def test_weights_that_nobody_can_read_again_are_lost_until_they_are_put_back(
    environment: Environment, scene: Scene
) -> None:
    before = await asked(scene.fleet) + len(PATHS)
    only = scene.models / "only-copy"  # of the bytes that the load knows under this number
    shutil.copytree(scene.models / path_of(before), only)
    await scene.fleet.bump(before, only.name)
    await scene.fleet.active(before)
    damaged, spare, away = scene.models / path_of(before + 1), scene.models / "spare", scene.models / "away"
    shutil.copytree(damaged, spare)

    async def lose() -> None:
        flipped_bit(damaged)
        only.rename(away)

    async with load(environment, scene) as (running, update):
        policy = {"onFailure": {"type": "Retry", "maxAttempts": 1}}
        struck = await strike(scene.fleet, update, "Quiescing", lose, path_of, pause=WAIT, **policy)
        ended = await scene.fleet.finished(struck.version)
        assert ended["status"]["phase"] == "Failed"
        assert "DigestMismatch" in await scene.line()
        await scene.until_reason("Available", "WeightsLost")
        assert only.name in (await scene.finding("WeightsLost"))["words"]
        assert (await scene.verified()).code == 1
        assert {state["gate"] for state in await scene.guards()} == {"Closed"}
        away.rename(only)
        await scene.holds(before)
        await running.until(before, 60)
        shutil.rmtree(damaged)
        spare.rename(damaged)
    assert struck.version not in answered(running)
