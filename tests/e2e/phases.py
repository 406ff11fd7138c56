"""How far an update is, as its WeightVersion tells."""

import asyncio

from examples.demo.fleet import FINISHED, Fleet
from examples.demo.kubectl import get

PHASES = ("Preparing", "Quiescing", "Transferring", "Verifying", "Opening")


async def reached(fleet: Fleet, version: int, phase: str, timeout_s: float = 60.0) -> str:
    """The phase in which the update to `version` is once it has reached `phase` (it may have run past it)."""
    order = ("Pending", *PHASES)
    async with asyncio.timeout(timeout_s):
        while True:
            status = (await get("weightversion", fleet.weight_version, fleet.namespace)).get("status") or {}
            now = status.get("phase", "Pending")
            if status.get("version") == version and (now in FINISHED or order.index(now) >= order.index(phase)):
                return str(now)
            await asyncio.sleep(0.02)
