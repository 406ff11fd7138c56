"""A fleet that a trainer pushes to, with an operator of its own, and what a test does with them.

Whatever is killed here is of no other test.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import kubectl
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME, EngineKind
from tests.e2e.conftest import REAL
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import PhaseWatch, watching
from tests.e2e.pushing import Pusher, pusher, spec_of
from tests.e2e.releases import Release
from tests.e2e.strikes import asked, committed
from tests.e2e.training import grant
from tests.support.rollfleet import Command
from tests.support.victims import Shot, engine, pods_at

# No phase of an update has a longer time here, so no end comes later.
PREPARE_S, QUIESCE_S, TRANSFER_S, VERIFY_S = 25, 20, 60, 60
DEADLINES = {
    "deadlines": {
        "prepareSeconds": PREPARE_S,
        "quiesceSeconds": QUIESCE_S,
        "transferSeconds": TRANSFER_S,
        "verifySeconds": VERIFY_S,
    }
}
SENDING = "Sending"  # within Transferring: engines hold some tensors of the version before and some of the new one
TRAINER = "trainer"
ANSWER_S = 60.0


@dataclass
class Scene:
    """Every test leaves it serving one version, with a trainer that lives."""

    environment: Environment
    engines: str
    release: Release
    fleet: Fleet
    replicas: int
    folder: Path  # for the trainer's files
    start_s: float  # an engine that was killed serves again
    pace: dict[str, Any]
    trainers: AsyncExitStack = field(default_factory=AsyncExitStack)
    trainer: Pusher = field(init=False)

    @property
    def kind(self) -> EngineKind:
        """Real vLLM, or simulated engines whose steps take a second."""
        return self.environment.real() if self.engines == REAL else self.environment.simulated(slow=True)

    async def create(self) -> None:
        """Operator, fleet, trainer, and a first version of the trainer's."""
        await self.release.install(self.environment.images, 1)
        await self.fleet.create(self.kind, self.replicas, **spec_of(self.environment, self.kind))
        await grant(self.fleet)
        await self.fleet.serving(self.replicas)
        await self.new_trainer()
        await self.pushed(1)

    async def new_trainer(self) -> None:
        """Where the one before is no more."""
        like = self.path_of(0)
        coming = pusher(self.fleet, self.environment, self.folder, self.kind.models / like)
        self.trainer = await self.trainers.enter_async_context(coming)

    async def delete(self) -> None:
        """All of it."""
        await self.trainers.aclose()
        await self.release.uninstall()
        await self.fleet.delete()

    def path_of(self, version: int) -> str:
        """Weights repeat; versions do not."""
        paths = folders(self.kind.models)
        return paths[version % len(paths)].name

    async def push(
        self, version: int, *, stored: bool = True, given: Mapping[str, Any] = MappingProxyType({}), **spec: Any
    ) -> None:
        """Tell the trainer. Half-way it takes its time; `stored`: there is a copy from the beginning.

        given: more words for the trainer about its tensors.
        """
        path = self.path_of(version)
        await self.trainer.push(
            version=version,
            folder=str(self.kind.models / path),
            recovery=path if stored else None,
            paceS=0.1,
            spec={**DEADLINES, **spec},
            **given,
        )

    async def pushed(self, version: int, *, stored: bool = True) -> None:
        """A push that nothing befalls."""
        await self.push(version, stored=stored)
        told = await self.trainer.ended(longest_s(1))
        assert told["ended"] == "Active", told
        await self.fleet.active(version)

    async def asked_by_hand(self, version: int) -> None:
        """As the SDK asks, and no trainer offers it: the fleet waits in Preparing for one."""
        source: dict[str, Any] = {"type": "Trainer", "trainer": {}, "checkpoint": None}
        copy = {"checkpoint": {"path": self.path_of(version)}}
        patch = {"spec": {"version": version, "source": source, "recovery": copy, **DEADLINES}}
        where = ("weightversion", self.fleet.weight_version, "-n", self.fleet.namespace)
        await kubectl("patch", *where, "--type=merge", "-p", json.dumps(patch))

    async def aim(self, victim: str) -> Shot:
        """At the one that is to be killed."""
        if victim == "engine":
            return await engine(self.fleet)
        if victim == "operator":
            return await pods_at(self.release.namespace, self.release.pods)

        async def shoot() -> None:
            self.trainer.kill()

        return shoot

    async def meets(self, update: PhaseWatch, version: int, phase: str, **how: Any) -> bool:
        """Begin a push and wait for the phase; False where that went by unseen."""
        if phase == "Preparing":
            await self.asked_by_hand(version)
        else:
            await self.push(version, **how)
        if phase != SENDING:
            return await update.reached(version, phase) == phase
        await self.trainer.half(longest_s(1))
        return True

    async def holds(self, version: int) -> None:
        """All engines hold this version, verified now, and are open."""
        await self.fleet.serving(self.replicas, timeout_s=self.start_s)
        rollfleet = Command(self.fleet.namespace, Path(os.environ["KUBECONFIG"]))
        found = await rollfleet("verify", self.fleet.name, "-o", "json")
        assert found.code == 0, found.stderr
        told = found.document
        assert (told["holds"], told["committed"]) == (True, version)
        assert [each["digest"] for each in told["engines"]] == [told["digest"]] * self.replicas


@asynccontextmanager
async def under_load(scene: Scene) -> AsyncIterator[tuple[Load, PhaseWatch]]:
    """Afterwards every answer was what the weights that it names give, and no two versions answered at once."""
    known = known_outputs(scene.environment, scene.engines)
    first = await committed(scene.fleet)
    plan = Plan(await scene.fleet.url(), SERVED_NAME, tuple(known[0]), **scene.pace)
    async with Load(plan) as load, watching(scene.fleet) as update:
        yield load, update
    versions = range(first, await asked(scene.fleet) + 1)
    assert checks.wrong_answers(load.samples, {each: known[each % len(known)] for each in versions}) == []
    assert checks.stale_answers(load.samples) == []
    pods = [pod["metadata"]["name"] for pod in await scene.fleet.pods()]
    assert checks.overlapping_versions(await scene.fleet.gate_changes(pods)) == []


def longest_s(attempts: int) -> float:
    """That so many attempts may take at the operator."""
    return float(attempts * (PREPARE_S + QUIESCE_S + TRANSFER_S + VERIFY_S))


Deed = Callable[[], Awaitable[None]]
