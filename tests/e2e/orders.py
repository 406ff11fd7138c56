"""Which orders an engine began to follow, by its guard's own log."""

import json
from typing import NamedTuple

from examples.demo.fleet import Fleet
from examples.demo.kubectl import kubectl
from tests.support.log_lines import whole_lines


class Order(NamedTuple):
    """An operation that began."""

    operation: str
    epoch: int
    version: int


async def orders(fleet: Fleet) -> dict[str, list[Order]]:
    """By pod, in the order of time."""
    found = {}
    for pod in await fleet.pods():
        name = pod["metadata"]["name"]
        text = await kubectl("logs", name, "-n", fleet.namespace, "-c", "engine", "--tail=-1")
        found[name] = [order for line in whole_lines(text) if (order := _order(line)) is not None]
    return found


def _order(line: str) -> Order | None:
    start = line.find("{")
    if start < 0 or '"event": "operation"' not in line:
        return None
    entry = json.loads(line[start:])
    if entry["status"] != "Running":
        return None
    return Order(entry["operation"], entry["epoch"], entry["version"])
