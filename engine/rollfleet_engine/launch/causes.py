"""Finds in an engine's log why it ended: the first causal error, not the last consequence. Pure; bounded memory."""

import re
from collections import deque
from dataclasses import dataclass, field

# vLLM's prefixes: "(EngineCore pid=123) ERROR 11-29 16:56:18 [core.py:12] text"
_PROCESS = re.compile(r"^\([\w .:=-]+pid=\d+\)\s?")
_LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?")
_TRACEBACK = "Traceback (most recent call last):"
# The last line of a traceback: an exception's qualified name, at the left margin, with or without a message.
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::\s.*)?$")
_ARGPARSE = re.compile(r"^\S+: error: (?P<text>.+)$")
# Errors of one failure come within seconds of each other; older ones belong to something that the engine survived.
CAUSE_WINDOW_S = 60.0
_MAX_CANDIDATES = 64
_MAX_TEXT = 1500
_TAIL_LINES = 20


@dataclass(frozen=True)
class _Candidate:
    time_s: float
    text: str
    strong: bool  # a traceback's or a parser's own error, not just a line of level ERROR


@dataclass
class CauseFinder:
    """Fed with every line; asked once, at the end."""

    _candidates: deque[_Candidate] = field(default_factory=lambda: deque(maxlen=_MAX_CANDIDATES))
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _open: set[str] = field(default_factory=set)  # processes whose traceback is being read

    def feed(self, line: str, now_s: float, stream: str = "") -> None:
        """Take one line, without its newline. Lines of different streams may interleave within a traceback."""
        self._tail.append(line[:_MAX_TEXT])
        process, level, text = _split(line)
        process = f"{stream} {process}"
        if text.startswith(_TRACEBACK):
            if len(self._open) < _MAX_CANDIDATES:
                self._open.add(process)
        elif process in self._open:
            self._inside_traceback(process, text, now_s)
        elif usage := _ARGPARSE.match(text):
            self._add(now_s, usage["text"], strong=True)
        elif level in ("ERROR", "CRITICAL") and text.strip():
            self._add(now_s, text, strong=False)

    def cause(self, now_s: float) -> str:
        """The first error of the newest failure, or nothing."""
        recent = [candidate for candidate in self._candidates if now_s - candidate.time_s <= CAUSE_WINDOW_S]
        strong = [candidate for candidate in recent if candidate.strong]
        return next((candidate.text for candidate in strong or recent), "")

    def tail(self) -> tuple[str, ...]:
        """The newest lines, oldest first."""
        return tuple(self._tail)

    def _inside_traceback(self, process: str, text: str, now_s: float) -> None:
        # Frames are indented; source carets and blank lines too. The first line at the margin names the exception.
        if text and not text[0].isspace() and _EXCEPTION.match(text):
            self._open.discard(process)
            self._add(now_s, text, strong=True)

    def _add(self, now_s: float, text: str, *, strong: bool) -> None:
        oldest_counts = self._candidates and now_s - self._candidates[0].time_s <= CAUSE_WINDOW_S
        if len(self._candidates) == _MAX_CANDIDATES and oldest_counts:
            return  # full of one failure: its first errors are what matters
        self._candidates.append(_Candidate(time_s=now_s, text=text.strip()[:_MAX_TEXT], strong=strong))


def _split(line: str) -> tuple[str, str, str]:
    """Process, level and text of a line."""
    process = _PROCESS.match(line)
    rest = line[process.end() :] if process else line
    level = _LEVEL.match(rest)
    text = rest[level.end() :] if level else rest
    return (process[0].strip() if process else "", level["level"] if level else "", text)
