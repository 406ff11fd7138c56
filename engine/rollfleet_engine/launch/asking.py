"""Asks an interpreter by a short program of ours: what it printed, or why it did not answer in words for a reader."""

import errno
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a busy node answers to a program that starts; the same start may succeed a moment later (man 2 execve, fork).
_PASSING = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ETXTBSY, errno.ESTALE, errno.ETIMEDOUT}
)


@dataclass(frozen=True)
class Asked:
    """What became of it."""

    output: str = ""  # standard output of a program that ended well
    error: str = ""  # empty where it ended well; never the program's text
    may_pass: bool = False  # whether the same question may be answered after a restart


def ask(command: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Asked:
    """Run it to its end, or for `timeout_s` seconds. A cold or a busy node is told from an answer that stays."""
    try:
        done = subprocess.run(
            list(command), check=False, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            env=dict(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Asked(error=f"no answer within {timeout_s:g} s", may_pass=True)
    except OSError as error:
        return Asked(error=error.strerror or str(error), may_pass=error.errno in _PASSING)
    if done.returncode == 0:
        return Asked(output=done.stdout)
    if done.returncode < 0:
        return Asked(error=f"ended by {_name(-done.returncode)} before it answered", may_pass=True)
    return Asked(error=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
