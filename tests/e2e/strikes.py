"""Something done to a fleet in a certain phase of an update, however short that phase is."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl
from tests.e2e.phases import PhaseWatch

TRIES = 6


@dataclass(frozen=True)
class Struck:
    """What was met. `at` is of time.monotonic()."""

    before: int  # the committed version
    version: int
    at: float


async def committed(fleet: Fleet) -> int:
    """The version that the fleet serves."""
    status = (await get("rolloutengine", fleet.name, fleet.namespace))["status"]
    return int(status["committed"]["version"])


async def asked(fleet: Fleet) -> int:
    """The highest version that was ever asked for."""
    listed = json.loads(await kubectl("get", "weightversions", "-n", fleet.namespace, "-o", "json"))["items"]
    return max((int(each["spec"]["version"]) for each in listed), default=0)


async def strike(
    fleet: Fleet,
    update: PhaseWatch,
    phase: str,
    deed: Callable[[], Awaitable[None]],
    path_of: Callable[[int], str],
    **spec: Any,
) -> Struck:
    """Bump until an update is met in this phase, and do it. One that ran past the phase unseen ends Active first."""
    before, version = await committed(fleet), await asked(fleet)
    for _ in range(TRIES):
        version += 1
        await fleet.bump(version, path_of(version), **spec)
        if await update.reached(version, phase) == phase:
            moment = time.monotonic()
            await deed()
            return Struck(before, version, moment)
        await fleet.active(version)
        before = version
    raise AssertionError(f"no update of {TRIES} was seen in {phase}")
