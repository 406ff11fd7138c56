"""Hundreds of updates with random faults: nothing gets stuck, nothing stale is served, and memory does not grow."""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.demo import checks
from examples.demo.environment import SYSTEM_NAMESPACE, Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.support.victims import OPERATOR, VICTIMS, fresh_router, processes_of

REPLICAS = 16
UPDATES = 500
SAMPLED = 20  # updates between two looks at memory
WARM_UP = 100  # updates: caches and connection pools have their size by then
GROWTH = 1.05
SEED = 20261129
MISSING = "there-is-no-such-checkpoint"
# What is done to each update, and how often of a hundred.
FAULTS = {"nothing": 70, "superseded": 10, "missing checkpoint": 10, "engine": 7, "router": 2, "kubelet": 1}


@dataclass
class Memory:
    """Resident bytes of each process at every SAMPLED-th update of its life; what restarts begins anew."""

    series: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def sample(self, who: str, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                self.series.setdefault((who, pid), []).append(_resident(pid))

    def grown(self) -> dict[str, float]:
        """The largest of the last three samples over the one after the warm-up, of those that lived long enough."""
        warm = WARM_UP // SAMPLED
        old = {key: each for key, each in self.series.items() if len(each) >= warm + 4}
        return {f"{who} {pid}": max(each[-3:]) / each[warm] for (who, pid), each in old.items()}


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "VmRSS: 0 kB")  # a zombie has none
    return int(line.split()[1]) * 1024


async def _sample(memory: Memory, fleet: Fleet) -> None:
    document = json.loads(await kubectl("get", "pods", "-n", SYSTEM_NAMESPACE, "-l", OPERATOR, "-o", "json"))
    for who, pods in (("operator", document["items"]), ("engine", await fleet.pods())):
        memory.sample(who, [pid for pod in pods for pid in processes_of(pod["metadata"]["uid"])])


async def _one(fleet: Fleet, version: int, fault: str, path_of: Callable[[int], str]) -> tuple[int, str, str]:
    """One update, or two where the first is superseded: the newest version asked for, how it ended, and why."""
    shoot = await VICTIMS[fault](fleet) if fault in VICTIMS else None
    if fault == "missing checkpoint":
        await fleet.bump(version, MISSING, deadlines={"prepareSeconds": 2})
    else:
        await fleet.bump(version, path_of(version))
    if fault == "superseded":
        version += 1
        await fleet.bump(version, path_of(version))
    if shoot is not None:
        await shoot()
    document = await fleet.finished(version, timeout_s=180)
    if fault == "router":
        await fresh_router(fleet)
    status = document["status"]
    return version, str(status["phase"]), str(status["history"][-1].get("message", ""))


@pytest.mark.full
@pytest.mark.timeout(5400)
async def test_soak(environment: Environment, fleet: Fleet) -> None:
    known = known_outputs(environment, SIMULATED)
    kind = environment.simulated()
    paths = [folder.name for folder in folders(kind.models)]

    def path_of(version: int) -> str:
        return paths[version % len(paths)]

    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    dice, memory = random.Random(SEED), Memory()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=2, pace_s=0.1, sentinel_pause_s=0.1)
    version = 0
    async with Load(plan) as load:
        for number in range(UPDATES):
            (fault,) = dice.choices(list(FAULTS), weights=list(FAULTS.values()))
            version, outcome, why = await _one(fleet, version + 1, fault, path_of)
            outcomes[outcome] += 1
            faults[fault] += 1
            assert (outcome == "Failed") is (fault == "missing checkpoint"), (
                f"update {number}, {fault}: {outcome} {why}"
            )
            if number % SAMPLED == 0:
                await _sample(memory, fleet)
                print(f"{number} updates: {dict(outcomes)}", flush=True)
        engine = await fleet.serving(REPLICAS, timeout_s=120)
    print(f"{UPDATES} updates, {dict(faults)}: {dict(outcomes)}, {len(load.samples)} requests")
    by_version = {each: known[each % len(paths)] for each in range(version + 1)}
    assert checks.wrong_answers(load.samples, by_version) == []
    assert checks.stale_answers(load.samples) == []
    weight_version = await get("weightversion", fleet.weight_version, fleet.namespace)
    assert weight_version["status"]["phase"] in ("Active", "Failed")
    assert engine["status"]["committed"]["version"] <= version
    grown = memory.grown()
    print("memory, last over warm:", json.dumps({who: round(ratio, 3) for who, ratio in grown.items()}))
    assert {who.split()[0] for who in grown} == {"operator", "engine"}
    assert max(grown.values()) <= GROWTH, f"resident memory grew: {grown}"
