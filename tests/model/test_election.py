"""Elections among several candidates, on a simulated clock and against an API server that fails in every way."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rollfleet_operator.clients.errors import Conflict, NotFound, NotLeading, Unreachable
from rollfleet_operator.clients.fence import FencedCluster
from rollfleet_operator.core.leases import DURATION_S, RENEW_DEADLINE_S
from rollfleet_operator.ports import LEASES, PODS, Manifest, Resource
from rollfleet_operator.runtime.election import Alone, Election
from tests.support.cluster import MemoryCluster

pytestmark = pytest.mark.looptime

START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
TAKEOVER_S = 15.0


def wall_clock(hours_ahead: float = 0.0) -> datetime:
    """What a machine believes; only for people to read."""
    return START + timedelta(hours=hours_ahead, seconds=asyncio.get_running_loop().time())


class Line:
    """One candidate's way to the API server: as slow, deaf or forgetful as a test wants it."""

    def __init__(self, shared: MemoryCluster) -> None:
        self._shared = shared
        self.is_cut = False
        self.delay_s: Callable[[], float] = lambda: 0.01
        self.loses_answer: Callable[[], bool] = lambda: False

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        return await self._send(lambda: self._shared.get(resource, namespace, name))

    async def create(self, resource: Resource, namespace: str | None, manifest: Manifest) -> Manifest:
        return await self._send(lambda: self._shared.create(resource, namespace, manifest))

    async def merge_patch(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        return await self._send(lambda: self._shared.merge_patch(resource, namespace, name, patch))

    async def _send(self, act: Callable[[], Any]) -> Manifest:
        if self.is_cut:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.delay_s() / 2)
        answer: Manifest = await act()
        await asyncio.sleep(self.delay_s() / 2)
        if self.is_cut or self.loses_answer():
            await asyncio.sleep(3600)
        return answer


class Candidate:
    """A process: when it leads, and how long its ends take."""

    def __init__(self, world: "World", identity: str, drift: float = 1.0) -> None:
        self.world, self.identity = world, identity
        self.line = Line(world.cluster)
        loop = asyncio.get_running_loop()
        offset, hours = random.Random(identity).uniform(0, 1e6), random.Random(identity).uniform(-48, 48)
        self.election = Election(
            self.line,
            "ns",
            "op",
            identity,
            lambda: wall_clock(hours),
            lambda: offset + drift * loop.time(),  # type: ignore[arg-type]
        )
        self.terms: list[tuple[float, float | None]] = []
        self.task = asyncio.create_task(self.election.run(self._lead))

    async def _lead(self) -> None:
        loop = asyncio.get_running_loop()
        self.world.acting.add(self.identity)
        self.world.most = max(self.world.most, len(self.world.acting))
        self.terms.append((loop.time(), None))
        try:
            await asyncio.Event().wait()
        finally:
            self.world.acting.discard(self.identity)
            self.terms[-1] = (self.terms[-1][0], loop.time())

    async def kill(self) -> None:
        """Without a goodbye."""
        self.line.is_cut = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class World:
    """Candidates for one Lease."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.candidates: list[Candidate] = []
        self.acting: set[str] = set()
        self.most = 0
        self.believers = 0  # most that thought at once that they might act

    def add(self, identity: str, drift: float = 1.0) -> Candidate:
        made = Candidate(self, identity, drift)
        self.candidates.append(made)
        return made

    async def pass_time(self, seconds: float) -> None:
        """Look at everybody's belief all the time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            self.believers = max(self.believers, sum(one.election.leads() for one in self.candidates))
            await asyncio.sleep(0.2)

    async def leader(self, other_than: Candidate | None = None, within_s: float = TAKEOVER_S) -> Candidate:
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        while loop.time() < end:
            await self.pass_time(0.2)
            for one in self.candidates:
                if one is not other_than and one.identity in self.acting:
                    return one
        raise AssertionError(f"nobody leads after {within_s} s")

    def lease(self) -> Manifest:
        spec: Manifest = self.cluster.objects[LEASES.plural, "ns", "op"]["spec"]
        return spec


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
    finally:
        for one in made.candidates:
            await one.kill()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with a_world() as made:
        yield made


async def test_one_of_two_leads_and_goes_on_leading(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    await world.pass_time(120)
    assert world.acting == {leader.identity}
    assert (world.most, world.believers, len(leader.terms)) == (1, 1, 1)
    assert world.lease()["holderIdentity"] == leader.identity
    assert world.lease()["leaseTransitions"] == 0


async def test_a_killed_leader_is_followed_in_time(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    await world.pass_time(30)
    loop = asyncio.get_running_loop()
    killed = loop.time()
    await leader.kill()
    world.candidates.remove(leader)
    await world.leader()
    assert DURATION_S - 2.5 <= loop.time() - killed <= TAKEOVER_S
    assert world.lease()["leaseTransitions"] == 1


async def test_a_leader_that_is_cut_off_has_stopped_before_another_begins(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    await world.pass_time(30)
    loop = asyncio.get_running_loop()
    leader.line.is_cut = True
    cut = loop.time()
    successor = await world.leader(other_than=leader)
    ended = leader.terms[-1][1]
    assert ended is not None
    assert ended - cut <= RENEW_DEADLINE_S
    assert ended < successor.terms[-1][0] <= cut + TAKEOVER_S
    assert (world.most, world.believers) == (1, 1)
    leader.line.is_cut = False
    await world.pass_time(60)
    assert world.acting == {successor.identity}, "one who comes back waits like everybody"


async def test_a_leader_that_goes_hands_over_at_once(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    await world.pass_time(10)
    loop = asyncio.get_running_loop()
    await leader.stop()
    stopped = loop.time()
    assert world.lease()["holderIdentity"] == ""
    await world.leader(other_than=leader)
    assert loop.time() - stopped < 3
    assert world.most == 1


async def test_a_leader_that_goes_while_it_renews_hands_over_at_once(world: World) -> None:
    """The API server has taken the renewal, and the answer was not waited for."""
    world.add("a"), world.add("b")
    leader = await world.leader()
    written, renewed = world.cluster.merge_patch, asyncio.Event()

    async def told(resource: Resource, namespace: str, name: str, patch: Manifest) -> Manifest:
        answer = await written(resource, namespace, name, patch)
        renewed.set()
        return answer

    world.cluster.merge_patch = told  # type: ignore[method-assign]
    await renewed.wait()
    loop = asyncio.get_running_loop()
    stopped = loop.time()
    await leader.stop()
    assert world.lease()["holderIdentity"] == ""
    await world.leader(other_than=leader)
    assert loop.time() - stopped < 3
    assert world.most == 1


async def test_a_candidate_that_goes_while_it_takes_the_lease_gives_it_back(world: World) -> None:
    """The API server has made it, and the answer was not waited for."""
    one = world.add("a")
    one.line.loses_answer = lambda: (LEASES.plural, "ns", "op") in world.cluster.objects
    await world.pass_time(1)
    assert (world.lease()["holderIdentity"], one.election.leads()) == ("a", False)
    one.line.loses_answer = lambda: False
    await one.stop()
    assert world.lease()["holderIdentity"] == ""
    assert world.most == 0


async def test_the_same_pod_need_not_wait_for_itself(world: World) -> None:
    first = world.add("pod-1")
    await world.leader()
    await first.kill()
    loop = asyncio.get_running_loop()
    began = loop.time()
    world.candidates.clear()
    world.add("pod-1")
    await world.leader()
    assert loop.time() - began < 1


async def test_an_api_server_that_is_gone_ends_the_term_and_its_return_begins_another(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    for one in world.candidates:
        one.line.is_cut = True
    await world.pass_time(300)
    assert world.acting == set()
    assert not leader.election.leads()
    for one in world.candidates:
        one.line.is_cut = False
    await world.leader(within_s=5)  # one of them still holds it, or it is free
    await world.pass_time(30)
    assert (world.most, world.believers, len(world.acting)) == (1, 1, 1)


async def test_a_lease_that_another_took_ends_the_term_at_once(world: World) -> None:
    leader = world.add("a")
    await world.leader()
    taken = {"spec": world.lease() | {"holderIdentity": "intruder", "renewTime": "x"}}
    await world.cluster.merge_patch(LEASES, "ns", "op", taken)
    await world.pass_time(4)
    assert not leader.election.leads()
    assert world.acting == set()
    await world.pass_time(DURATION_S + 3)
    assert world.acting == {"a"}


async def test_a_lease_that_was_deleted_is_made_again_by_its_holder(world: World) -> None:
    world.add("a"), world.add("b")
    leader = await world.leader()
    await world.pass_time(10)
    await world.cluster.delete(LEASES, "ns", "op")
    await world.pass_time(30)
    assert world.lease()["holderIdentity"] == leader.identity
    assert (world.most, world.believers, len(leader.terms)) == (1, 1, 1)


async def test_an_answer_that_is_lost_is_no_lost_lease(world: World) -> None:
    leader = world.add("a")
    await world.leader()
    lost = iter([True, False] * 1000)
    leader.line.loses_answer = lambda: next(lost)
    await world.pass_time(120)
    assert len(leader.terms) == 1


async def test_a_term_that_fails_ends_the_election_and_gives_the_lease_back() -> None:
    cluster = MemoryCluster()

    async def lead() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await Election(cluster, "ns", "op", "a", wall_clock, asyncio.get_running_loop().time).run(lead)
    assert cluster.objects[LEASES.plural, "ns", "op"]["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize("seed", range(10))
async def test_never_two_at_once_whatever_the_api_server_does(seed: int) -> None:
    """Cut lines, slow and lost answers, deaths, returns, edits; clocks that run apart by a hundredth."""
    rng = random.Random(seed)
    async with a_world() as world:
        names = iter(range(1000))
        for _ in range(3):
            world.add(f"p{next(names)}", rng.uniform(0.99, 1.01))
        for _ in range(40):
            one = rng.choice(world.candidates)
            deed = rng.choice(["cut", "mend", "mend", "slow", "quick", "forgetful", "faithful", "kill", "stop"])
            if deed in ("cut", "mend"):
                one.line.is_cut = deed == "cut"
            elif deed in ("slow", "quick"):
                ceiling = 4.0 if deed == "slow" else 0.1
                one.line.delay_s = lambda ceiling=ceiling: rng.uniform(0, ceiling)  # type: ignore[misc]
            elif deed in ("forgetful", "faithful"):
                share = 0.5 if deed == "forgetful" else 0.0
                one.line.loses_answer = lambda share=share: rng.random() < share  # type: ignore[misc]
            else:
                await (one.kill() if deed == "kill" else one.stop())
                world.candidates.remove(one)
                world.add(f"p{next(names)}", rng.uniform(0.99, 1.01))
            await world.pass_time(rng.uniform(0, 12))
        assert (world.most, world.believers) == (1, 1)
        for one in world.candidates:
            one.line.is_cut, one.line.delay_s, one.line.loses_answer = False, lambda: 0.01, lambda: False
        await world.leader()


async def test_who_does_not_lead_reads_and_changes_nothing() -> None:
    cluster, leads = MemoryCluster(), [False]
    fenced = FencedCluster(cluster, lambda: leads[0])
    pod = {"metadata": {"name": "p", "namespace": "rl"}, "status": {}}
    cluster.put(PODS, "rl", pod)
    assert len((await fenced.list(PODS, "rl")).items) == 1
    assert (await fenced.get(PODS, "rl", "p"))["metadata"]["name"] == "p"
    writes: list[Callable[[], Any]] = [
        lambda: fenced.create(PODS, "rl", {"metadata": {"name": "q"}}),
        lambda: fenced.apply(PODS, "rl", pod),
        lambda: fenced.replace_status(PODS, pod),
        lambda: fenced.merge_patch(PODS, "rl", "p", {}),
        lambda: fenced.delete(PODS, "rl", "p"),
    ]
    for write in writes:
        with pytest.raises(NotLeading):
            await write()
    assert cluster.writes == []
    leads[0] = True
    await fenced.merge_patch(PODS, "rl", "p", {})
    with pytest.raises(Conflict):
        await fenced.merge_patch(PODS, "rl", "p", {"metadata": {"resourceVersion": "0"}})
    with pytest.raises(NotFound):
        await fenced.delete(PODS, "rl", "q")


async def test_without_a_lease_there_is_one_term() -> None:
    async def lead() -> None:
        raise Unreachable("the end")

    assert Alone().leads()
    with pytest.raises(Unreachable):
        await Alone().run(lead)
