"""The time that one operation has, over all its steps."""

import asyncio

from rollfleet_engine.guard.ports import EngineError
from rollfleet_protocol.state import FailureReason


class Deadline:
    """Time left in one operation, over all its steps."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + seconds
        self.seconds = seconds

    def left(self) -> float:
        """Seconds; raises when there are none."""
        left = self.rest()
        if left <= 0:
            raise EngineError(FailureReason.DEADLINE_EXCEEDED, f"not done within {self.seconds:g} s")
        return left

    def rest(self) -> float:
        """Seconds, none at the least."""
        return max(0.0, self._at - self._loop.time())
