"""The options by which faults are switched on, and the only way to do so."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rollfleet_engine.faults.orders import Orders
from rollfleet_engine.faults.plan import Plan, drawn_plan, read_plan

ReadPlan = Callable[[], Plan]


def add_options(parser: argparse.ArgumentParser) -> None:
    """--faults and --fault-seed."""
    group = parser.add_argument_group("faults", "an engine that fails as planned; docs/fault-injection.md")
    group.add_argument("--faults", type=Path, metavar="FILE", help="the plan, as JSON; SIGHUP reads it anew")
    group.add_argument(
        "--fault-seed", type=int, metavar="N", help="draw faults by this seed: the plan's, or without one the usual mix"
    )


def reader_of(
    arguments: argparse.Namespace, orders: Orders, check: Callable[[Plan], Plan] = lambda plan: plan
) -> ReadPlan | None:
    """What reads the plan, and again on SIGHUP; None where no faults are asked for. It raises PlanError."""
    path: Path | None = arguments.faults
    seed: int | None = arguments.fault_seed
    if path is None and seed is None:
        return None

    def read() -> Plan:
        if path is None:
            return orders.reduced(drawn_plan(seed or 0))
        return orders.require(check(read_plan(path, seed)))

    return read
