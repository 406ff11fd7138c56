"""kopf as the watches, started anew whenever it ends or goes deaf.

kopf.operator() would not do: at its end it cancels every task of the loop that is younger than itself, and it takes the
process's signals. Its root tasks do all that is wanted of it, and end with all that they have started when cancelled.
"""

import asyncio
import logging
import random
from collections.abc import Callable

import kopf

logger = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0  # of life after which the back-off begins anew
END_S = 10.0
DEAF_RETRY_S = 60.0  # between two starts because of silence


class Watches:
    """Runs until cancelled. `on_start` is called after each start, with kopf's hands on the signals."""

    def __init__(
        self,
        make_registry: Callable[[], kopf.OperatorRegistry],
        settings: Callable[[], kopf.OperatorSettings],
        namespaces: tuple[str, ...],
        on_start: Callable[[], None],
    ) -> None:
        self._make_registry = make_registry
        self._settings = settings
        self._namespaces = namespaces
        self._on_start = on_start
        self._deaf = asyncio.Event()
        self._started_anew_s = float("-inf")

    def start_anew(self, why: str) -> None:
        """They tell nothing of what lists show: end them and start others, once in DEAF_RETRY_S."""
        now = asyncio.get_running_loop().time()
        if now - self._started_anew_s >= DEAF_RETRY_S:
            self._started_anew_s = now
            logger.error("the watches are started anew: %s", why)
            self._deaf.set()

    async def run(self) -> None:
        """Watch, whatever happens to kopf."""
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            await self._once()
            failures = 1 if loop.time() - began > STEADY_S else failures + 1
            ceiling = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(failures - 1, 10))
            await asyncio.sleep(ceiling * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    async def _once(self) -> None:
        """One life of kopf's."""
        self._deaf.clear()
        settings = self._settings()
        tasks = await kopf.spawn_tasks(
            registry=self._make_registry(),
            settings=settings,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
        )
        self._on_start()
        deaf = asyncio.create_task(self._deaf.wait(), name="deafness of the watches")
        try:
            done, _ = await asyncio.wait({*tasks, deaf}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {deaf}:
                if not task.cancelled():
                    logger.error("the watches ended (%s)", task.get_name(), exc_info=task.exception())
        finally:
            for task in (*tasks, deaf):
                task.cancel()
            _, left = await asyncio.wait({*tasks, deaf}, timeout=END_S)
            if left:
                logger.error("watches that do not end: %s", sorted(task.get_name() for task in left))
            for task in {*tasks, deaf} - left:
                if not task.cancelled():
                    task.exception()  # read, so that the loop does not complain at the end
