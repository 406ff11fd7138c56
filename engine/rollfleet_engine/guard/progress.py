"""How far staging has come, told to those who follow the state."""

import asyncio
from collections.abc import Callable

from rollfleet_engine.guard.states import Event, Progressed

PROGRESS_EVERY_S = 1.0
GIB = 1 << 30


class Teller:
    """Progress of staging, once a second at most: each one wakes every follower."""

    def __init__(self, operation_id: int, report: Callable[[Event], None]) -> None:
        self._operation_id = operation_id
        self._report = report
        self._next = 0.0
        self.last = ""

    def __call__(self, done: int, total: int) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._next:
            return
        self._next = now + PROGRESS_EVERY_S
        text = f"{100 * done // max(total, 1)} % of {total / GIB:.2f} GiB"
        self.last = f", {text} done"
        self._report(Progressed(self._operation_id, text))
