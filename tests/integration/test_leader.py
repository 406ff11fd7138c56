"""Two operators, one Lease: one acts, and the other takes over whatever becomes of the first."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollfleet_operator.clients.kubernetes import load_configuration
from rollfleet_operator.ports import LEASES
from tests.support.api_proxy import ApiProxy, Way
from tests.support.fleet import World
from tests.support.operator_process import OperatorProcess
from tests.support.phases import PHASES, reached
from tests.support.ports import free_port
from tests.support.waiting import until

LEASE = "rollfleet-operator"
TAKEOVER_S = 45.0  # 7 to 11.4 s on a machine that has nothing else to do; tests/model proves by its own clock
HANDOVER_S = 20.0
LAST_WORDS = timedelta(seconds=1)  # of a pass that was under way when its process stood still; it writes nothing


class Pair:
    """Two operators of one fleet."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        world.kind = replace(world.kind, slow=True)  # phases that last long enough to be met
        arguments = (*world.operator.arguments, "--lease", LEASE)
        self.operators = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            one = replace(world.operator, folder=folder / name, port=free_port(), arguments=arguments)
            self.operators.append(one)

    async def start(self) -> None:
        await asyncio.gather(*(one.start() for one in self.operators))
        self.world.operator = await self.leader(TAKEOVER_S)

    async def leader(self, within_s: float, other_than: OperatorProcess | None = None) -> OperatorProcess:
        """Who leads, and nobody else does."""
        found: list[OperatorProcess] = []

        async def one_leads() -> bool:
            found[:] = [one for one in self.operators if one is not other_than and await leads(one)]
            return len(found) == 1

        await until(one_leads, within_s, lambda: "".join(one.log()[-2000:] for one in self.operators))
        return found[0]

    async def stop(self) -> None:
        for one in self.operators:
            if one.process is not None and one.process.returncode is None:
                await one.kill()

    def other(self, one: OperatorProcess) -> OperatorProcess:
        return next(other for other in self.operators if other is not one)


def moment(entry: dict[str, Any]) -> datetime:
    """When it was logged."""
    return datetime.fromisoformat(entry["time"])


async def leads(operator: OperatorProcess) -> bool:
    if operator.process is None or operator.process.returncode is not None:
        return False
    return (await operator.metrics())["rollfleet_leader"] == 1


async def writes(operator: OperatorProcess) -> float:
    """Requests of a process by which it tried to change anything but the Lease."""
    return sum(
        value
        for name, value in (await operator.metrics()).items()
        if name.startswith("rollfleet_kubernetes_request_seconds_count")
        and 'verb="get"' not in name
        and 'verb="list"' not in name
        and 'resource="leases"' not in name
    )


@pytest_asyncio.fixture
async def pair(world: World, tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(world, tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.mark.parametrize(
    "phases",
    [("Quiescing", "Transferring", "Opening"), pytest.param(PHASES, marks=pytest.mark.full)],
    ids=["three", "all"],
)
async def test_a_leader_that_is_killed_in_any_phase_is_followed_and_the_update_ends(
    world: World, pair: Pair, phases: Sequence[str]
) -> None:
    await world.create_fleet(2)
    await world.serving(2)
    uids = [pod["metadata"]["uid"] for pod in await world.pods()]
    loop, took = asyncio.get_running_loop(), {}
    for version, phase in enumerate(phases, start=1):
        leader = world.operator
        await world.bump(version, f"step-{1 + version % 3}")
        await reached(world, version, phase)
        await leader.kill()
        killed = loop.time()
        world.operator = await pair.leader(TAKEOVER_S, other_than=leader)
        took[phase] = loop.time() - killed
        await leader.start()  # as the next standby
        await world.active(version)
        await world.serving(2)
        assert not await leads(leader)
    print({phase: round(seconds, 1) for phase, seconds in took.items()})
    assert [pod["metadata"]["uid"] for pod in await world.pods()] == uids


async def test_a_leader_that_is_told_to_stop_hands_over_at_once(world: World, pair: Pair) -> None:
    await world.create_fleet(1)
    await world.serving(1)
    leader = world.operator
    standby = pair.other(leader)
    before = await writes(standby)
    await world.bump(1)
    assert await leader.stop() == 0
    assert leader.entries("the lease is given back")
    world.operator = await pair.leader(HANDOVER_S, other_than=leader)
    await world.active(1)
    assert await writes(standby) > before


async def test_one_that_stands_by_is_ready_and_changes_nothing(world: World, pair: Pair) -> None:
    standby = pair.other(world.operator)
    before = await writes(standby)
    await world.create_fleet(1)
    await world.serving(1)
    await world.bump(1)
    await world.active(1)
    assert await standby.status("/readyz") == 200
    assert await standby.status("/healthz") == 200
    assert await writes(standby) == before
    samples = await standby.metrics()
    assert samples["rollfleet_guards_followed"] == 0
    assert not [name for name in samples if name.startswith("rollfleet_fleet_engines")]


@pytest.mark.parametrize("phase", [pytest.param("Preparing", marks=pytest.mark.full), "Transferring"])
async def test_a_leader_that_was_stopped_and_comes_back_does_not_act(world: World, pair: Pair, phase: str) -> None:
    """SIGSTOP: to itself no time has passed."""
    await world.create_fleet(2)
    await world.serving(2)
    paused = world.operator
    assert paused.process is not None
    await world.bump(1)
    await reached(world, 1, phase)
    paused.process.send_signal(signal.SIGSTOP)
    try:
        world.operator = await pair.leader(TAKEOVER_S, other_than=paused)
        await world.active(1)
        await world.serving(2)
    finally:
        paused.process.send_signal(signal.SIGCONT)

    async def stands_by() -> bool:
        return bool(paused.entries("the lease was not renewed in time: this process acts no more"))

    await until(stands_by, 30, paused.log)
    await world.bump(2)
    await world.active(2)
    await world.serving(2)
    assert not await leads(paused)
    assert await leads(world.operator)
    decided = [moment(entry) for entry in paused.entries("decision") if entry["level"] == "info"]
    noticed = moment(paused.entries("the lease was not renewed in time: this process acts no more")[0])
    assert all(time <= noticed + LAST_WORDS for time in decided)


async def test_a_leader_without_a_network_stops_before_another_acts(world: World, pair: Pair, tmp_path: Path) -> None:
    proxy = ApiProxy(await load_configuration(world.operator.kubeconfig))
    async with proxy.running():
        standby = pair.other(world.operator)
        await world.operator.stop()
        await pair.leader(HANDOVER_S, other_than=world.operator)
        world.operator.kubeconfig = proxy.kubeconfig(tmp_path / "proxy.kubeconfig")
        await world.operator.start()
        await standby.stop()
        cut_off = await pair.leader(HANDOVER_S, other_than=standby)
        await standby.start()
        await world.create_fleet(1)
        await world.serving(1)
        proxy.set(Way.DEAD)
        world.operator = await pair.leader(TAKEOVER_S, other_than=cut_off)
        assert not await leads(cut_off)
        held = await world.cluster.get(LEASES, world.namespace, LEASE)
        assert held["spec"]["leaseTransitions"] >= 1
        await world.bump(1)
        await world.active(1)
        proxy.set(Way.OPEN)
        await world.bump(2)
        await world.active(2)
        assert not await leads(cut_off)
        assert await cut_off.status("/healthz") == 200
        await cut_off.kill()
