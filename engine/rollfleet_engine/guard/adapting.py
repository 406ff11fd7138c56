"""What adapters of engines share."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollfleet_engine.weights.backends.registry import usable_names
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.state import Facts


@cache
def capabilities(*, sleeps: bool) -> tuple[str, ...]:
    """What an engine with this guard can do; backends as far as they can be imported here."""
    return (
        *("source/Checkpoint", "source/Trainer"),
        *(f"backend/{name}" for name in usable_names()),
        *(f"pause/{mode.value}" for mode in PauseMode),
        *(("sleep/1", "sleep/2") if sleeps else ()),
        *("verify/Digest", "verify/Coverage", "verify/Logprobs"),
    )


def with_backend(facts: Facts, backend: str) -> Facts:
    """Of several backends only the one that the spec names (spec.weightTransfer.backend); all where it names none."""
    others = {each for each in facts.capabilities if each.startswith("backend/")} - {f"backend/{backend}"}
    if not backend:
        return facts
    return facts.model_copy(update={"capabilities": tuple(each for each in facts.capabilities if each not in others)})


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
