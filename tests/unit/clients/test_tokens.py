"""Tokens by audience, on an injected clock."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from rollfleet_operator.clients.errors import Unreachable
from rollfleet_operator.clients.tokens import DISCARD_AFTER_S, LIFE_S, Tokens
from tests.support.cluster import MemoryCluster

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
AUDIENCE = "rollfleet.io/rl/qwen/f-1"


class World:
    """A cluster that mints numbered tokens, and a clock."""

    def __init__(self) -> None:
        self.now = NOW
        self.cluster = MemoryCluster()
        self.tokens = Tokens(self.cluster, "rollfleet", "operator", lambda: self.now)

    def will_mint(self, text: str, life_s: float = LIFE_S) -> None:
        until = (self.now + timedelta(seconds=life_s)).isoformat()
        self.cluster.answers.append({"status": {"token": text, "expirationTimestamp": until}})

    def minted(self) -> int:
        return len(self.cluster.writes)


@pytest.fixture
def world() -> World:
    return World()


async def settled() -> None:
    """Let what runs beside the caller finish."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_token_serves_all_callers(world: World) -> None:
    world.will_mint("t-1")
    assert set(await asyncio.gather(*(world.tokens.bearer(AUDIENCE) for _ in range(50)))) == {"t-1"}
    assert world.minted() == 1


async def test_it_is_renewed_at_two_thirds_of_its_life_without_a_wait(world: World) -> None:
    world.will_mint("t-1")
    await world.tokens.bearer(AUDIENCE)
    world.now += timedelta(seconds=LIFE_S * 2 / 3 - 1)
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    assert world.minted() == 1
    world.now += timedelta(seconds=2)
    world.will_mint("t-2")
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    await settled()
    assert await world.tokens.bearer(AUDIENCE) == "t-2"


async def test_a_long_life_is_not_trusted_beyond_what_was_asked(world: World) -> None:
    world.will_mint("t-1", life_s=31_536_000)
    await world.tokens.bearer(AUDIENCE)
    world.now += timedelta(seconds=LIFE_S + 1)
    world.will_mint("t-2")
    assert await world.tokens.bearer(AUDIENCE) == "t-2"


async def test_a_failed_renewal_leaves_the_old_token_while_it_lives(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.will_mint("t-1")
    await world.tokens.bearer(AUDIENCE)
    world.now += timedelta(seconds=LIFE_S * 0.9)
    world.cluster.answers.append(Unreachable("create ServiceAccount: no answer"))
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    await settled()
    assert "no answer" in caplog.text
    assert "t-1" not in caplog.text
    world.now += timedelta(seconds=LIFE_S)
    world.cluster.answers.append(Unreachable("create ServiceAccount: no answer"))
    with pytest.raises(Unreachable):
        await world.tokens.bearer(AUDIENCE)


async def test_a_token_that_a_guard_refused_is_not_shown_again(world: World) -> None:
    world.will_mint("t-1")
    await world.tokens.bearer(AUDIENCE)
    world.tokens.discard(AUDIENCE, "t-1")  # new as it is, it was not the reason
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    world.now += timedelta(seconds=DISCARD_AFTER_S)
    world.tokens.discard(AUDIENCE, "another")
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    world.tokens.discard(AUDIENCE, "t-1")
    world.will_mint("t-2")
    assert await world.tokens.bearer(AUDIENCE) == "t-2"


async def test_audiences_have_tokens_of_their_own(world: World) -> None:
    world.will_mint("t-1")
    world.will_mint("t-2")
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    assert await world.tokens.bearer("rollfleet.io/rl/other/f-2") == "t-2"
