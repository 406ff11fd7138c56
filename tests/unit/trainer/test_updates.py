"""What an update tells at its end and on its way."""

import fcntl
import io
import math
import os
import struct
import termios
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from rollfleet_trainer.looks import Asked
from rollfleet_trainer.updates import Progress, ProgressLine, Update

ASKED = Asked("rl", "qwen", "qwen-policy", "uid-1", version=7, generation=3)
STATUS = {
    "version": 7,
    "step": "700",
    "digest": "sha256:00",
    "digestSource": "Trainer",
    "attempt": 2,
    "pausedSeconds": "3.250",
    "phaseSeconds": {
        "preparing": "0.1",
        "quiescing": "0.5",
        "transferring": "2.125",
        "verifying": "0.25",
        "opening": "",
    },
    "targets": [{"name": "qwen-0"}, {"name": "qwen-1"}],
    "progress": {"failed": [{"name": "qwen-1", "reason": "CoverageFailed", "message": "layer 3"}]},
}


def test_an_update_tells_what_the_operator_measured():
    update = Update.of({"status": STATUS}, ASKED)
    assert (update.version, update.step, update.digest, update.digest_source) == (7, "700", "sha256:00", "Trainer")
    assert (update.paused_s, update.transfer_s, update.attempts) == (3.25, 2.125, 2)
    assert update.phase_seconds["opening"] == 0.0
    assert update.engines == ("qwen-0",)
    assert [each.message for each in update.problems] == ["layer 3"]


def test_an_update_that_was_overtaken_is_told_from_history():
    ended = {"version": 7, "step": "700", "outcome": "Active", "digest": "sha256:00", "pausedSeconds": "1.5"}
    update = Update.of({"status": {**STATUS, "version": 8, "history": [{"version": 6}, ended]}}, ASKED)
    assert (update.version, update.step, update.digest, update.paused_s) == (7, "700", "sha256:00", 1.5)
    assert math.isnan(update.transfer_s), "history does not tell it"
    assert Update.of({"status": {"version": 8}}, ASKED).digest == ""


class Terminal(io.StringIO):  # as wide as $COLUMNS or 80
    def isatty(self) -> bool:
        return True


def progress(phase: str, **changes: Any) -> Progress:
    fields: dict[str, Any] = {"attempt": 1, "done": 1, "total": 2, "sent_bytes": 0, "seconds": 4.4} | changes
    return Progress(7, phase, **fields)


def test_the_progress_line_is_one_line_on_a_terminal_and_one_per_phase_elsewhere():
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        line = ProgressLine(stream)
        line(progress("Quiescing"))
        line(progress("Transferring", sent_bytes=3 << 20))
        line(progress("Transferring", sent_bytes=9 << 20, attempt=2))
        line(progress("Active", done=0, total=0))
    assert log.getvalue().splitlines() == [
        "version 7 Quiescing 1/2 engines, 4 s",
        "version 7 Transferring 1/2 engines, 3 MiB sent, 4 s",
        "version 7 Transferring 1/2 engines, 9 MiB sent, attempt 2, 4 s",
        "version 7 Active, 4 s",
    ]
    assert terminal.getvalue().count("\n") == 1
    assert "[" not in terminal.getvalue(), "nobody knows how much there is to send"
    last = terminal.getvalue().split("\r")[-1]
    assert last.rstrip() == "version 7 Active, 4 s"
    assert len(last.rstrip("\n")) >= len("version 7 Transferring 1/2 engines, 9 MiB sent, attempt 2, 4 s")


def test_on_a_terminal_a_bar_tells_what_is_sent_of_all_where_that_is_known():
    terminal = Terminal()
    line = ProgressLine(terminal)
    for sent in (1, 3, 5):
        line(progress("Transferring", sent_bytes=sent << 20, total_bytes=4 << 20))
    line(progress("Failed"))
    shown = [each.rstrip() for each in terminal.getvalue().split("\r")[1:]]
    assert shown[0] == "[#####...............] version 7 Transferring 1/2 engines, 1 of 4 MiB sent, 4 s"
    assert [each[:23] for each in shown[1:3]] == [f"[{'#' * 15}.....] ", f"[{'#' * 20}] "], "more came than before"
    assert shown[3] == "version 7 Failed 1/2 engines, 4 s"
    assert terminal.getvalue().endswith("\n"), "what is told next begins a line"


LACKS = "Unsupported: qwen-0: guard 0.1 lacks source/Trainer; it is tried for up to 600 s"


def test_what_is_waited_for_is_told_and_told_again_when_it_changes() -> None:
    log = io.StringIO()
    line = ProgressLine(log)
    line(progress("Preparing", message=LACKS))
    line(progress("Preparing", message=LACKS, seconds=5.4))
    line(progress("Preparing", message="no trainer\nholds the Lease", seconds=6.4))
    line(progress("Pending", done=0, total=0, message="spec.replicas of the RolloutEngine is 0"))
    assert log.getvalue().splitlines() == [
        f"version 7 Preparing 1/2 engines, 4 s: {LACKS}",
        "version 7 Preparing 1/2 engines, 6 s: no trainer holds the Lease",
        "version 7 Pending, 4 s: spec.replicas of the RolloutEngine is 0",
    ]


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A real one of 40 columns, and the other end of it."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream, master
    os.close(master)


def test_on_a_terminal_it_is_cut_to_the_terminals_width(terminal: tuple[TextIO, int]) -> None:
    stream, other_end = terminal
    line = ProgressLine(stream)
    line(progress("Preparing", message=LACKS))
    line(progress("Active", done=0, total=0))
    shown = ""
    while not shown.endswith("\n"):  # a terminal hands on what was written when it has come to it
        shown += os.read(other_end, 4096).decode().replace("\r\n", "\n")
    assert shown.split("\r")[1:] == [
        "version 7 Preparing 1/2 engines, 4 s...",
        f"{'version 7 Active, 4 s'.ljust(39)}\n",
    ]
    assert LACKS[:8] not in shown, "the next line would stand below what was cut off"
