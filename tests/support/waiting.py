"""Waiting for a condition, never for a time."""

import asyncio
from collections.abc import Awaitable, Callable

INTERVAL_S = 0.05


async def until(
    holds: Callable[[], Awaitable[bool]],
    within_s: float,
    otherwise: Callable[[], str] = lambda: "it did not come about",
) -> None:
    """Poll until the condition holds; after the deadline an AssertionError that says what `otherwise` does."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not await holds():
        assert loop.time() < deadline, f"not within {within_s:.0f} s: {otherwise()}"
        await asyncio.sleep(INTERVAL_S)
