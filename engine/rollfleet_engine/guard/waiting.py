"""Requests that wait at a closed gate, where the fleet holds them instead of refusing: bounded in number and time.

They wait here and never in the engine, which would take them for its own and answer them whatever its weights.
"""

import asyncio
from collections import deque
from contextlib import suppress

from rollfleet_engine.guard.answers import Message, Receive
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_protocol.engine_config import Hold
from rollfleet_protocol.refusals import ClosedReason

# Of a body that is read ahead, so that a client that goes away is noticed. What is longer waits with its sender.
LONGEST_BODY_AHEAD = 1 << 20


class Held:
    """One request: its body as far as it has come, and whether its client is still there."""

    def __init__(self, receive: Receive) -> None:
        self.gone = asyncio.Event()
        self._receive = receive
        self._ahead: deque[Message] = deque()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        size = 0
        while size <= LONGEST_BODY_AHEAD:
            message = await self._receive()
            self._ahead.append(message)
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            size += len(message.get("body", b""))

    async def stop(self) -> None:
        """Read no more ahead. A message that is being waited for is not lost: servers hand out only whole ones."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def receive(self) -> Message:
        """What was read ahead, then the rest: for the application."""
        return self._ahead.popleft() if self._ahead else await self._receive()


class WaitingRoom:
    """Holds requests until the gate opens, their time is over or there is nothing to wait for."""

    def __init__(self, turnstile: Turnstile, limits: Hold | None) -> None:
        self._turnstile = turnstile
        self._limits = limits
        self.held = 0

    @property
    def admits(self) -> bool:
        """Whether a request that finds the gate closed may wait: only an update opens it again before long."""
        limits = self._limits
        waits = limits is not None and self._turnstile.closed_reason is ClosedReason.UPDATING
        return waits and limits is not None and self.held < limits.max_requests

    async def wait(self, held: Held) -> None:
        """Until the gate is open, or it is certain that this request is not admitted."""
        assert self._limits is not None  # noqa: S101 - whoever asks has looked at `admits`
        self.held += 1
        gone = asyncio.create_task(held.gone.wait())
        try:
            async with asyncio.timeout(self._limits.seconds):
                while not self._turnstile.is_open and self._turnstile.closed_reason is ClosedReason.UPDATING:
                    moved = asyncio.create_task(self._turnstile.moved.wait())
                    try:
                        await asyncio.wait({moved, gone}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        moved.cancel()
                    if held.gone.is_set():
                        return
        except TimeoutError:
            pass  # refused, by the turnstile's own answer
        finally:
            gone.cancel()
            self.held -= 1
