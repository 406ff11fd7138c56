"""Requests inside an engine of the model: the real turnstile counts, keeps and cuts them; their tokens are modelled.

Each request remembers what really made each of its tokens, and on which caches; an auditor compares that with what its
client is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rollfleet_engine.guard.turnstile import Passage, Turnstile, version_header

TOKENS_PER_S = 10.0
DONE_S = 1e-9


class _Task:
    """What a turnstile ends: the crowd looks whether it was cut."""

    def cancel(self) -> None:
        """See `Passage.cut`."""


@dataclass(frozen=True)
class Held:
    """What an engine holds while it generates."""

    version: int
    digest: str | None  # by its guard; None: model.path as it was loaded
    resident: str  # really


@dataclass
class Piece:
    """Tokens in a row that the same weights made."""

    held: Held
    first: int
    fresh: bool  # on caches of these very weights


@dataclass(eq=False)
class Request:
    """A client's."""

    name: str
    passage: Passage
    left_s: float  # of generating
    streams: bool
    pinned: bool
    cached: str  # weights whose caches it stands on
    since: float | None  # generating since then; None: frozen, or done
    tokens: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    told: int | None = None  # version in the head of its answer, once that was sent
    was_kept: bool = False
    done: bool = False

    @property
    def count(self) -> int:
        """Output tokens so far."""
        return int(self.tokens)


class Crowd:
    """All requests of one process."""

    def __init__(self, name: str, held: Held) -> None:
        self.turnstile = Turnstile()
        self.on_answer: Callable[[Request], None] = lambda _: None
        self.on_cut: Callable[[Request], None] = lambda _: None
        self.on_heard: Callable[[Request, Held], None] = lambda _, __: None  # tokens of a stream, as they are made
        self.kept_until = float("inf")
        self.frozen = False  # the scheduler is paused
        self.held = held
        self.cached = held.resident  # weights of the prefix cache
        self._name = name
        self._requests: list[Request] = []
        self._serial = 0

    def admit(self, now: float, seconds: float, *, streams: bool, pinned: bool) -> None:
        """A client's request comes in. The caller has seen the gate open."""
        self._serial += 1
        turnstile = self.turnstile
        passage = Passage(_Task(), version_header(turnstile.version), pinned=pinned)  # type: ignore[arg-type]
        turnstile._inside.add(passage)  # as `enter` does it for the task of a loop
        passage.requests.append(f"{self._name}/{self._serial}")
        since = None if self.frozen else now
        self._requests.append(Request(passage.requests[0], passage, seconds, streams, pinned, self.cached, since))

    def next_event(self) -> float | None:
        """When the next request ends, or is kept for too long."""
        times = [each.since + each.left_s for each in self._requests if each.since is not None]
        if self.turnstile.kept:
            times.append(self.kept_until)
        return min(times, default=None)

    def advance(self, now: float) -> None:
        """Tokens until now, and what follows from them."""
        if not self._requests:
            return
        for request in self._requests:
            self._generate(request, now)
        if now >= self.kept_until and self.turnstile.kept:
            self.turnstile.cut_kept()
        self.settle()

    def _generate(self, request: Request, now: float) -> None:
        if request.since is None:
            return
        seconds = min(now - request.since, request.left_s)
        request.since = now
        if seconds <= 0:
            return
        before = request.count
        request.tokens += seconds * TOKENS_PER_S
        if request.count > before:
            self._note(request, before)
        request.left_s -= seconds
        if request.left_s <= DONE_S:
            request.done, request.since = True, None
        self._send_head(request)

    def _note(self, request: Request, first: int) -> None:
        piece, fresh = request.pieces[-1] if request.pieces else None, request.cached == self.held.resident
        if piece is None or piece.held != self.held or piece.fresh != fresh:
            request.pieces.append(Piece(self.held, first, fresh))
        if request.streams and request.passage.released is None:
            self.on_heard(request, self.held)

    def _send_head(self, request: Request) -> None:
        passage = request.passage
        if passage.released is None and not passage.started and (request.done or (request.streams and request.count)):
            passage.started = True
            request.told = int(passage.header[1])

    def settle(self) -> None:
        """Answers that are done and not held back go out; what was cut is gone."""
        for request in list(self._requests):
            passage = request.passage
            if passage.cut:
                self._leave(request)
                self.on_cut(request)
            elif request.done and passage.released is None:
                self._send_head(request)
                self._leave(request)
                self.on_answer(request)

    def _leave(self, request: Request) -> None:
        self.turnstile.leave(request.passage)
        self._requests.remove(request)

    # what the engine does -------------------------------------------------------------------------------------------

    def hold(self, now: float, held: Held) -> None:
        """From here on other weights generate."""
        self.advance(now)
        self.held = held

    def freeze(self, now: float) -> None:
        """The scheduler stops."""
        self.advance(now)
        self.frozen = True
        for request in self._requests:
            request.since, request.tokens = None, float(request.count)

    def resume(self, now: float) -> None:
        """The scheduler runs."""
        self.frozen = False
        for request in self._requests:
            if not request.done:
                request.since = now

    def keep(self, now: float, seconds: float) -> None:
        """Whoever may be kept is."""
        self.turnstile.keep({each.name: each.count for each in self._requests})
        self.kept_until = now + seconds
        for request in self._requests:
            request.was_kept = request.was_kept or request.passage.released is not None

    def reset_caches(self) -> None:
        """Nothing that other weights computed is used again; what is kept computes it anew."""
        self.cached = self.held.resident
        for request in self._requests:
            request.cached = self.held.resident

    def abort(self) -> None:
        """What is in flight ends with what it has."""
        for request in self._requests:
            if request.passage.released is None:
                request.done, request.since = True, None
        self.settle()

    def vanish(self) -> None:
        """The process is gone: every connection breaks."""
        self._requests.clear()
