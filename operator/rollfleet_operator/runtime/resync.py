"""Every few minutes: read all by list, repair the store, and look at every fleet once.

In between, and far more often, a glance at the metadata alone: whether the watches tell what is there. A watch that
does not is started anew, and everything is read at once.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from rollfleet_operator.api.meta import LABEL_ENGINE, LABEL_FLEET
from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.ending import end_if_asked
from rollfleet_operator.clients.errors import Busy, RollfleetError, Unreachable
from rollfleet_operator.ports import CHILDREN, LEASES, PODS, ROLLOUT_ENGINES, WEIGHT_VERSIONS, Cluster, Manifest
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.store import key_of
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_operator.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

JITTER = 0.2  # of the period, either way
RETRY_S = 5.0
GLANCE_S = 30.0  # between glances
TICK_S = 5.0
NAMESPACES_AT_ONCE = 8
GLANCED = ((ROLLOUT_ENGINES, ""), (WEIGHT_VERSIONS, ""), (PODS, LABEL_FLEET))


@dataclass(frozen=True)
class Resync:
    """Lists of one or all namespaces."""

    cluster: Cluster
    records: Records
    certificates: Certificates
    watchdog: Watchdog
    uptime: Uptime
    namespaces: tuple[str | None, ...]  # (None,) for all
    period_s: float
    on_deaf: Callable[[str], None]  # a watch does not tell what lists show

    async def run(self) -> None:
        """Until cancelled. The caller has done the first one."""
        loop = asyncio.get_running_loop()
        whole = loop.time() + self._period()
        glance = loop.time() + GLANCE_S
        while True:
            end_if_asked()
            await asyncio.sleep(min(TICK_S, self.period_s) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            deaf = self.watchdog.ledger.overdue()
            if deaf:
                self.on_deaf(deaf)
            if loop.time() >= whole or (deaf and loop.time() >= glance):
                await self.until_done()
                whole, glance = loop.time() + self._period(), loop.time() + GLANCE_S
            elif loop.time() >= glance:
                await self._glance()
                glance = loop.time() + GLANCE_S

    async def until_done(self) -> None:
        """One resync, tried until the API server answers; the watchdog bounds how long that may take."""
        while True:
            try:
                await self.once()
            except RollfleetError as error:
                end_if_asked()
                self._failed("resync", error)
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            else:
                self.watchdog.listed()
                return

    async def once(self) -> None:
        """Read all, repair, and put every fleet into the queue."""
        slots = asyncio.Semaphore(NAMESPACES_AT_ONCE)

        async def one(namespace: str | None) -> set[str]:
            async with slots:
                found = await self._pods(namespace) | await self._objects(namespace)
                await self._children(namespace)
                return found

        keys: set[str] = set().union(*await asyncio.gather(*(one(namespace) for namespace in self.namespaces)))
        gone = self.records.fleets.keys() - keys
        self.certificates.recheck(self.records.fleets.uids())
        for key in sorted(keys | gone):
            self.records.queue.put(key)

    async def _glance(self) -> None:
        """What lists show, for the ledger. One that fails costs nothing: the next is near."""
        try:
            for namespace in self.namespaces:
                for resource, selector in GLANCED:
                    listing = await self.cluster.list_metadata(resource, namespace, selector)
                    self.records.ledger.listed(resource, namespace, listing.items)
        except RollfleetError as error:
            self._failed("glance", error)

    def _failed(self, what: str, error: RollfleetError) -> None:
        logger.warning("%s failed: %s", what, error)
        if isinstance(error, Unreachable | Busy):
            self.uptime.lost()
            self.watchdog.listed()

    def _period(self) -> float:
        return self.period_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - jitter

    async def _pods(self, namespace: str | None) -> set[str]:
        before = self.records.pods.snapshot(namespace)
        listing = await self.cluster.list(PODS, namespace, LABEL_FLEET)
        strays = await self.cluster.list(
            PODS, namespace, f"{LABEL_ENGINE},!{LABEL_FLEET}"
        )  # somebody took the label off
        changed, untold = self.records.pods.reconcile_list(before, (*listing.items, *strays.items))
        self.records.ledger.listed(PODS, namespace, listing.items)
        if untold and before:
            logger.info("resync found %d pods that no watch had told of", len(untold))
        return changed | self.records.pods.keys()

    async def _objects(self, namespace: str | None) -> set[str]:
        fleets = await self.cluster.list(ROLLOUT_ENGINES, namespace)
        versions = await self.cluster.list(WEIGHT_VERSIONS, namespace)
        self.records.ledger.listed(ROLLOUT_ENGINES, namespace, fleets.items)
        self.records.ledger.listed(WEIGHT_VERSIONS, namespace, versions.items)
        return {_own_key(item) for item in fleets.items} | {_ref_key(item) for item in versions.items}

    async def _children(self, namespace: str | None) -> None:
        for resource in CHILDREN:
            listing = await self.cluster.list(resource, namespace, LABEL_FLEET)
            self.records.ledger.listed(resource, namespace, listing.items)
            for lease in listing.items if resource is LEASES else ():
                self.records.senders.told(lease)
            for key in sorted(self.records.children.reconcile_list(namespace, resource.kind, listing.items)):
                logger.info("a %s of %s is gone or differs from what was applied", resource.kind, key)
                self.records.queue.put(key)


def _own_key(manifest: Manifest) -> str:
    return key_of(manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def _ref_key(manifest: Manifest) -> str:
    return key_of(manifest["metadata"]["namespace"], manifest["spec"]["engineRef"]["name"])
