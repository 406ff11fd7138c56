"""A queue of keys: each key at most once in it, never worked on twice at a time, different keys in parallel.

A key that is put while it is worked on comes again afterwards. A key that failed comes again after an exponential
back-off; news about it are taken earlier, but at least HOLD_S apart, so that a failing pass cannot spin on news. Nor
can passes that succeed: two who write what the other takes for news, each time, get PASSES_PER_S each.

Namespaces are served in turn, each by half of the workers at most, and where the queue is full the one that has most in
it gives way: whoever may create objects in one namespace must not be able to keep others waiting, by however many.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from rollfleet_operator.clients.pace import Pace

logger = logging.getLogger(__name__)

MAX_KEYS = 20_000
MAX_AT_ONCE = 16  # keys of one namespace that are worked on; half of the workers (runtime.term)
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 30.0
HOLD_S = 1.0  # between passes of a key that fails
MAX_CONFLICTS = 5  # in a row that are retried at once
# Passes of one key that news may bring at once, and how fast more. An update makes some thirty.
MAX_PASSES, PASSES_PER_S = 100.0, 10.0


@dataclass
class _Timer:
    handle: asyncio.TimerHandle
    when: float


class KeyedQueue:
    """All methods belong to one event loop."""

    def __init__(
        self, max_keys: int = MAX_KEYS, max_at_once: int = MAX_AT_ONCE, max_passes: float = MAX_PASSES
    ) -> None:
        self._max_keys = max_keys
        self._max_at_once = max_at_once
        self._max_passes = max_passes
        self._ready: OrderedDict[str, deque[str]] = OrderedDict()  # by namespace; whose turn is next comes first
        self._waiting: set[str] = set()  # what is in _ready
        self._working: dict[str, float] = {}  # key -> loop time of its start
        self._again: set[str] = set()  # put while worked on
        self._timers: dict[str, _Timer] = {}
        self._failures: dict[str, int] = {}
        self._conflicts: dict[str, int] = {}
        self._held: set[str] = set()  # failing keys whose news wait for the hold to end
        self._holds: dict[str, float] = {}  # key -> loop time before which news are not taken
        self._paces: dict[str, Pace] = {}
        self._wanted = asyncio.Event()
        self._is_taking = True

    def start(self) -> None:
        """Take keys (again). A new queue does."""
        self._is_taking = True

    def stop(self) -> None:
        """Forget everything, and take nothing: nobody works here now. The workers have ended."""
        self._is_taking = False
        self.close()
        self._ready.clear()
        for kept in (self._waiting, self._again, self._held):
            kept.clear()
        for counts in (self._working, self._failures, self._conflicts, self._holds, self._paces):
            counts.clear()

    def put(self, key: str) -> None:
        """There is news about this key."""
        if not self._is_taking:
            return
        if key in self._working:
            self._again.add(key)
            return
        if key in self._waiting:
            return
        hold = self._holds.get(key, 0.0) - asyncio.get_running_loop().time()
        if hold > 0:
            if key not in self._held:
                self._held.add(key)
                self._schedule(key, hold)
            return
        self._admit(key)

    def wake(self, key: str, delay_s: float | None) -> None:
        """Look at the key again after so many seconds, if nothing happens before; None: never. The last word counts.

        News that wait for their hold to end have happened already: they come no later, and the pass that they bring has
        a word of its own.
        """
        if key in self._held:
            return
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.handle.cancel()
        if delay_s is None:
            return
        if delay_s <= 0:
            self.put(key)
        else:
            self._schedule(key, delay_s)

    async def get(self) -> str:
        """The next key; the caller must call one of done, failed and conflicted for it."""
        while (key := self._next()) is None:
            self._wanted.clear()
            await self._wanted.wait()
        self._waiting.discard(key)
        self._working[key] = asyncio.get_running_loop().time()
        return key

    def done(self, key: str) -> None:
        """The pass succeeded."""
        self._failures.pop(key, None)
        self._conflicts.pop(key, None)
        now = asyncio.get_running_loop().time()
        self._holds[key] = now + self._paces.setdefault(key, Pace(self._max_passes, PASSES_PER_S)).take(now)
        self._finish(key)

    def failed(self, key: str, after_s: float | None = None) -> float:
        """The pass failed: again after the back-off, or after what the other side asked for. The delay in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        ceiling: float = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(count - 1, 16))
        delay = max(ceiling * random.uniform(0.5, 1.0), min(after_s or 0.0, BACKOFF_MAX_S))  # noqa: S311 - jitter
        self._holds[key] = asyncio.get_running_loop().time() + min(delay, HOLD_S)
        self._schedule(key, delay, replace=True)
        self._finish(key)
        return delay

    def conflicted(self, key: str) -> None:
        """Somebody else wrote first: again at once, and with a back-off where that does not help."""
        self._conflicts[key] = self._conflicts.get(key, 0) + 1
        if self._conflicts[key] > MAX_CONFLICTS:
            self.failed(key)
            return
        self._again.add(key)
        self._finish(key)

    def forget(self, key: str) -> None:
        """The object is gone: no timer and no count of it stays."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.handle.cancel()
        for kept in (self._failures, self._conflicts, self._holds, self._paces):
            kept.pop(key, None)
        self._held.discard(key)

    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    def longest_pass_s(self) -> float:
        """Seconds since the start of the oldest pass that still runs."""
        now: float = asyncio.get_running_loop().time()
        started: float = min(self._working.values(), default=now)
        return now - started

    def close(self) -> None:
        """Cancel the timers."""
        for timer in self._timers.values():
            timer.handle.cancel()
        self._timers.clear()

    def _admit(self, key: str) -> None:
        namespace = _namespace_of(key)
        if len(self._waiting) >= self._max_keys and not self._make_room(namespace):
            logger.error("the queue is full at %d keys; %s waits for the next resync", self._max_keys, key)
            return
        self._waiting.add(key)
        self._ready.setdefault(namespace, deque()).append(key)
        self._wanted.set()

    def _make_room(self, namespace: str) -> bool:
        """Whether another namespace, which has more in the queue, gave way."""
        largest = max(self._ready, key=lambda name: len(self._ready[name]))
        if len(self._ready[largest]) <= len(self._ready.get(namespace, ())) + 1:
            return False
        dropped = self._ready[largest].pop()
        self._waiting.discard(dropped)
        logger.error("the queue is full at %d keys; %s waits for the next resync", self._max_keys, dropped)
        return True

    def _next(self) -> str | None:
        """The key whose turn it is, taken out."""
        busy = Counter(_namespace_of(key) for key in self._working)
        namespace = next((name for name in self._ready if busy[name] < self._max_at_once), None)
        if namespace is None:
            return None
        turns = self._ready.pop(namespace)
        key = turns.popleft()
        if turns:
            self._ready[namespace] = turns  # at the end of the line
        return key

    def _finish(self, key: str) -> None:
        self._working.pop(key, None)
        if self._ready:
            self._wanted.set()  # its namespace may have waited for this
        if key in self._again:
            self._again.discard(key)
            self.put(key)

    def _schedule(self, key: str, delay_s: float, *, replace: bool = False) -> None:
        loop = asyncio.get_running_loop()
        when, known = loop.time() + delay_s, self._timers.get(key)
        if known is not None:
            if known.when <= when and not replace:
                return
            known.handle.cancel()
        self._timers[key] = _Timer(loop.call_at(when, self._fire, key), when)

    def _fire(self, key: str) -> None:
        self._timers.pop(key, None)
        self._held.discard(key)
        self._holds.pop(key, None)
        self.put(key)


def _namespace_of(key: str) -> str:
    return key.partition("/")[0]
