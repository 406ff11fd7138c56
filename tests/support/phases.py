"""Waiting for a phase of an update."""

from rollfleet_operator.ports import Manifest
from tests.support.fleet import World
from tests.support.waiting import until

PHASES = ["Preparing", "Quiescing", "Transferring", "Verifying", "Opening", "Active"]


async def reached(world: World, version: int, phase: str) -> None:
    """Wait until the update is in the phase or beyond it: a phase of simulated engines may last milliseconds."""

    async def there() -> bool:
        status: Manifest = (await world.read_version()).get("status") or {}
        if status.get("version") != version or status.get("phase") not in PHASES:
            return False
        return PHASES.index(status["phase"]) >= PHASES.index(phase)

    await until(there, 60, lambda: world.operator.log()[-6000:])
