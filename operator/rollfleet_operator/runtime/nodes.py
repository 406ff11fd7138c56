"""Nodes, read one by one and only where their word may fence an engine: no watch, no list, no right to either."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollfleet_operator.clients.errors import NotFound, RollfleetError
from rollfleet_operator.clients.podviews import node_view
from rollfleet_operator.core.observed import NodeView
from rollfleet_operator.ports import NODES, Cluster

logger = logging.getLogger(__name__)

FRESH_S = 5.0  # that an answer is used for
MAX_READS = 16  # at once


@dataclass(frozen=True)
class _Known:
    view: NodeView
    read: float


class Nodes:
    """What nodes say, at most FRESH_S old."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def look(self, names: Iterable[str]) -> dict[str, NodeView]:
        """Views by name. One that can't be read now is left out: nothing is fenced on the strength of it."""
        now = self._clock()
        self._known = {name: known for name, known in self._known.items() if now - known.read < FRESH_S}
        wanted, slots = sorted(set(names)), asyncio.Semaphore(MAX_READS)

        async def one(name: str) -> None:
            async with slots:
                view = await self._read(name)
            if view is not None:
                self._known[name] = _Known(view, now)

        await asyncio.gather(*(one(name) for name in wanted if name not in self._known))
        return {name: self._known[name].view for name in wanted if name in self._known}

    async def _read(self, name: str) -> NodeView | None:
        try:
            return node_view(await self._cluster.get(NODES, None, name))
        except NotFound:
            return NodeView(name, exists=False)
        except RollfleetError as error:
            logger.warning("node %s: %s", name, error)
            return None
