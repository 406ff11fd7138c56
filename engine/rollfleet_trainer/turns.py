"""Writes against other writers of the same object: how many are tried, and how far apart."""

import asyncio
import random

WRITES = 8
PAUSE_S = 0.1  # longest before the second, twice that before the third: the operator writes in bursts of a second or so


async def before(turn: int) -> None:
    """A pause by chance before write `turn`, counted from 0: two who write in step would stay in step."""
    await asyncio.sleep(random.uniform(0, PAUSE_S * turn))  # noqa: S311 - jitter
