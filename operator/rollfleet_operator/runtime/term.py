"""What a leader does, and how all of it ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollfleet_operator.runtime.reconcile import Reconciler
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.resync import Resync
from rollfleet_operator.runtime.uptime import Uptime

WORKERS = 32  # passes at once, of as many fleets; most of a pass is waiting


@dataclass(frozen=True)
class Term:
    """Passes over fleets, from lists that were read in this term."""

    records: Records
    resync: Resync
    uptime: Uptime
    make_reconciler: Callable[[], Reconciler]

    async def lead(self) -> None:
        """Until cancelled; then no pass, no call to a guard and no follower is left."""
        workers: list[asyncio.Task[None]] = []
        try:
            self.records.queue.start()
            await self.resync.until_done()  # no decision before all pods are known, whatever the watches missed
            reconciler = self.make_reconciler()
            workers += [asyncio.create_task(reconciler.work(), name=f"worker {n}") for n in range(WORKERS)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
            await self.records.stand_down()
            self.uptime.ended()  # deadlines count from when somebody acts again
        for result in ended:
            if isinstance(result, Exception):
                raise result
