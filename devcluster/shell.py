"""Running other programs, and telling the user what takes long."""

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from devcluster.errors import CommandFailedError, NotReadyError

TAIL_LINES = 25
POLL_S = 0.1


def run(
    argv: Sequence[object],
    *,
    timeout_s: float,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program (words are str or Path) to its end and return what it printed; its own words are in the error."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, input=stdin, env=env, cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise CommandFailedError(f"cannot run {words[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailedError(f"no end after {timeout_s:.0f} s: {shlex.join(words)}") from error
    if done.returncode != 0:
        said = tail((done.stderr + done.stdout).strip())
        raise CommandFailedError(f"exit {done.returncode} from {shlex.join(words)}\n{said}")
    return done.stdout


def tail(text: str, lines: int = TAIL_LINES) -> str:
    return "\n".join(text.splitlines()[-lines:])


def tail_of(path: Path, lines: int = TAIL_LINES) -> str:
    """The end of a log, for an error message; reads at most its last 64 KiB."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 65536))
            return tail(log.read().decode(errors="replace"), lines)
    except FileNotFoundError:
        return "(no log was written)"


def say(text: str) -> None:
    """Progress goes to stderr: stdout is for what other programs read."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Say that something has begun, and when it ends how long it took."""
    start = time.monotonic()
    say(f"{name} ...")
    yield
    say(f"{name}: {time.monotonic() - start:.1f} s")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float, explain: Callable[[], str]) -> None:
    """Poll until the condition holds; past the deadline the error carries what `explain` knows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotReadyError(f"not after {timeout_s:.0f} s: {what}", explain())
        time.sleep(POLL_S)
