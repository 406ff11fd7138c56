"""What adapters of engines share."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from pydantic import ValidationError

from rollfleet_engine.weights.backends.registry import usable_names
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.engine_config import HOST_ENV
from rollfleet_protocol.state import Facts, Host

BY_WORKERS = ("source/Checkpoint", "source/Trainer", "verify/Digest", "verify/Coverage")
PAUSES = tuple(f"pause/{mode.value}" for mode in PauseMode)
SLEEPS = ("sleep/1", "sleep/2")
# All that the guard's contract knows of engines; backends of pushes are the guard's own.
CAPABILITIES = (*BY_WORKERS, "verify/Logprobs", *PAUSES, *SLEEPS)


def able(lacking: Mapping[str, str]) -> tuple[str, ...]:
    """What an engine can do that was seen to lack these."""
    return tuple(each for each in CAPABILITIES if each not in lacking)


def with_backend(facts: Facts, backend: str) -> Facts:
    """Pushes only by the backend that the spec names (spec.weightTransfer), and only where it can be imported here."""
    if backend and backend in usable_names() and "source/Trainer" in facts.capabilities:
        capabilities = (*facts.capabilities, f"backend/{backend}")
    else:
        capabilities = tuple(each for each in facts.capabilities if each != "source/Trainer")
    return facts.model_copy(update={"capabilities": capabilities})


def on_host(facts: Facts, environ: Mapping[str, str]) -> Facts:
    """With what the launcher saw of the container. Nothing rests on it, so what cannot be read is left out."""
    try:
        return facts.model_copy(update={"host": Host.model_validate_json(environ.get(HOST_ENV, "{}"))})
    except ValidationError:
        return facts


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
