"""What an update tells: while it runs, and at its end."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rollfleet_trainer.errors import EngineProblem
from rollfleet_trainer.looks import Asked, Manifest, problems_of

MIB = 1 << 20
BAR = 20  # characters


@dataclass(frozen=True)
class Update:
    """A version that the fleet serves. Times are in seconds, as the operator measured them."""

    version: int
    step: str
    digest: str  # "sha256:<hex>", on which all engines agree
    digest_source: str  # Trainer: it is that of what was sent. EnginesOnly: nobody vouches for it but the engines
    paused_s: float  # how long the fleet answered nothing
    transfer_s: float  # of that, until all engines held the weights; not a number where the object has gone on since
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1
    engines: tuple[str, ...] = ()  # pods that took the version
    problems: tuple[EngineProblem, ...] = ()  # of those that were left out, and join later

    @classmethod
    def of(cls, weight_version: Manifest, asked: Asked) -> Update:
        """Of an object whose version is committed; it may have gone on since."""
        status = weight_version.get("status") or {}
        if status.get("version") != asked.version:
            return cls._of_history(status, asked)
        seconds = {name: _number(text) for name, text in (status.get("phaseSeconds") or {}).items()}
        problems = problems_of(status)
        out = {each.name for each in problems}
        return cls(
            version=asked.version,
            step=str(status.get("step") or ""),
            digest=str(status.get("digest") or ""),
            digest_source=str(status.get("digestSource") or ""),
            paused_s=_number(status.get("pausedSeconds")),
            transfer_s=seconds.get("transferring", 0.0),
            phase_seconds=seconds,
            attempts=int(status.get("attempt") or 1),
            engines=tuple(each["name"] for each in status.get("targets") or () if each["name"] not in out),
            problems=problems,
        )

    @classmethod
    def _of_history(cls, status: Manifest, asked: Asked) -> Update:
        ended: Manifest = next(
            (each for each in reversed(status.get("history") or ()) if each["version"] == asked.version), {}
        )
        return cls(
            version=asked.version,
            step=str(ended.get("step") or ""),
            digest=str(ended.get("digest") or ""),
            digest_source=str(ended.get("digestSource") or ""),
            paused_s=_number(ended.get("pausedSeconds")),
            transfer_s=math.nan,
        )


def _number(text: Any) -> float:
    return float(text) if text else 0.0


@dataclass(frozen=True)
class Progress:
    """How far an update is."""

    version: int
    phase: str  # Pending, Preparing, Quiescing, Transferring, Verifying, Opening, Active
    attempt: int
    done: int  # engines that have done the phase's step
    total: int
    sent_bytes: int  # by this process, in this attempt
    seconds: float  # since the update was asked for
    message: str = ""  # what is waited for
    total_bytes: int = 0  # while it transfers: that are to be sent, or were for the version before; 0: not known

    @property
    def share(self) -> float | None:
        """Of the bytes that are to be sent; None where nobody knows how many."""
        return min(1.0, self.sent_bytes / self.total_bytes) if self.total_bytes else None

    def words(self) -> str:
        """One line."""
        engines = f" {self.done}/{self.total} engines" if self.total else ""
        of = f" of {self.total_bytes / MIB:.0f}" if self.total_bytes else ""
        sent = f", {self.sent_bytes / MIB:.0f}{of} MiB sent" if self.sent_bytes else ""
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        why = f": {' '.join(self.message.split())}" if self.message else ""
        return f"version {self.version} {self.phase}{engines}{sent}{again}, {self.seconds:.0f} s{why}"


OnProgress = Callable[[Progress], None]


class ProgressLine:
    """Shows progress, and what is waited for: on a terminal one line that changes, with a bar of the bytes sent, cut to
    the terminal's width; else a line per phase, and one more whenever something else is waited for.

    Give it as `on_progress`. stream: else standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = ("", 0, "")  # phase, attempt, message
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        words, shown = progress.words(), (progress.phase, progress.attempt, progress.message)
        ended = progress.phase in ("Active", "Failed")
        if self._stream.isatty():
            words = _cut(f"{_bar(progress.share)}{words}", _columns(self._stream))
            self._stream.write(f"\r{words.ljust(self._width)}" + ("\n" if ended else ""))
            self._width = len(words)
        elif shown != self._shown:
            self._stream.write(f"{words}\n")
        self._shown = shown
        self._stream.flush()


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    done = round(share * BAR)
    return f"[{'#' * done}{'.' * (BAR - done)}] "


def _columns(terminal: TextIO) -> int:
    """How wide it is now; $COLUMNS or 80 where it does not tell."""
    try:
        told = os.get_terminal_size(terminal.fileno()).columns
    except OSError:  # no device behind the stream, or one without a size
        told = 0
    return told or shutil.get_terminal_size().columns


def _cut(words: str, columns: int) -> str:
    """So that the cursor stays in the line: a longer one could not be written over."""
    return words if len(words) < columns else f"{words[: max(0, columns - 4)]}..."
