"""Waiting for another pod in place of one that was deleted."""

from __future__ import annotations

from examples.demo.fleet import Fleet
from tests.support.waiting import until

REPLACED_S = 120.0


async def replaced(fleet: Fleet, uid: str, replicas: int) -> None:
    """Until the pod of this uid is gone and as many are there as before; it may all happen between two looks."""

    async def is_there() -> bool:
        uids = {pod["metadata"]["uid"] for pod in await fleet.pods()}
        return uid not in uids and len(uids) == replicas

    await until(is_there, REPLACED_S)
