"""Whoever is killed, and in whatever phase of a push: no answer is wrong, and nobody waits beyond a deadline.

Not the operator: the update ends Active, or Failed with its reason. Not the engines: the fleet serves again, the new
version or the stored copy of the one before. And not the trainer: `update` returns or raises, and where the trainer
itself is killed, another one takes over. A few pairs run with every test run; `make kills` runs each victim in each
phase.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from examples.demo import checks
from examples.demo.environment import Environment
from examples.demo.fleet import Fleet, condition
from examples.demo.kubectl import get, until
from examples.demo.load import Load
from tests.e2e.conftest import REAL, SIMULATED
from tests.e2e.phases import PHASES, PhaseWatch
from tests.e2e.push_scene import (
    ANSWER_S,
    DEADLINES,
    PREPARE_S,
    QUIESCE_S,
    SENDING,
    TRAINER,
    TRANSFER_S,
    VERIFY_S,
    Deed,
    Scene,
    longest_s,
    under_load,
)
from tests.e2e.releases import Release
from tests.e2e.strikes import TRIES, Struck, asked, committed
from tests.support.victims import fresh

VICTIMS = (TRAINER, "operator", "engine")
MOMENTS = ("Preparing", "Quiescing", "Transferring", SENDING, "Verifying", "Opening")
assert set(PHASES) < set(MOMENTS)
TAKEN = ("Verifying", "Opening")  # every engine holds the weights: the trainer is not needed any more
LEASE_S = 15.0  # of a trainer that renews no more
GRACE_S = 60.0  # beyond the spec's deadlines: how long the SDK waits for an operator that is silent
SLACK_S = 20.0  # of a machine that runs all of this
# The router's own words, without Retry-After: while no engine knows what it holds, none of them is ready.
NO_WORKERS = "503 No available workers"
ONE_ATTEMPT = {"onFailure": {"type": "Retry", "maxAttempts": 1}}

MAIN = {(TRAINER, SENDING), ("operator", SENDING), ("engine", SENDING)}
# With real vLLM. What only a real engine has is a worker that sits in a collective when its peer dies, weights that are
# half loaded in its layers, and a start that takes a minute.
REAL_PAIRS = [
    (TRAINER, "Transferring"),
    (TRAINER, SENDING),
    (TRAINER, "Verifying"),
    ("operator", SENDING),
    ("operator", "Verifying"),
    ("engine", "Transferring"),
    ("engine", SENDING),
    ("engine", "Verifying"),
]
PAIRS = [
    pytest.param(SIMULATED, victim, moment, marks=[] if (victim, moment) in MAIN else [pytest.mark.full])
    for victim in VICTIMS
    for moment in MOMENTS
] + [pytest.param(REAL, victim, moment, marks=pytest.mark.full) for victim, moment in REAL_PAIRS]
BOTH = pytest.mark.parametrize("engines", [SIMULATED, REAL])


class Scenes:
    """The fleets, each made when it is needed first."""

    def __init__(self, environment: Environment, folders: pytest.TempPathFactory) -> None:
        self._environment, self._folders = environment, folders
        self.made: dict[str, Scene] = {}

    async def of(self, engines: str) -> Scene:
        """Real engines start slowly beside a load."""
        if engines not in self.made:
            is_real, namespace = engines == REAL, f"e2e-push-kills-{engines}"
            self.made[engines] = scene = Scene(
                environment=self._environment,
                engines=engines,
                release=Release("own", namespace),
                fleet=Fleet("qwen", namespace, operator=namespace),
                replicas=2 if is_real else 3,
                folder=self._folders.mktemp(engines),
                start_s=420.0 if is_real else 120.0,
                pace={"clients": 2, "pace_s": 0.2, "sentinel_pause_s": 0.25}
                if is_real
                else {"clients": 3, "pace_s": 0.1, "sentinel_pause_s": 0.1},
            )
            await scene.create()
        return self.made[engines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scenes(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scenes]:
    """For all tests: every one leaves its fleet serving, and begins with a higher version."""
    made = Scenes(environment, tmp_path_factory)
    yield made
    for scene in made.made.values():
        await scene.delete()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def strike(scene: Scene, update: PhaseWatch, moment: str, deed: Deed, **how: Any) -> Struck:
    """Push until an update is met at this moment, and do it. One that ran past it unseen ends Active first."""
    before, version = await committed(scene.fleet), await asked(scene.fleet)
    for _ in range(TRIES):
        version += 1
        if await scene.meets(update, version, moment, **how):
            at = time.monotonic()
            await deed()
            return Struck(before, version, at)
        assert (await scene.trainer.ended(longest_s(1)))["ended"] == "Active"
        await scene.fleet.active(version)
        before = version
    raise AssertionError(f"no push of {TRIES} was seen in {moment}")


@dataclass(frozen=True)
class End:
    """Of an update that somebody was killed in."""

    status: dict[str, Any]
    active: dict[str, Any]  # the condition
    took_s: float

    @classmethod
    async def of(cls, scene: Scene, struck: Struck, within_s: float) -> "End":
        """Wait for it: TimeoutError where the operator keeps no deadline."""
        found = await scene.fleet.finished(struck.version, timeout_s=within_s)
        return cls(found["status"], condition(found, "Active"), time.monotonic() - struck.at)

    @property
    def words(self) -> str:
        """For who reads the log."""
        status, reason = self.status, self.active.get("reason")
        figures = f"attempt {status['attempt']}, paused {status.get('pausedSeconds') or '-'} s"
        seconds = json.dumps(status.get("phaseSeconds") or {})
        return f"{status['phase']} ({reason}) {self.took_s:.1f} s later, {figures}, {seconds}"


async def goes_on(scene: Scene, load: Load, serves: int) -> None:
    """All engines serve this version; the next push is taken by all of them."""
    await scene.holds(serves)
    await load.until(serves, ANSWER_S, since=len(load.samples))
    version = await asked(scene.fleet) + 1
    await scene.pushed(version)
    await scene.holds(version)
    await load.until(version, ANSWER_S)


@pytest.mark.parametrize(("engines", "victim", "moment"), PAIRS)
async def test_whoever_is_killed_in_a_push(scenes: Scenes, engines: str, victim: str, moment: str) -> None:
    scene = await scenes.of(engines)
    async with under_load(scene) as (load, update):
        struck = await strike(scene, update, moment, await scene.aim(victim))
        if victim == TRAINER:
            serves = await without_trainer(scene, struck, moment)
        else:
            serves = await with_trainer(scene, struck, victim, moment)
        await goes_on(scene, load, serves)
    if serves != struck.version:
        assert struck.version not in {sample.version for sample in load.samples if sample.status == 200}
    if victim != "engine":
        assert others_than(NO_WORKERS if serves != struck.version else "", load) == {}
    if victim == "operator":
        await fresh(scene.release.namespace, scene.release.pods)


def others_than(allowed: str, load: Load) -> dict[str, int]:
    """What clients saw besides 200, 503 with Retry-After, and what begins so."""
    return {
        each: n for each, n in checks.bad_refusals(load.samples).items() if not (allowed and each.startswith(allowed))
    }


async def without_trainer(scene: Scene, struck: Struck, moment: str) -> int:
    """Nobody takes its place before the update has ended. Returns the version that the fleet serves then."""
    # Until its Lease has run out it may be taken for alive; where weights were touched a sender is waited for then.
    end = await End.of(scene, struck, LEASE_S + QUIESCE_S + PREPARE_S + SLACK_S)
    print(f"{scene.engines}: trainer killed in {moment}: {end.words}: {end.active['message']}")
    await scene.new_trainer()
    if moment in TAKEN:
        assert end.status["phase"] == "Active"
        return struck.version
    assert end.status["phase"] == "Failed"
    assert end.active["reason"] in ("SenderMissing", "SenderLost"), end.active
    before = struck.before
    stays, restored = f"version {before} stays", f"version {before} is restored from {scene.path_of(before)!r}"
    if moment in ("Preparing", "Quiescing"):
        assert stays in end.active["message"]
    elif moment == SENDING:
        assert restored in end.active["message"]
    else:
        assert stays in end.active["message"] or restored in end.active["message"]
    return before


async def with_trainer(scene: Scene, struck: Struck, victim: str, moment: str) -> int:
    """The trainer goes on until the fleet serves what it sent."""
    if moment == "Preparing":
        await scene.push(struck.version)
    told = await scene.trainer.ended(longest_s(3) + GRACE_S)
    end = await End.of(scene, struck, SLACK_S)
    print(
        f"{scene.engines}: {victim} killed in {moment}: {end.words}; trainer: {told['ended']}, {told['seconds']:.1f} s"
    )
    assert told["ended"] == "Active", told
    assert end.status["phase"] == "Active"
    return struck.version


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("higher", [0, 1], ids=["the same version", "a higher version"])
async def test_another_trainer_takes_over_at_once(scenes: Scenes, engines: str, higher: int) -> None:
    scene = await scenes.of(engines)
    async with under_load(scene) as (load, update):
        struck = await strike(scene, update, SENDING, await scene.aim(TRAINER))
        version = struck.version + higher
        await scene.new_trainer()
        await scene.push(version)
        told = await scene.trainer.ended(LEASE_S + longest_s(3))
        took_s = time.monotonic() - struck.at
        print(f"{engines}: another trainer sends {version} in place of {struck.version}: {told}, {took_s:.1f} s later")
        assert told["ended"] == "Active", told
        await goes_on(scene, load, version)
    if higher:
        assert struck.version not in {sample.version for sample in load.samples if sample.status == 200}
    assert others_than(NO_WORKERS, load) == {}


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("victim", [TRAINER, "engine"])
async def test_a_version_that_is_stored_nowhere_is_asked_for(scenes: Scenes, engines: str, victim: str) -> None:
    """Weights are half new, and nobody has the old ones: the fleet stays closed, says so, and takes the next push."""
    scene = await scenes.of(engines)
    await scene.pushed(await asked(scene.fleet) + 1, stored=False)
    async with under_load(scene) as (load, update):
        struck = await strike(scene, update, SENDING, await scene.aim(victim), stored=False, **ONE_ATTEMPT)
        end = await End.of(scene, struck, LEASE_S + SLACK_S)
        print(f"{engines}: {victim} killed, nothing stored: {end.words}: {end.active['message']}")
        assert (end.status["phase"], end.active["reason"]) == ("Failed", "WeightsLost")
        if victim == TRAINER:
            await scene.new_trainer()
        else:
            told = await scene.trainer.ended(SLACK_S)
            assert told["ended"] == "FleetNeedsWeights", told
        where = ("rolloutengine", scene.fleet.name, scene.fleet.namespace)
        await until(*where, lambda o: condition(o, "Available").get("reason") == "WeightsLost", scene.start_s)
        assert (await get(*where))["status"].get("servingReplicas", 0) == 0
        version = struck.version + 1
        await scene.pushed(version)
        await goes_on(scene, load, version)
    assert struck.version not in {sample.version for sample in load.samples if sample.status == 200}


WRONG = (
    {"misnames": ["model.embed_tokens.weight"]},  # in the first of several parts
    {"omits": ["model.norm.weight"], "isWhole": True},
)


@pytest.mark.parametrize("engines", [SIMULATED, pytest.param(REAL, marks=pytest.mark.full)])
async def test_tensors_that_are_not_the_model_s_cost_a_pause_and_nothing_else(scenes: Scenes, engines: str) -> None:
    """Nothing is stored, and all engines hold what they held: they serve it again at once."""
    scene = await scenes.of(engines)
    await scene.pushed(await asked(scene.fleet) + 1, stored=False)
    async with under_load(scene) as (load, _):
        before = await committed(scene.fleet)
        for version, given in enumerate(WRONG, before + 1):
            [name] = given.get("misnames", given.get("omits"))
            await scene.push(version, stored=False, given=given)
            told = await scene.trainer.ended(longest_s(1))
            found = await scene.fleet.finished(version, timeout_s=SLACK_S)
            active = condition(found, "Active")
            print(
                f"{engines}: {given}: {told['ended']}, {active['message']}; paused {found['status']['pausedSeconds']} s"
            )
            assert told["ended"] == "UpdateFailed", told
            assert ("CoverageFailed" in told["text"], name in told["text"]) == (True, True), told
            assert (active["reason"], found["status"]["attempt"]) == ("CoverageFailed", 1)
            assert active["message"].endswith(f"no weights were touched, version {before} stays")
            await load.until(before, ANSWER_S, since=len(load.samples))
        await goes_on(scene, load, before)
    assert {sample.version for sample in load.samples if sample.status == 200} == {before, before + len(WRONG) + 1}
    assert others_than("", load) == {}


@pytest.mark.full
@BOTH
async def test_a_trainer_does_not_wait_for_an_operator_that_is_gone(scenes: Scenes, engines: str) -> None:
    scene = await scenes.of(engines)
    transfer_s = 15
    short = {"deadlines": {**DEADLINES["deadlines"], "transferSeconds": transfer_s}}

    async def away() -> None:
        await (await scene.aim("operator"))()
        await scene.release.scale(0)

    async with under_load(scene) as (load, update):
        struck = await strike(scene, update, SENDING, away, **short)
        told = await scene.trainer.ended(transfer_s + GRACE_S + VERIFY_S + SLACK_S)
        print(f"{engines}: the operator is gone: trainer: {told}")
        assert (told["ended"], "OperatorSilent" in told["text"]) == ("UpdateFailed", True), told
        assert time.monotonic() - struck.at <= transfer_s + GRACE_S + SLACK_S
        await scene.release.scale(1)
        end = await End.of(scene, struck, TRANSFER_S + longest_s(1))
        print(f"{engines}: the operator is back: {end.words}")
        assert end.status["phase"] in ("Active", "Failed")
        await goes_on(scene, load, struck.version if end.status["phase"] == "Active" else struck.before)
    assert others_than(NO_WORKERS, load) == {}
