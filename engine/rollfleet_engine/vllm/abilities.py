"""What a vLLM can do, seen from its own signatures: no call is made, and no release is asked for its number.

Read in vLLM 0.27.1: v1/engine/core.py (pause_scheduler, reset_prefix_cache, sleep, wake_up), v1/engine/async_llm.py.
"""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from rollfleet_engine.guard.adapting import BY_WORKERS, PAUSES, SLEEPS
from rollfleet_protocol.commands import PauseMode

_TRANSFER_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
_RESET_ARGUMENTS = ("reset_running_requests", "reset_connector")


def missing(client: type, core: type) -> Iterator[tuple[str, str]]:
    """(capability, what it needs and this vLLM has not), of its front end (AsyncLLM) and its core (EngineCore)."""
    for lacking in _absent(client, _TRANSFER_CALLS):
        yield from ((each, lacking) for each in BY_WORKERS)
    if "data_parallel_rank" not in _arguments(client, "generate"):
        yield "verify/Logprobs", f"{client.__name__}.generate takes no data_parallel_rank"
    yield from _pauses(core)
    for lacking in _absent(core, ("sleep", "wake_up")):
        yield from ((each, lacking) for each in SLEEPS)


def _pauses(core: type) -> Iterator[tuple[str, str]]:
    for lacking in _absent(core, ("pause_scheduler", "resume_scheduler", "is_scheduler_paused", "reset_prefix_cache")):
        yield from ((each, lacking) for each in PAUSES)
        return
    modes = _modes(core)
    for mode in PauseMode:
        needed = PauseMode.ABORT if mode is PauseMode.WAIT else mode  # the guard itself waits, then aborts the rest
        if needed.value not in modes:
            told = f"{core.__name__}.pause_scheduler has the modes {', '.join(sorted(modes)) or 'none'}"
            yield f"pause/{mode.value}", f"{told}, not {needed.value}"
    if _arguments(core, "reset_prefix_cache")[1:3] != _RESET_ARGUMENTS:
        told = f"{core.__name__}.reset_prefix_cache does not take {', '.join(_RESET_ARGUMENTS)}"
        yield from ((each, told) for each in PAUSES)


def _modes(core: Any) -> frozenset[str]:
    try:
        return frozenset(get_args(get_type_hints(core.pause_scheduler).get("mode")))
    except (NameError, TypeError):
        return frozenset()


def _absent(owner: type, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if not callable(getattr(owner, name, None)):
            yield f"{owner.__name__} has no {name}"
            return


def _arguments(owner: type, name: str) -> tuple[str, ...]:
    method = getattr(owner, name, None)
    return tuple(inspect.signature(method).parameters) if callable(method) else ()
