"""Tokens by audience, on an injected clock."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rollfleet_operator.clients.errors import Unreachable
from rollfleet_operator.clients.tokens import DISCARD_AFTER_S, LIFE_S, MINTED_AT_ONCE, Tokens
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


async def test_it_is_renewed_before_two_thirds_of_its_life_without_a_wait(world: World) -> None:
    world.will_mint("t-1")
    await world.tokens.bearer(AUDIENCE)
    world.now += timedelta(seconds=LIFE_S / 2 - 1)
    assert await world.tokens.bearer(AUDIENCE) == "t-1"
    assert world.minted() == 1
    world.now += timedelta(seconds=LIFE_S / 6 + 2)
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


class Minter(MemoryCluster):
    """An API server that takes its time, and counts what it is asked at once."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.asked: list[datetime] = []
        self.at_once = self.most_at_once = 0

    async def create(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """As Cluster says, for TokenRequests."""
        self.asked.append(self.world.now)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        until = (self.world.now + timedelta(seconds=LIFE_S)).isoformat()
        return {"status": {"token": f"t-{len(self.asked)}", "expirationTimestamp": until}}


async def test_tokens_of_a_thousand_engines_are_few_at_once_spread_and_never_waited_for(world: World) -> None:
    """As their long polls ask for them, every ten seconds, for half an hour."""
    minter = Minter(world)
    tokens = Tokens(minter, "rollfleet", "operator", lambda: world.now)
    engines = [f"{AUDIENCE}/pod-{number}" for number in range(1000)]
    await asyncio.gather(*(tokens.bearer(engine) for engine in engines))
    assert minter.most_at_once == MINTED_AT_ONCE
    assert len(minter.asked) == 1000
    for _ in range(180):
        world.now += timedelta(seconds=10)
        for engine in engines:
            asked = len(minter.asked)
            await tokens.bearer(engine)
            assert len(minter.asked) == asked, "somebody waited for a token"
        await asyncio.gather(*tokens._minting.values())
    after = [moment for moment in minter.asked if moment > NOW]
    assert minter.most_at_once == MINTED_AT_ONCE
    assert 3000 <= len(after) <= 4000  # in 1,800 s: about two a second
    assert max(Counter(after).values()) < 250  # of a thousand in ten seconds


async def test_tokens_of_engines_that_are_gone_are_forgotten(world: World) -> None:
    tokens = Tokens(Minter(world), "rollfleet", "operator", lambda: world.now)
    for number in range(50):
        await tokens.bearer(f"{AUDIENCE}/pod-{number}")
    world.now += timedelta(seconds=LIFE_S)
    await tokens.bearer(f"{AUDIENCE}/pod-of-today")
    assert len(tokens._held) == 1
