"""Keeps submissions from running ahead of weights that the fleet does not have yet.

The trainer says which version it is at (`note`); engines say, with each answer and each refusal for a version, which
one they serve. A request may be submitted while

    trainer's version - newest version that was heard of  <=  max_staleness

and is admitted by an engine, which knows better, only at a version of at least trainer's version - max_staleness: it
carries that as its minimum. While the fleet lags, one request is submitted, and again, to find out; the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollfleet_trainer.rollout_errors import NotServedError


class Pace:
    """Of one client, in one event loop."""

    def __init__(self, max_staleness: int | None) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness}: must not be negative")
        self._max_staleness = max_staleness
        self.current: int | None = None  # the trainer's
        self.served: int | None = None  # the newest that an engine told
        self._scouting = False
        self._moved = asyncio.Event()

    @property
    def floor(self) -> int | None:
        """The oldest version that may answer; None: any."""
        if self._max_staleness is None or self.current is None:
            return None
        return max(0, self.current - self._max_staleness)

    @property
    def lags(self) -> bool:
        """Whether nobody is known to serve what may answer."""
        return self.floor is not None and self.served is not None and self.served < self.floor

    def note(self, version: int) -> None:
        """The trainer is at this version; it never goes back."""
        if version < 0:
            raise ValueError(f"version {version}: must not be negative")
        self.current = version if self.current is None else max(self.current, version)

    def heard(self, version: int | None) -> None:
        """An engine serves this one."""
        if version is not None and (self.served is None or version > self.served):
            self.served = version
            self._stir()

    @asynccontextmanager
    async def turn(self, until: float) -> AsyncIterator[None]:
        """Wait until a request may be submitted; while the fleet lags, the body is the only one that tries.

        Raises NotServedError at `until`, by the loop's clock.
        """
        while self.lags and self._scouting:
            try:
                async with asyncio.timeout_at(until):
                    await self._moved.wait()
            except TimeoutError:
                told = f"version {self.floor} or later may answer (max_staleness {self._max_staleness})"
                raise NotServedError(f"{told}; {self.served} is the newest that was heard of") from None
        scouts = self.lags
        self._scouting = self._scouting or scouts
        try:
            yield
        finally:
            if scouts:
                self._scouting = False
                self._stir()

    def _stir(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
