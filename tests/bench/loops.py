"""`make bench-loops`: an update by rollfleet, by vLLM's own HTTP client, and by hand with asyncio, in one run.

python -m tests.bench.loops [-n ROUNDS] [--layers N] [-o json]

Two engines of a fleet and two vLLM servers without a guard (loops_engines.py) live all the time; one trainer's process
(loops_trainer.py) updates the two of a side, by each way in each round, in an order that turns. Meanwhile a client per
engine asks for one token over and over, which is all that is measured with: how long no answer came, and by which
weights they were. A round begins and ends on a machine that is otherwise quiet, or is thrown away.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from devtools import trainer_packages
from examples.demo.environment import Environment, SetupError, prepare, step
from examples.demo.fleet import Fleet
from examples.demo.kubectl import KubectlError
from tests.bench import quiet
from tests.bench.gaps import Seen, seen
from tests.bench.loops_engines import start
from tests.bench.pauses import write_model
from tests.bench.probing import probing
from tests.contract.sdk_scene import Process
from tests.e2e.training import kubeconfig

WAYS = ("rollfleet", "sequence", "asyncio")
TITLES = {
    "rollfleet": "rollfleet: RolloutFleet.update, operator, guards",
    "sequence": "vLLM's HTTP client, engine after engine",
    "asyncio": "asyncio by hand, all engines at once",
}
WEIGHTS = ("step-1", "step-2")
SETTLE_S = 2.0  # of answers before and after an update
MOST_AGAIN = 20  # rounds that others disturbed
QUIET_S = 1.0
MOST_OF_OTHERS = 0.8  # processors: four engines at rest take 0.3, the local Kubernetes 0.15


@dataclass
class Side:
    """Two engines, and how many updates they have had."""

    urls: list[str]
    updates: int = 0
    logprob: float | None = None  # by the weights that they have now


@dataclass(frozen=True)
class Measured:
    """One update."""

    seen: Seen
    seconds: float  # from the trainer's call until its return
    told: dict[str, Any] = field(default_factory=dict)  # what rollfleet measured itself


async def one_update(trainer: Process, side: Side, way: str) -> Measured:
    """Answers before, the update, answers after."""
    async with probing(side.urls) as prober:
        await asyncio.sleep(SETTLE_S)
        await prober.until(time.monotonic() - SETTLE_S / 2)
        begin = time.monotonic()
        told = await asyncio.to_thread(trainer.do, "update", way=way, weights=side.updates % len(WEIGHTS))
        end = time.monotonic()
        side.updates += 1
        await prober.until(end)
        await asyncio.sleep(SETTLE_S)
    old = prober.answers[0].logprob if side.logprob is None else side.logprob
    side.logprob = prober.answers[-1].logprob
    last = {each.engine: each for each in prober.answers}
    if any(each.by(old) or not each.by(side.logprob) for each in last.values()):
        raise RuntimeError(f"after an update by {way} the engines answer {last}; before it was {old}")
    seconds = told.pop("seconds")
    return Measured(seen(prober.answers, begin, end, old, side.logprob), seconds, told)


def others() -> float:
    """Processors that are busy while nothing is measured."""
    spent, own = quiet.spent_s(), quiet.own_s(())
    time.sleep(QUIET_S)
    return (quiet.spent_s() - spent - (quiet.own_s(()) - own)) / QUIET_S


async def until_quiet() -> None:
    """Raises DisturbedError."""
    deadline = time.monotonic() + quiet.DEADLINE_S
    while (busy := await asyncio.to_thread(others)) > MOST_OF_OTHERS:
        if time.monotonic() > deadline:
            raise quiet.DisturbedError(f"others kept {busy:.1f} processors busy for {quiet.DEADLINE_S:.0f} s")


async def measure(trainer: Process, sides: dict[str, Side], rounds: int) -> dict[str, list[Measured]]:
    """All ways in every round; the first round, which forms the groups, is not counted."""
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    counted, again = -1, 0
    while counted < rounds:
        turn = (counted + again) % len(WAYS)
        await until_quiet()
        one_round = {}
        for way in WAYS[turn:] + WAYS[:turn]:
            try:
                one_round[way] = await one_update(trainer, sides[way], way)
            except ExceptionGroup as failed:
                raise RuntimeError(f"in an update by {way}: {failed.exceptions[0]}") from failed
        if await asyncio.to_thread(others) > MOST_OF_OTHERS:
            again += 1
            if again > MOST_AGAIN:
                raise quiet.DisturbedError(f"{again} rounds were disturbed by others")
            continue
        for way in WAYS if counted >= 0 else ():
            found[way].append(one_round[way])
        counted += 1
    return found


async def bench(environment: Environment, rounds: int, layers: int) -> dict[str, list[Measured]]:
    """Start everything, measure, and remove it."""
    fleet = Fleet("qwen", f"bench-loops-{secrets.token_hex(3)}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = await asyncio.to_thread(models_in, environment, root, layers)
        try:
            with step("starting two engines of a fleet and two without"):
                guarded, plain = (Side(urls) for urls in await start(fleet, environment, models, root / "checkpoints"))
            account = await kubeconfig(fleet, root / "grpo.json")
            trainer = await asyncio.to_thread(trainer_of, account, fleet, plain, models)
            try:
                with step(f"{rounds} rounds"):
                    return await measure(
                        trainer, {way: guarded if way == "rollfleet" else plain for way in WAYS}, rounds
                    )
            finally:
                await asyncio.to_thread(trainer.close)
        finally:
            with step("removing them"):
                await fleet.delete()


def models_in(environment: Environment, root: Path, layers: int) -> Path:
    """Folders base, step-1, step-2: the tiny models, or such with wider layers. Pods of other users read them."""
    root.chmod(0o755)
    (root / "checkpoints").mkdir()
    if not layers:
        return environment.models.real
    models = root / "models"
    for seed, name in enumerate(("base", *WEIGHTS)):
        size = write_model(environment.models.real / "base", models / name, layers, seed)
    print(f"  weights of {size >> 20} MiB", flush=True)
    return models


def trainer_of(account: Path, fleet: Fleet, plain: Side, models: Path) -> Process:
    """Once it has the weights in memory."""
    packages = trainer_packages.ensure()
    environ = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # answers go to standard output
    process = Process("tests.bench.loops_trainer", packages, answer_s=180.0, **environ)
    folders = [str(models / name) for name in WEIGHTS]
    where = {"fleet": f"{fleet.namespace}/{fleet.name}", "kubeconfig": str(account)}
    process.do("begin", checkpoints=folders, urls=plain.urls, **where)
    return process


def text(found: dict[str, list[Measured]]) -> str:
    """A block for each way."""
    lines = []
    for way, each in found.items():
        lines.append(f"{TITLES[way]}: {len(each)} updates; seconds, median (min to max)")
        lines += [f"  {title:<52} {told(values)}" for title, values in rows(each)]
        lines.append(f"  {'answers by neither weights':<52} {sum(one.seen.strange for one in each)}")
    return "\n".join(lines)


def rows(each: Sequence[Measured]) -> list[tuple[str, list[float]]]:
    """Figures in seconds."""
    figures = [
        ("out of service, the engine that was it for longest", [one.seen.worst for one in each]),
        ("out of service, all engines together", [one.seen.lost for one in each]),
        ("no engine answered", [one.seen.nobody for one in each]),
        ("old and new weights answered at the same time", [one.seen.both for one in each]),
        ("from the trainer's call until its return", [one.seconds for one in each]),
    ]
    if each[0].told:
        figures.append(("paused, as the operator says", [one.told["pausedS"] for one in each]))
        figures += [(f"  {phase}", [one.told["phases"][phase] for one in each]) for phase in each[0].told["phases"]]
    return figures


def told(values: Sequence[float]) -> str:
    """One figure."""
    return f"{statistics.median(values):7.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="tests.bench.loops", description="three ways to update engines, in one run")
    parser.add_argument("-n", "--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=0, help="of 50 MiB; else the tiny model")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    try:
        found = asyncio.run(bench(prepare(), arguments.rounds, arguments.layers))
    except (SetupError, KubectlError, TimeoutError, RuntimeError, quiet.DisturbedError) as error:
        print(f"bench-loops: {error}", file=sys.stderr)
        return 1
    if arguments.output == "json":
        print(json.dumps({way: [asdict(one) for one in each] for way, each in found.items()}, indent=1))
    else:
        print(text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
