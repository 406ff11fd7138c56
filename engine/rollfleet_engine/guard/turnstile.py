"""The gate as requests meet it: a flag, a version, and who is inside. Nothing here may cost a request time."""

import asyncio
import time

from rollfleet_engine.guard.answers import Answer, closed
from rollfleet_protocol.refusals import WEIGHT_VERSION_HEADER, ClosedReason


class Passage:
    """One admitted request, until its answer is complete, its client is gone or it was cut."""

    __slots__ = ("cut", "header", "task")

    def __init__(self, task: asyncio.Task[object] | None, header: tuple[bytes, bytes]) -> None:
        self.task = task
        self.header = header
        self.cut = False


class Turnstile:
    """Admits, counts and cuts. Only the guard's service opens and closes it; everything runs in one event loop."""

    def __init__(self) -> None:
        self.is_open = False
        self.version = 0
        self.answer: Answer = closed(ClosedReason.STARTING)  # to whom is not admitted
        self.admitted = 0  # since it opened
        self.refused = 0  # since it closed
        self.first_admission_ns = 0  # wall clock; 0: none since it opened
        self.last_admission_ns = 0
        self._header = version_header(0)
        self._inside: set[Passage] = set()
        self._emptied: asyncio.Event | None = None

    @property
    def in_flight(self) -> int:
        """Requests admitted and not finished."""
        return len(self._inside)

    def open(self, version: int) -> None:
        """From here on requests are admitted and told this version."""
        self.version = version
        self._header = version_header(version)
        self.admitted = self.first_admission_ns = self.last_admission_ns = 0
        self.is_open = True

    def close(self, reason: ClosedReason) -> None:
        """From here on nothing is admitted."""
        if self.is_open:
            self.refused = 0
        self.is_open = False
        self.answer = closed(reason)

    def enter(self) -> Passage:
        """Admit the request that the current task serves. The caller has looked at `is_open` in the same step."""
        now_ns = time.time_ns()
        if not self.admitted:
            self.first_admission_ns = now_ns
        self.last_admission_ns = now_ns
        self.admitted += 1
        passage = Passage(asyncio.current_task(), self._header)
        self._inside.add(passage)
        return passage

    def leave(self, passage: Passage) -> None:
        """The request is finished, however."""
        self._inside.discard(passage)
        if self._emptied is not None and not self._inside:
            self._emptied.set()

    def cut_all(self) -> int:
        """End what is still inside: clients that read or send too slowly to be waited for."""
        count = 0
        for passage in self._inside:
            if not passage.cut and passage.task is not None:
                passage.cut = True
                passage.task.cancel()
                count += 1
        return count

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether nobody is inside, at the latest after so long."""
        if not self._inside:
            return True
        if self._emptied is None or self._emptied.is_set():
            self._emptied = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return not self._inside


def version_header(version: int) -> tuple[bytes, bytes]:
    """The header that tells which weights answered."""
    return WEIGHT_VERSION_HEADER.lower().encode(), str(version).encode()
