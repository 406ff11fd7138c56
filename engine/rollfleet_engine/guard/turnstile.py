"""The gate as requests meet it: a flag, a version, and who is inside. Nothing here may cost a request time.

Requests that a Close in mode keep froze are `kept`, not in flight: the engine does not run them, or it does and the
guard holds back what they say, until the gate opens again. So nobody hears anything between closing and opening.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

from rollfleet_engine.guard.answers import Answer, closed
from rollfleet_protocol.refusals import WEIGHT_VERSION_HEADER, ClosedReason, VersionSpan

Header = tuple[bytes, bytes]


class Passage:
    """One admitted request, until its answer is complete, its client is gone or it was cut."""

    __slots__ = ("cut", "header", "pinned", "released", "requests", "spans", "started", "tainted", "task", "tokens")

    def __init__(self, task: asyncio.Task[object] | None, header: Header, *, pinned: bool = False) -> None:
        self.task = task
        self.header = header
        self.pinned = pinned  # it demands exactly the version at admission, so it is never kept over a change
        self.cut = False
        self.started = False  # the head of its answer was sent
        self.requests: list[str] = []  # what the engine calls it; several for several choices
        self.released: asyncio.Event | None = None  # while it is kept: set when its answer may go on
        self.tainted = False  # kept, and running under weights that are not opened yet
        self.tokens: tuple[int | None, ...] = ()  # output of each of `requests` when it was frozen; None: had ended
        self.spans: tuple[VersionSpan, ...] = ()  # empty for an answer of one version


# The request that the current task serves, for adapters that must know whose the engine's requests are.
current_passage: ContextVar[Passage | None] = ContextVar("rollfleet_passage", default=None)


class Turnstile:
    """Admits, counts, keeps and cuts. Only the guard's service opens and closes it; all runs in one event loop."""

    def __init__(self) -> None:
        self.is_open = False
        self.version = 0
        self.closed_reason = ClosedReason.STARTING
        self.answer: Answer = closed(self.closed_reason)  # to whom is not admitted
        self.moved = asyncio.Event()  # set, and replaced, when the gate or the reason changes
        self.admitted = 0  # since it opened
        self.refused = 0  # since it closed
        self.first_admission_ns = 0  # wall clock; 0: none since it opened
        self.last_admission_ns = 0
        self._header = version_header(0)
        self._inside: set[Passage] = set()
        self._kept: set[Passage] = set()
        self._emptied: asyncio.Event | None = None

    @property
    def in_flight(self) -> int:
        """Requests admitted and not finished, without those that are kept."""
        return len(self._inside)

    @property
    def kept(self) -> int:
        """Requests frozen until the gate opens again."""
        return len(self._kept)

    def open(self, version: int) -> None:
        """From here on requests are admitted and told this version; those that were kept go on under it."""
        before, self.version = self.version, version
        self._header = version_header(version)
        self.admitted = self.first_admission_ns = self.last_admission_ns = 0
        self.is_open = True
        self._tell_moved()
        for passage in self._kept:
            if version != before:
                self._cross(passage, before, version)
            self._release(passage)
        self._kept.clear()

    def _cross(self, passage: Passage, before: int, version: int) -> None:
        """A kept request goes on under another version."""
        had = (*passage.tokens, *(0 for _ in passage.requests[len(passage.tokens) :]))
        if not passage.started and all(count == 0 for count in had):
            passage.header = self._header  # nothing was generated before: all of its answer is of this version
        elif any(count is not None for count in had):
            first = passage.spans or (VersionSpan(version=before, from_token=tuple(0 for _ in had)),)
            passage.spans = (*first, VersionSpan(version=version, from_token=had))

    def _release(self, passage: Passage) -> None:
        self._inside.add(passage)
        if passage.released is not None:
            passage.released.set()
            passage.released = None
        passage.tainted = False

    def close(self, reason: ClosedReason) -> None:
        """From here on nothing is admitted."""
        if self.is_open:
            self.refused = 0
        self.is_open = False
        self.closed_reason, self.answer = reason, closed(reason)
        self._tell_moved()

    def _tell_moved(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def enter(self, *, pinned: bool = False) -> Passage:
        """Admit the request that the current task serves. The caller has looked at `is_open` in the same step."""
        now_ns = time.time_ns()
        if not self.admitted:
            self.first_admission_ns = now_ns
        self.last_admission_ns = now_ns
        self.admitted += 1
        passage = Passage(asyncio.current_task(), self._header, pinned=pinned)
        self._inside.add(passage)
        current_passage.set(passage)
        return passage

    def leave(self, passage: Passage) -> None:
        """The request is finished, however."""
        self._inside.discard(passage)
        self._kept.discard(passage)
        self._tell_emptied()

    def _tell_emptied(self) -> None:
        if self._emptied is not None and not self._inside:
            self._emptied.set()

    # --- keeping

    def keep(self, tokens: Mapping[str, int]) -> None:
        """Freeze who may be kept; the engine's scheduler has stopped. `tokens`: output so far of each of its requests.

        Who demanded exactly this version stays in flight: the caller ends it. So does, as it is cut, who was kept
        before and has got tokens since from weights that were never opened here: nobody may hear those.
        """
        self._cut_kept(lambda each: each.tainted and _counts(each, tokens) != each.tokens, others_go=False)
        for passage in [each for each in self._inside if not each.pinned and not each.cut]:
            passage.released = asyncio.Event()
            self._inside.discard(passage)
            self._kept.add(passage)
        for passage in self._kept:
            passage.tokens, passage.tainted = _counts(passage, tokens), False
        self._tell_emptied()

    def taint_kept(self) -> None:
        """The scheduler runs them again, under weights that are not opened yet."""
        for passage in self._kept:
            passage.tainted = True

    def let_go(self) -> None:
        """Keep nobody any longer: answers of the old version go out, others are cut."""
        self._cut_kept(lambda passage: passage.tainted)

    def cut_kept(self) -> int:
        """The weights that would answer them cannot be had any more."""
        return self._cut_kept(lambda _: True)

    def cut_tainted(self) -> int:
        """The weights that answered them were not found good."""
        return self._cut_kept(lambda passage: passage.tainted, others_go=False)

    def _cut_kept(self, wanted: Callable[[Passage], bool], *, others_go: bool = True) -> int:
        cut = [passage for passage in self._kept if wanted(passage)]
        going = list(self._kept) if others_go else cut
        count = self._cut(cut)
        for passage in going:
            self._kept.discard(passage)
            if passage.cut:
                self._inside.add(passage)  # until its task has ended; it stays held back
            else:
                self._release(passage)
        return count

    def requests_in_flight(self) -> tuple[str, ...]:
        """What the engine calls the requests that are in flight."""
        return tuple(request for passage in self._inside for request in passage.requests)

    # --- ending

    def cut_all(self) -> int:
        """End what is in flight: clients that read or send too slowly to be waited for."""
        return self._cut(self._inside)

    @staticmethod
    def _cut(passages: Iterable[Passage]) -> int:
        count = 0
        for passage in passages:
            if not passage.cut and passage.task is not None:
                passage.cut = True
                passage.task.cancel()
                count += 1
        return count

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether nothing is in flight, at the latest after so long."""
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


def _counts(passage: Passage, tokens: Mapping[str, int]) -> tuple[int | None, ...]:
    return tuple(tokens.get(request) for request in passage.requests)


def version_header(version: int) -> Header:
    """The header that tells which weights answered."""
    return WEIGHT_VERSION_HEADER.lower().encode(), str(version).encode()
