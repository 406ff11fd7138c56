"""What adapters of engines share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from rollfleet_protocol.commands import PauseMode

CAPABILITIES = (
    "source/Checkpoint",
    *(f"pause/{mode.value}" for mode in PauseMode),
    *("verify/Digest", "verify/Coverage", "verify/Logprobs"),
)


def guard_version() -> str:
    """Our own release, as Facts tells it."""
    try:
        return version("rollfleet")
    except PackageNotFoundError:  # run from a source tree
        return "0+source"


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note how long a phase took, however it ended."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = time.monotonic() - started
