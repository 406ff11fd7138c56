"""`python -m rollfleet_engine.faults LOG`: print the plan that does again what the log of a run tells."""

import argparse
import sys
from pathlib import Path

from rollfleet_engine.faults.injector import read_log
from rollfleet_engine.faults.plan import PlanError


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="rollfleet_engine.faults", description="print the plan that repeats the faults of a run"
    )
    parser.add_argument("log", type=Path, help="what the simulator or the proxy has written")
    try:
        plan = read_log(parser.parse_args(argv).log)
    except PlanError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    print(plan.model_dump_json(by_alias=True, exclude_none=True, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
