"""`python -m tests.model --schedules 2000`: search; `--seed 17 --schedules 1`: live that schedule again."""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.model.promises import BrokenPromise
from tests.model.report import Report
from tests.model.schedule import schedule_of
from tests.model.trace import tell
from tests.model.world import World

CHUNK = 20


def live(seed: int) -> Report:
    """One schedule."""
    return World(schedule_of(seed)).live()


def live_many(seeds: range) -> tuple[list[Report], list[tuple[int, str]]]:
    """Some, and what broke."""
    reports: list[Report] = []
    broken: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            reports.append(live(seed))
        except BrokenPromise as error:
            broken.append((seed, str(error)))
            print(f"seed {seed}: {error}", flush=True)
    return reports, broken


def _search(first: int, count: int, processes: int) -> tuple[list[Report], list[tuple[int, str]]]:
    chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    if processes == 1:
        return live_many(range(first, first + count))
    reports: list[Report] = []
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(live_many, chunk) for chunk in chunks]):
            more, bad = done.result()
            reports += more
            broken += bad
            print(
                f"{len(reports) + len(broken)} of {count} schedules, {len(broken)} broken", file=sys.stderr, flush=True
            )
    return reports, broken


def main() -> int:
    """Search, report, and say how to see a failure again."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="tell what happens in the first schedule")
    given = parser.parse_args()
    if given.trace:
        world = World(schedule_of(given.seed))
        tell(world)
        world.live()
    began = time.monotonic()
    reports, broken = _search(given.seed, given.schedules, given.processes)
    took = time.monotonic() - began
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for report in reports:
        faults.update(report.counts)
        outcomes.update(report.outcomes)
        seen.update(report.seen)
    total, minutes = sum(faults.values()), took / 60
    print(f"{given.schedules} schedules in {took:.0f} s: {given.schedules / minutes:.0f} schedules and ", end="")
    print(f"{total / minutes:.0f} faults a minute; {sum(report.simulated_s for report in reports) / 3600:.1f} h lived,")
    print(f"{sum(report.events for report in reports)} events with every promise checked after each,")
    print(f"{sum(report.passes for report in reports)} passes, {sum(report.commits for report in reports)} commits;")
    print(f"updates: {dict(outcomes)}")
    print(f"faults: {dict(faults.most_common())}")
    print("reached:")
    for what, count in sorted(seen.items()):
        print(f"  {count:8}  {what}")
    for seed, text in sorted(broken):
        print(f"\nBROKEN seed {seed}: {text}\n  again: python -m tests.model --seed {seed} --schedules 1")
    print(f"{len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
