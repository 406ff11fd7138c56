"""The real API server is away for minutes in mid-update: fleets serve on where they served, and the update ends after.

All deadlines of the update are shorter than the outage: they count from when the API server is back.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from examples.demo import checks
from examples.demo.environment import SYSTEM_NAMESPACE, Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import kubectl
from examples.demo.load import Load, Plan, Sample
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import watching
from tests.support.outages import frozen, refused
from tests.support.victims import OPERATOR

REPLICAS = 4
AWAY_S = 150.0
DEADLINE_S = 40
DEADLINES = {f"{phase}Seconds": DEADLINE_S for phase in ("prepare", "quiesce", "transfer", "verify")}
WINDOW_S = 10.0
SETTLE_S = 15.0  # from the outage's begin: what was sent before it arrives, and a guard that is closed stays so
Outage = Callable[[], AbstractAsyncContextManager[None]]

pytestmark = pytest.mark.full


async def _operators() -> dict[str, int]:
    """Restarts by uid of the operator's pods."""
    document = json.loads(await kubectl("get", "pods", "-n", SYSTEM_NAMESPACE, "-l", OPERATOR, "-o", "json"))
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in document["items"]
    }


def _answered(samples: list[Sample], begin: float, end: float) -> list[Sample]:
    return [sample for sample in samples if sample.status == 200 and begin <= sample.started and sample.ended <= end]


@pytest.mark.parametrize(
    ("outage", "phase"),
    [(refused, "Preparing"), (frozen, "Quiescing"), (refused, "Transferring")],
    ids=["refused-Preparing", "frozen-Quiescing", "refused-Transferring"],
)
async def test_the_update_ends_after_the_api_server_is_back(
    environment: Environment, fleet: Fleet, outage: Outage, phase: str
) -> None:
    kind, known = environment.simulated(slow=True), known_outputs(environment, SIMULATED)
    await fleet.create(kind, REPLICAS)
    await fleet.serving(REPLICAS)
    operators = await _operators()
    pods = [pod["metadata"]["name"] for pod in await fleet.pods()]
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=3, pace_s=0.1, sentinel_pause_s=0.1)
    async with Load(plan) as load, watching(fleet) as update:
        await load.until(0, 30)
        await fleet.bump(1, folders(kind.models)[1].name, deadlines=DEADLINES)
        met = await update.reached(1, phase)
        async with outage():
            begin = time.time()
            await asyncio.sleep(AWAY_S)  # the claim is about this stretch of time itself
            end = time.time()
        back = time.monotonic()
        ended = await fleet.active(1, timeout_s=4 * DEADLINE_S + 60)
        took = time.monotonic() - back
        await fleet.serving(REPLICAS)
        await load.until(1, 60)
    meanwhile = _answered(load.samples, begin + SETTLE_S, end)
    changes = await fleet.gate_changes(pods)
    reopened = [change for change in changes if change.opened and begin < change.time < end]
    print(
        f"API server {outage.__name__} in {met} for {end - begin:.0f} s: {len(meanwhile)} answers meanwhile, "
        f"{len(reopened)} gates reopened, Active {took:.1f} s after it was back, attempt {ended['status']['attempt']}"
    )
    assert met == phase
    assert {sample.version for sample in meanwhile} <= {0}, "nobody commits without an API server"
    if phase == "Preparing":
        windows = {int((sample.ended - begin) // WINDOW_S) for sample in _answered(load.samples, begin, end)}
        assert windows >= set(range(int(AWAY_S // WINDOW_S))), "the fleet served all the while"
        assert reopened == []
    elif phase == "Quiescing":
        assert {change.version for change in reopened} <= {0}
    else:
        assert meanwhile == [], "weights were touched: nothing reopens without the operator"
        assert reopened == []
    assert checks.wrong_answers(load.samples, known) == []
    assert checks.stale_answers(load.samples) == []
    assert dict(checks.bad_refusals(load.samples)) == {}
    assert checks.overlapping_versions(changes) == []
    assert await _operators() == operators, "an outage restarts no operator"
    assert [pod["metadata"]["name"] for pod in await fleet.pods()] == pods, "nor does it replace engines"
