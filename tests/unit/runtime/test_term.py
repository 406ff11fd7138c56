"""What a leader does, and that nothing of it is left when its term ends."""

import asyncio
import time
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import Unreachable
from rollfleet_operator.core.actions import Decision, EngineStatusWrite, GuardCall
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, WEIGHT_VERSIONS, Resource
from rollfleet_operator.runtime import watchdog
from rollfleet_operator.runtime.resync import GLANCE_S, Resync
from rollfleet_operator.runtime.term import Term
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_operator.runtime.watchdog import DEAD_WATCH_S, EVENT_GRACE_S, Watchdog
from rollfleet_protocol.commands import Arm
from tests.support.desk import KEY, NOW, Desk, make_version
from tests.support.pods import make_pod

pytestmark = pytest.mark.looptime

RARELY_S = 1e6


class LoopClock:
    """The watchdog's time, as simulated as that of the loop."""

    def monotonic(self) -> float:
        now: float = asyncio.get_running_loop().time()
        return now


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", LoopClock())


class Office:
    """A desk with lists, and a term that a test begins and ends."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.uptime = Uptime(lambda: NOW)
        self.dog = Watchdog(desk.records.ledger, 100.0)
        self.deaf: list[str] = []
        certificates = Certificates(desk.cluster, "rollfleet", lambda: NOW)
        self.resync = Resync(
            desk.cluster, desk.records, certificates, self.dog, self.uptime, (None,), RARELY_S, self.deaf.append
        )
        self.term = Term(desk.records, self.resync, self.uptime, lambda: desk.reconciler)


@pytest.fixture
async def office(desk: Desk) -> Office:
    return Office(desk)


async def begin(office: Office) -> "asyncio.Task[None]":
    leading = asyncio.create_task(office.term.lead())
    await asyncio.sleep(0.5)
    return leading


async def tell_all(desk: Desk) -> None:
    """What watches that hear well do."""
    for resource in (ROLLOUT_ENGINES, WEIGHT_VERSIONS, PODS):
        for item in (await desk.cluster.list(resource, None)).items:
            desk.records.ledger.told(resource, item)


async def end(leading: "asyncio.Task[None]") -> None:
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


async def test_a_term_begins_with_lists_and_ends_with_nothing_under_way(office: Office) -> None:
    desk = office.desk
    desk.queue.stop()
    desk.cluster.put(PODS, "rl", make_pod())
    arm = Arm(incarnation="i-1", epoch=1)
    desk.decision = Decision(actions=(GuardCall("qwen-0-0-abcde", "p-1", arm),))
    leading = await begin(office)
    await asyncio.sleep(3)
    assert desk.guards.commands == [arm]
    assert (desk.followers.count(), len(desk.records.fleets.all())) == (1, 1)
    await end(leading)
    assert (desk.followers.count(), desk.records.fleets.all(), desk.queue.depth()) == (0, [], 0)
    assert desk.records.pods.keys() == {KEY}, "what the watches told stays"
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not [name for name in names if name.startswith(("worker", "follower", "arm"))]


async def test_news_between_terms_are_no_work_and_the_next_term_looks_at_everything(office: Office) -> None:
    desk = office.desk
    await end(await begin(office))
    desk.queue.put(KEY)
    assert desk.queue.depth() == 0
    desk.decision = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)))
    leading = await begin(office)
    assert desk.stored("rolloutengines", "qwen")["status"]["epoch"] == 3
    await end(leading)


async def test_time_between_terms_is_not_counted(office: Office) -> None:
    office.uptime.seen()
    await end(await begin(office))
    office.uptime._clock = lambda: NOW.replace(hour=13)
    office.uptime.seen()
    assert office.uptime.since == NOW.replace(hour=13)


async def test_a_pass_that_runs_when_the_term_ends_runs_no_further(office: Office) -> None:
    desk = office.desk
    hanging: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    real = desk.cluster.replace_status

    async def slow(resource: Resource, manifest: Any) -> Any:
        await hanging
        return await real(resource, manifest)

    desk.cluster.replace_status = slow  # type: ignore[method-assign]
    desk.decision = Decision(fleet_status=EngineStatusWrite(RolloutEngineStatus(epoch=3)))
    leading = await begin(office)
    assert desk.queue.longest_pass_s() > 0
    await end(leading)
    assert hanging.cancelled()
    assert desk.queue.longest_pass_s() == 0
    assert ("status", "rolloutengines", "qwen") not in desk.writes()


async def test_a_term_ends_also_where_a_call_fails_at_that_very_moment(office: Office) -> None:
    """asyncio.gather raises such a failure and swallows the cancellation: the pass goes on as after any other one."""
    desk = office.desk
    failing: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    leading = await begin(office)
    real_get, real_list = desk.cluster.get, desk.cluster.list

    async def get(*_: Any) -> Any:
        await failing

    async def listed(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    desk.cluster.get, desk.cluster.list = get, listed  # type: ignore[method-assign]
    desk.queue.put(KEY)
    await asyncio.sleep(2)
    assert desk.queue.longest_pass_s() > 0
    failing.set_exception(Unreachable("no answer"))
    leading.cancel()
    _, still = await asyncio.wait({leading}, timeout=300)
    assert not still, "the term has no end"
    desk.cluster.get, desk.cluster.list = real_get, real_list  # type: ignore[method-assign]
    await end(await begin(office))
    assert desk.queue.longest_pass_s() == 0


async def test_a_deaf_watch_is_found_by_a_glance_and_everything_is_read_again(office: Office) -> None:
    desk = office.desk
    beating, watching = asyncio.create_task(office.dog.beat()), asyncio.create_task(office.resync.run())
    leading = await begin(office)
    await tell_all(desk)
    desk.observed = None
    desk.cluster.put(WEIGHT_VERSIONS, "rl", make_version())
    await asyncio.sleep(1.2 * GLANCE_S)
    assert office.deaf == []
    await asyncio.sleep(EVENT_GRACE_S + GLANCE_S)
    assert "the watch on weightversions" in office.deaf[0]
    assert desk.observed is not None, "the list was read, and the fleet looked at"
    assert office.dog.problems(0) == [], "first the watches are started anew"
    await asyncio.sleep(DEAD_WATCH_S)
    assert any("the watch on weightversions" in problem for problem in office.dog.problems(0))
    for task in (leading, beating, watching):
        await end(task)


async def test_an_api_server_that_is_gone_is_no_reason_to_restart(office: Office) -> None:
    desk = office.desk
    await tell_all(desk)  # else the first glance after its return calls the watches deaf, and everything is listed
    beating, watching = asyncio.create_task(office.dog.beat()), asyncio.create_task(office.resync.run())

    async def gone(*_: Any) -> Any:
        raise Unreachable("no answer within the deadline")

    real = desk.cluster.list_metadata
    desk.cluster.list_metadata = gone  # type: ignore[method-assign]
    office.uptime.seen()
    await asyncio.sleep(600)
    assert office.dog.problems(0) == []
    moment = NOW.replace(hour=13)
    office.uptime._clock, office.uptime._monotonic = lambda: moment, lambda: time.monotonic() + 3600
    office.uptime.seen()
    assert office.uptime.away("rl/qwen") == ((NOW, moment),), "deadlines do not count while it is gone"
    desk.cluster.list_metadata = real  # type: ignore[method-assign]
    await asyncio.sleep(200)
    (problem,) = office.dog.problems(0)
    assert problem.startswith("the last whole list of objects is"), "lists were possible, and made too rarely"
    for task in (beating, watching):
        await end(task)
