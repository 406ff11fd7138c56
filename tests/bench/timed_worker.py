"""A worker extension that also tells how long digest and coverage took; for `make bench-pauses` only.

The very functions that the transfer engine calls are wrapped by clocks where it finds them; nothing else is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from rollfleet_engine.vllm import transfer_engine
from rollfleet_engine.vllm.worker import RollfleetWorkerExtension
from rollfleet_engine.weights.transfer import CheckpointReader

spent = {"digest": 0.0, "coverage": 0.0, "reading": 0.0}  # seconds since the last report that had any


def clocked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose time is added up."""

    @wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent[kind] += time.perf_counter() - began

    return timed


transfer_engine.lanes = clocked("digest", transfer_engine.lanes)
transfer_engine.version_digest = clocked("digest", transfer_engine.version_digest)
CheckpointReader.require_digest = clocked("digest", CheckpointReader.require_digest)  # type: ignore[method-assign]
transfer_engine.compare_layers = clocked("coverage", transfer_engine.compare_layers)
CheckpointReader.read = clocked("reading", CheckpointReader.read)  # type: ignore[method-assign]


class TimedExtension(RollfleetWorkerExtension):
    """The product's, and what was spent."""

    def rollfleet_report(self) -> dict[str, Any]:
        """As the product's."""
        return super().rollfleet_report() | {"spent": dict(spent)}

    def rollfleet_reset(self) -> dict[str, Any]:
        """As the product's; the clocks begin anew."""
        spent.update(dict.fromkeys(spent, 0.0))
        return super().rollfleet_reset()
