"""The followers of a fleet: which pods are followed, and which commands are on their way."""

import asyncio

import pytest

from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.podviews import pod_view
from tests.support.pods import make_pod
from tests.support.scripted_guards import FLEET, NOW, ScriptedGuards, arm, settle
from tests.support.states import make_state

pytestmark = pytest.mark.looptime

KEY = "rl/qwen"


class Fleet:
    """Followers of one fleet."""

    def __init__(self) -> None:
        self.guards = ScriptedGuards()
        self.keys: list[str] = []
        self.followers = Followers(self.guards, self.keys.append, lambda: NOW)

    def ensure(self, *pods: tuple[str, str]) -> None:
        views = [pod_view(make_pod(uid=uid, name=f"qwen-{uid}", podIP=ip)) for uid, ip in pods]
        self.followers.ensure(KEY, FLEET, views)


async def test_exactly_the_pods_with_an_address_are_followed() -> None:
    fleet = Fleet()
    fleet.ensure(("a", "198.18.64.1"), ("b", ""))
    assert set(fleet.followers.views(KEY)) == {"a"}
    fleet.ensure(("a", "198.18.64.1"), ("b", "198.18.64.2"))
    assert set(fleet.followers.views(KEY)) == {"a", "b"}
    fleet.ensure(("b", "198.18.64.2"))
    assert set(fleet.followers.views(KEY)) == {"b"}
    fleet.followers.forget(KEY)
    assert (fleet.followers.views(KEY), fleet.followers.count()) == ({}, 0)
    await fleet.followers.close()


async def test_a_pod_with_another_address_is_followed_anew() -> None:
    fleet = Fleet()
    fleet.ensure(("a", "198.18.64.1"))
    fleet.guards.polls.put_nowait(make_state(1))
    await settle()
    assert fleet.followers.views(KEY)["a"].state is not None
    fleet.ensure(("a", "198.18.64.9"))
    assert fleet.followers.views(KEY)["a"].state is None
    await fleet.followers.close()


async def test_the_same_command_is_not_on_its_way_twice() -> None:
    fleet = Fleet()
    fleet.ensure(("a", "198.18.64.1"))
    first, again = fleet.followers.give(KEY, "a", arm()), fleet.followers.give(KEY, "a", arm())
    other = fleet.followers.give(KEY, "a", arm(epoch=2))
    assert first is not None
    assert other is not None
    assert first is again
    assert first is not other
    await settle()
    assert fleet.guards.commands == [arm(), arm(epoch=2)]
    for _ in range(2):
        fleet.guards.answers.put_nowait(make_state(2))
    assert await first == "ok"
    assert await other == "ok"
    await settle()
    assert fleet.followers.give(KEY, "a", arm()) is not first
    await fleet.followers.close()


async def test_a_pod_that_nobody_follows_gets_no_command() -> None:
    fleet = Fleet()
    assert fleet.followers.give(KEY, "a", arm()) is None


async def test_a_follower_that_died_is_told_of_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.ensure(("a", "198.18.64.1"))
    fleet.guards.polls.put_nowait(ZeroDivisionError("a bug"))
    await asyncio.sleep(10)
    assert "follower of qwen-a died" in caplog.text
    assert fleet.keys == [KEY]
    fleet.ensure(("a", "198.18.64.1"))
    fleet.guards.polls.put_nowait(make_state(1))
    await settle()
    assert fleet.followers.views(KEY)["a"].reachable
    await fleet.followers.close()
