"""A guard that is never quiet costs the operator no more than any other."""

import asyncio
from datetime import UTC, datetime

import pytest

from rollfleet_operator.clients.errors import Unreachable
from rollfleet_operator.clients.follower import ANSWERS_PER_S, MAX_ANSWERS
from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.guards import Endpoint
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_protocol.commands import Arm, Command
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.state import EngineState
from tests.support.pods import make_pod
from tests.support.states import make_state

pytestmark = pytest.mark.looptime

KEY = "rl/qwen"
FLEET = FleetIdentity(namespace="rl", name="qwen", uid="f-1")
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


class NeverQuiet:
    """A guard that has news, or another error, whenever it is asked, and at once."""

    def __init__(self, *, broken: bool = False) -> None:
        self.asked = 0
        self.commanded = 0
        self._broken = broken

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        self.asked += 1
        return self._answer(self.asked)

    async def canary(self, endpoint: Endpoint) -> None:
        """Guarded."""

    async def look(self, endpoint: Endpoint) -> EngineState:
        return await self.state(endpoint, None)

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        self.commanded += 1
        return self._answer(self.commanded)

    def _answer(self, number: int) -> EngineState:
        if self._broken:
            raise Unreachable(f"failure number {number}")
        return make_state(number, f"i-{number}")


@pytest.mark.parametrize("broken", [False, True])
async def test_a_guard_that_is_never_quiet_is_heard_at_a_bounded_rate(broken: bool) -> None:
    guards, seconds = NeverQuiet(broken=broken), 100.0
    followers = Followers(guards, lambda key: _answer_news(), lambda: NOW)

    def _answer_news() -> None:  # as a pass does that has a command for it each time
        followers.give(KEY, "a", Arm(incarnation="i-1", epoch=guards.asked + guards.commanded + 1))

    followers.ensure(KEY, FLEET, [pod_view(make_pod(uid="a", name="qwen-a", podIP="198.18.64.1"))])
    await asyncio.sleep(seconds)
    most = MAX_ANSWERS + seconds * ANSWERS_PER_S + 1
    assert guards.asked <= most
    assert 1 <= guards.commanded <= most
    await followers.close()
