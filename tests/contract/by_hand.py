"""`python -m tests.contract.by_hand plan.json`: one simulated engine that fails as planned, and no cluster.

It plays the operator as the contract suite does: each line of standard input names a checkpoint (step-1 to step-3), to
which the engine is brought as a new version. What was done to the engine and how each update ended is printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rollfleet_engine.faults.plan import PlanError, read_plan
from rollfleet_protocol.state import EngineState
from tests.contract.client import Operator, held
from tests.contract.faulty import simulator_with
from tests.contract.models import SimulatedModels
from tests.contract.process import EngineProcess, Kind, Site
from tests.support.issuer import CertificateAuthority, Issuer
from tests.support.log_lines import json_lines

SIMULATOR = Kind("simulator", {"ROLLFLEET_ENGINE": "simulator"})
FAULTS = ('"event": "fault"', '"event": "faults.not_done"')


@contextmanager
def engine_with(plan: Path) -> Iterator[tuple[EngineProcess, Operator]]:
    """An engine that follows the plan, and who controls it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        issuer = Issuer(folder)
        site, models = Site(folder, issuer, CertificateAuthority("by hand")), SimulatedModels(folder / "models")
        engine = EngineProcess(
            SIMULATOR,
            site,
            "engine",
            models.folder(0),
            models.root,
            command=lambda config: simulator_with(plan, config),
        )
        try:
            engine.wait_live()
            operator = Operator(engine, site)
            yield engine, operator
            operator.close_client()
        finally:
            engine.stop()
            issuer.close()


def told(engine: EngineProcess, operator: Operator, what: str, step: Callable[[], EngineState]) -> list[str]:
    """Do it; the faults that were done meanwhile, and how it ended."""
    before = len(json_lines(engine.log(), *FAULTS))
    try:
        step()
        end = "done"
    except (AssertionError, httpx.HTTPError) as error:
        end = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    faults = [json.dumps(each, ensure_ascii=False) for each in json_lines(engine.log(), *FAULTS)[before:]]
    try:
        state = operator.state()
        now = f"gate {state.gate.value}, weights {held(state)[0].value} {held(state)[1]}"
    except (AssertionError, httpx.HTTPError) as error:
        now = f"it does not answer: {type(error).__name__}"
    return [*faults, f"{what}: {end}; {now}"]


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="tests.contract.by_hand", description="one simulated engine, driven by hand")
    parser.add_argument("plan", type=Path, help="which calls fail and how: docs/fault-injection.md")
    plan = parser.parse_args().plan.resolve()
    try:
        read_plan(plan, None)
    except PlanError as error:
        parser.error(str(error))
    with engine_with(plan) as (engine, operator):
        print(f"an engine at {engine.serving_url}; name a checkpoint, step-1 to step-3, or end with Ctrl-D", flush=True)
        print(*told(engine, operator, "version 0 as loaded at start", operator.serve_initial), sep="\n", flush=True)
        for version, line in enumerate(sys.stdin, 1):
            path = line.strip()
            lines = told(
                engine, operator, f"version {version} from {path}", lambda v=version, p=path: operator.update(v, p)
            )
            print(*lines, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
