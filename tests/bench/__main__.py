"""`make bench`: what an update costs, beside what it replaces and beside its bare engine calls, in one run.

python -m tests.bench [-n ROUNDS] [-o json]
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from examples.demo.checks import first_answer_s
from examples.demo.environment import Environment, SetupError, folders, known_outputs, prepare, step
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError, kubectl
from examples.demo.load import Load, Plan, Sample
from examples.demo.manifests import SERVED_NAME
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from tests.bench import bare

REPLICAS = 2
PHASES = ("preparing", "quiescing", "transferring", "verifying", "opening")
SETTLE_S = 2.0  # of load on each side of what is measured


@dataclass
class Measured:
    """All figures, in seconds."""

    in_place_out_of_service: list[float] = field(default_factory=list)
    in_place_paused: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)  # from the operator's first look to Active
    phases: dict[str, list[float]] = field(default_factory=dict)
    first_answer: list[float] = field(default_factory=list)  # through the router, from when the commit was decided
    replaced_out_of_service: list[float] = field(default_factory=list)
    bare_staging: list[float] = field(default_factory=list)
    bare_calls: list[float] = field(default_factory=list)


def longest_gap(samples: Sequence[Sample], begin: float, end: float) -> float:
    """The longest stretch without a whole answer between two moments."""
    times = sorted(s.ended for s in samples if s.status == 200 and s.finish_reason != "abort")
    inside = [begin, *(t for t in times if begin <= t <= end), end]
    return max(later - sooner for sooner, later in itertools.pairwise(inside))


async def _answers_after(load: Load, moment: float, timeout_s: float) -> None:
    """Wait until whole answers have come for a while after `moment`."""
    deadline = time.monotonic() + timeout_s
    while not any(s.ended > moment + SETTLE_S and s.status == 200 for s in load.samples[-200:]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answers within {timeout_s} s")
        await asyncio.sleep(0.1)


async def _in_place(fleet: Fleet, load: Load, paths: list[str], rounds: int, measured: Measured) -> None:
    for version in range(1, rounds + 1):
        began = time.time()
        await _answers_after(load, began, 60)
        await fleet.bump(version, paths[version % len(paths)])
        status = (await fleet.active(version))["status"]
        await _answers_after(load, time.time(), 60)
        measured.in_place_out_of_service.append(longest_gap(load.samples, began, time.time()))
        measured.in_place_paused.append(float(status["pausedSeconds"]))
        committed = (await fleet.serving(REPLICAS))["status"]["committed"]
        moment = datetime.fromisoformat(committed["time"]).timestamp()
        measured.first_answer.append(first_answer_s(load.samples, version, moment))
        ended = datetime.fromisoformat(status["history"][-1]["time"])
        measured.update.append((ended - datetime.fromisoformat(status["startedAt"])).total_seconds())
        for phase in PHASES:
            measured.phases.setdefault(phase, []).append(float(status["phaseSeconds"][phase]))


async def _replace(fleet: Fleet, load: Load, rounds: int, measured: Measured) -> None:
    for _ in range(rounds):
        began = time.time()
        await _answers_after(load, began, 60)
        selector = f"rollfleet.io/fleet={fleet.name},rollfleet.io/component=engine"
        await kubectl("delete", "pods", "-n", fleet.namespace, "-l", selector, "--wait=true", timeout_s=120)
        await fleet.serving(REPLICAS)
        await _answers_after(load, time.time(), 60)
        measured.replaced_out_of_service.append(longest_gap(load.samples, began, time.time()))


async def _bare(environment: Environment, rounds: int, measured: Measured) -> None:
    models = environment.models.real
    async with bare.engines(environment.venv, models / "base", REPLICAS) as running:
        for number in range(rounds + 1):
            path = folders(models)[1 + number % (len(folders(models)) - 1)]
            started = time.monotonic()
            # As in the fleet, where each guard stages for itself.
            staged = await asyncio.gather(*(asyncio.to_thread(_stage, models, path.name) for _ in running))
            staging = time.monotonic() - started
            try:
                seconds = await bare.update(running, staged[0], first=number == 0)
            finally:
                for each in staged:
                    each.close()
            if number:  # the first one warms up
                measured.bare_staging.append(staging)
                measured.bare_calls.append(seconds)


def _stage(models: Path, path: str) -> StagedCheckpoint:
    return stage_checkpoint(models, path, read_model_tensors(models / "base"))


def _text(measured: Measured) -> str:
    def row(title: str, values: list[float]) -> str:
        return f"  {title:<48} {statistics.median(values):9.3f} {min(values):9.3f} {max(values):9.3f}"

    medians = {name: statistics.median(values) for name, values in asdict(measured).items() if name != "phases"}
    ratio = medians["replaced_out_of_service"] / medians["in_place_out_of_service"]
    bare_s = medians["bare_staging"] + medians["bare_calls"]
    lines = [
        f"  {'seconds':<48} {'median':>9} {'min':>9} {'max':>9}",
        row("out of service, updated in place (client)", measured.in_place_out_of_service),
        row("out of service, pods replaced (client)", measured.replaced_out_of_service),
        f"  replacing / in place: {ratio:.1f} x",
        row("update, from the first look to Active", measured.update),
        *(row(f"  {phase}", measured.phases[phase]) for phase in PHASES),
        row("paused (first gate closed to last one open)", measured.in_place_paused),
        row("first answer through the router after the commit", measured.first_answer),
        row("the same engine calls, bare, all engines at once", measured.bare_calls),
        row("staging, bare", measured.bare_staging),
        f"  our own overhead, T(update) - T(bare staging and calls): {medians['update'] - bare_s:.3f} s",
        f"  of it while paused, paused - T(bare calls): {medians['in_place_paused'] - medians['bare_calls']:.3f} s",
    ]
    return "\n".join(lines)


async def bench(environment: Environment, rounds: int, replacements: int) -> Measured:
    """In place, replaced, bare: one after the other on the same machine."""
    measured, fleet = Measured(), Fleet("bench", "rollfleet-bench")
    known = known_outputs(environment.models.real)
    paths = [folder.name for folder in folders(environment.models.real)]
    try:
        with step(f"starting {REPLICAS} real vLLM engines"):
            await fleet.create(environment.real(), REPLICAS)
            await fleet.serving(REPLICAS)
        plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=2, long_every=1000)
        async with Load(plan) as load:
            with step(f"{rounds} updates in place"):
                await _in_place(fleet, load, paths, rounds, measured)
            with step(f"{replacements} replacements of all pods"):
                await _replace(fleet, load, replacements, measured)
    finally:
        with step("removing the fleet"):
            await fleet.delete()
    with step(f"{rounds} times the bare engine calls"):
        await _bare(environment, rounds, measured)
    return measured


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--rounds", type=int, default=6)
    parser.add_argument("--replacements", type=int, default=2)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    try:
        measured = asyncio.run(bench(prepare(), arguments.rounds, arguments.replacements))
    except (SetupError, KubectlError, TimeoutError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(measured), indent=1) if arguments.output == "json" else _text(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
