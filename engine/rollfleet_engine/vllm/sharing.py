"""Waiting for the workers on other nodes to stage their own copies, while the engine serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rollfleet_engine.guard.ports import EngineError
from rollfleet_protocol.state import FailureReason

LOOK_S = 0.25  # each look goes through every worker's queue, between two of its steps


async def until_shared(look: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
    """Ask until all are ready. Raises EngineError with a node's own words; the deadline is the caller's."""
    while True:
        reports = await look()
        for report in reports:
            if report["failure"] is not None:
                reason, message = report["failure"]["reason"], report["failure"]["message"]
                raise EngineError(FailureReason(reason), f"node {report['node']}: {message}")
        if all(report["ready"] for report in reports):
            return
        await asyncio.sleep(LOOK_S)
