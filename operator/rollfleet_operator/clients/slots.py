"""A bound on calls in all and on those of one fleet, where those who wait are served fleet by fleet in turn.

So a fleet with a thousand engines that answer nothing holds up its own calls, not those of a fleet with two. Nobody
takes more than what is left for others: each further fleet that hangs leaves half of it, so several of them together do
not hold up a small one either.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """All methods belong to one event loop."""

    def __init__(self, total: int, per_key: int) -> None:
        self._free = total
        self._per_key = per_key
        self._held: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first

    @asynccontextmanager
    async def slot(self, key: str) -> AsyncIterator[None]:
        """Hold one while the block runs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was our turn, and we left at the same moment
                self._give_back(key)
            raise
        try:
            yield
        finally:
            self._give_back(key)

    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return sum(not turn.cancelled() for turns in self._waiting.values() for turn in turns)

    def _give_back(self, key: str) -> None:
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._serve()

    def _serve(self) -> None:
        """Give free slots to keys in turn; one that holds its share is passed over."""
        while self._free:
            share = min(self._per_key, self._free)
            key = next((key for key in self._waiting if self._held.get(key, 0) < share), None)
            if key is None:
                return
            turns = self._waiting.pop(key)
            while turns and turns[0].cancelled():
                turns.popleft()
            if not turns:
                continue
            turns.popleft().set_result(None)
            self._free -= 1
            self._held[key] = self._held.get(key, 0) + 1
            if turns:
                self._waiting[key] = turns  # at the end of the line
