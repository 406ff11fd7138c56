"""The chart with two replicas, as real pods: the leader is lost in mid-update, the other goes on, nobody is told twice.

The release is one of its own: its operators serve only fleets that are labelled for them, and the one that all other
tests use leaves these alone.
"""

import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from examples.demo import checks
from examples.demo.environment import Environment, folders
from examples.demo.fleet import Fleet
from examples.demo.kubectl import get, kubectl
from examples.demo.load import Load, Plan
from examples.demo.manifests import SERVED_NAME
from tests.e2e.conftest import SIMULATED
from tests.e2e.orders import orders
from tests.e2e.outputs import known_outputs
from tests.e2e.phases import watching
from tests.e2e.releases import Release
from tests.e2e.strikes import strike
from tests.support.log_lines import json_lines
from tests.support.victims import give_signal, processes_of
from tests.support.waiting import until

REPLICAS = 3
TAKEOVER_S = 45.0  # 7 to 11.4 s on a machine that has nothing else to do; tests/model proves by its own clock
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Pair:
    """Two operators of one release."""

    release: Release

    @property
    def namespace(self) -> str:
        """Of the operators, and of their fleet."""
        return self.release.namespace

    async def pods(self) -> dict[str, dict[str, Any]]:
        """Those that are there, by uid."""
        which = ("-n", self.namespace, "-l", self.release.pods)
        document = json.loads(await kubectl("get", "pods", *which, "-o", "json"))
        return {pod["metadata"]["uid"]: pod for pod in document["items"]}

    async def holder(self) -> str:
        """Uid of the pod that the Lease names."""
        return str((await get("lease", self.release.deployment, self.namespace))["spec"].get("holderIdentity") or "")

    async def leader(self, other_than: str = "", within_s: float = TAKEOVER_S) -> str:
        """The one pod that leads by the Lease and by its own word."""
        found: list[str] = []

        async def one_leads() -> bool:
            uid = await self.holder()
            found[:] = [uid] if uid and uid != other_than and await self._leads(uid) else []
            return bool(found)

        await until(one_leads, within_s)
        return found[0]

    async def _leads(self, uid: str) -> bool:
        pod = (await self.pods()).get(uid)
        return pod is not None and await leads(pod)

    async def log(self, name: str) -> str:
        """Of a pod that is there."""
        return await kubectl("logs", name, "-n", self.namespace, "--tail=-1")


async def leads(pod: dict[str, Any]) -> bool:
    """By the pod's own metrics."""
    address = f"http://{pod['status'].get('podIP')}:8080/metrics"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(address) as answer:
            lines = (await answer.text()).splitlines()
    except (aiohttp.ClientError, TimeoutError):
        return False
    return "rollfleet_leader 1.0" in lines


@pytest_asyncio.fixture
async def pair(environment: Environment) -> AsyncIterator[Pair]:
    """The release, with its fleet in its own namespace."""
    made = Pair(Release("pair", f"e2e-pair-{secrets.token_hex(3)}"))
    await made.release.install(environment.images, 2)
    try:
        yield made
    finally:
        await made.release.uninstall()
        await Fleet("qwen", made.namespace).delete()


async def _serving(environment: Environment, pair: Pair) -> Fleet:
    fleet = Fleet("qwen", pair.namespace, operator=pair.namespace)
    await fleet.create(environment.simulated(slow=True), REPLICAS)
    await fleet.serving(REPLICAS)
    return fleet


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("deleted", "Transferring"),
        pytest.param("stopped", "Transferring", marks=pytest.mark.full),
        pytest.param("stopped", "Opening", marks=pytest.mark.full),
        pytest.param("deleted", "Quiescing", marks=pytest.mark.full),
    ],
)
async def test_the_leader_is_lost_in_mid_update(environment: Environment, pair: Pair, how: str, phase: str) -> None:
    fleet, known = await _serving(environment, pair), known_outputs(environment, SIMULATED)
    paths = [folder.name for folder in folders(environment.models.simulated)]
    assert len(await pair.pods()) == 2
    first = await pair.leader()
    lost = (await pair.pods())[first]
    name, processes = lost["metadata"]["name"], processes_of(first)
    plan = Plan(await fleet.url(), SERVED_NAME, tuple(known[0]), clients=3, pace_s=0.05)
    number = signal.SIGKILL if how == "deleted" else signal.SIGSTOP

    async def lose_it() -> None:
        give_signal(processes, number)

    async with Load(plan) as load, watching(fleet) as update:
        struck = await strike(fleet, update, phase, lose_it, lambda version: paths[version % 4])
        if how == "deleted":  # else its container is started again under the same name in the Lease, and need not wait
            await kubectl("delete", "pod", name, "-n", pair.namespace, "--force", "--grace-period=0", "--wait=false")
        second = await pair.leader(other_than=first)
        took = time.monotonic() - struck.at
        if how == "stopped":  # it wakes up in mid-update, with what it was about to do
            give_signal(processes, signal.SIGCONT)
            await _stands_by(pair, name)
        await fleet.active(struck.version)
        await fleet.serving(REPLICAS)
        await load.until(struck.version, 60)
        await fleet.bump(struck.version + 1, paths[(struck.version + 1) % 4])
        await fleet.active(struck.version + 1)
        await load.until(struck.version + 1, 60)
    print(f"leader {how} in {phase}: the other leads after {took:.1f} s")
    assert await pair.leader() == second
    by_version = {each: known[each % 4] for each in range(struck.version + 2)}
    assert checks.wrong_answers(load.samples, by_version) == []
    assert checks.stale_answers(load.samples) == []
    assert dict(checks.bad_refusals(load.samples)) == {}
    pods = [pod["metadata"]["name"] for pod in await fleet.pods()]
    assert checks.overlapping_versions(await fleet.gate_changes(pods)) == []
    for engine, followed in (await orders(fleet)).items():
        twice = {order: count for order, count in Counter(followed).items() if count > 1}
        assert not twice, f"{engine} was told twice: {twice}"
        epochs = [order.epoch for order in followed]
        assert epochs == sorted(epochs), f"{engine} went back: {followed}"


async def _stands_by(pair: Pair, name: str) -> None:
    """The one that was stopped notices, and acts no more."""

    async def noticed() -> bool:
        return "acts no more" in await pair.log(name)

    await until(noticed, TAKEOVER_S)
    lines = json_lines(await pair.log(name))
    noticed_at = next(_moment(line) for line in lines if "acts no more" in line["message"])
    last_words = timedelta(seconds=5)  # of a pass that was under way when its process stood still; it writes nothing
    assert all(_moment(line) <= noticed_at + last_words for line in lines if line["message"] == "decision")


def _moment(line: dict[str, Any]) -> datetime:
    """When it was logged."""
    return datetime.fromisoformat(line["time"])


async def test_c22_a_fleet_goes_while_no_operator_runs_and_the_chart_after_it(
    environment: Environment, pair: Pair
) -> None:
    fleet = await _serving(environment, pair)
    await pair.release.scale(0)
    await fleet.bump(1, "step-1")
    for what, name in (("weightversion", fleet.weight_version), ("rolloutengine", fleet.name)):
        await kubectl("delete", what, name, "-n", fleet.namespace, timeout_s=20)

    async def engines_are_gone() -> bool:
        return not await fleet.pods()

    await until(engines_are_gone, 90)
    await pair.release.uninstall()

    async def nothing_is_kept() -> bool:
        kept = await kubectl("get", "deployments,services,roles,rolebindings", "-n", pair.namespace, "-o", "name")
        return kept == ""

    await until(nothing_is_kept, 60)
