"""Who of several operators acts. One term after the other, each ended before another process may begin its own."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Protocol, TypeVar

from rollfleet_operator.clients.errors import AlreadyExists, Conflict, NotFound, RollfleetError, Unreachable
from rollfleet_operator.core.leases import (
    PERIOD_S,
    RENEW_DEADLINE_S,
    LeaseRecord,
    Rival,
    held_by,
    released,
)
from rollfleet_operator.ports import LEASES, Cluster, Manifest

logger = logging.getLogger(__name__)

CALL_S = 2.0  # of one request; several fit into the renew deadline
RETRY_S = 0.5  # after a renewal that failed
RELEASE_S = 2.0
JITTER = 0.2  # of the period: those who wait must not ask in step
T = TypeVar("T")
Lead = Callable[[], Coroutine[Any, Any, None]]


class Leadership(Protocol):
    """What the process needs of it."""

    def leads(self) -> bool:
        """Whether this process may act, right now."""
        ...

    async def run(self, lead: Lead) -> None:
        """Lead whenever it may, until cancelled."""
        ...


class Alone:
    """No Lease: whoever starts the process vouches that it is the only one."""

    def leads(self) -> bool:
        """Always."""
        return True

    async def run(self, lead: Lead) -> None:
        """One term."""
        await lead()


class Election:
    """A candidate for one Lease."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._monotonic = monotonic
        self._rival = Rival()
        self._lease: Manifest | None = None  # as it was read or written last
        self._is_unsure = False  # whether a write that had no answer has taken it
        self._leads_until = 0.0

    def leads(self) -> bool:
        """Whether nobody else can hold the Lease by now."""
        return self._monotonic() < self._leads_until

    async def run(self, lead: Lead) -> None:
        """Wait, lead, lose, wait again. Cancelled, it ends its term and gives the Lease back."""
        try:
            while True:
                await self._take()
                logger.info("leading", extra={"fields": {"lease": self._name, "identity": self._identity}})
                await self._term(lead)
        finally:
            await self._release()

    async def _term(self, lead: Lead) -> None:
        """One term: `lead` runs until the Lease is lost, and has ended when this returns."""
        leading = asyncio.create_task(lead(), name="term")
        renewing = asyncio.create_task(self._renew(), name="renewal of the lease")
        try:
            await asyncio.wait((leading, renewing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leading.cancel()
            renewing.cancel()
            ended = await asyncio.gather(leading, renewing, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):  # of `lead`: a bug; losing the Lease is none
                raise result

    async def _take(self) -> None:
        """Until the Lease is ours."""
        while True:
            wait_s = PERIOD_S * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - jitter
            try:
                free_in_s = await self._look()
                if free_in_s <= 0 and await self._write():
                    return
                wait_s = min(wait_s, max(free_in_s, RETRY_S))
            except RollfleetError as error:
                logger.warning("the lease cannot be looked at: %s", error)
            await asyncio.sleep(wait_s)

    async def _renew(self) -> None:
        """Returns once the Lease is lost. It is lost in time, whatever becomes of the requests."""
        while True:
            pause_s = PERIOD_S * random.uniform(1 - JITTER, 1.0)  # noqa: S311 - jitter
            try:
                async with asyncio.timeout(max(0.0, self._leads_until - self._monotonic())):
                    await asyncio.sleep(pause_s)
                    is_ours = await self._renew_once()
            except TimeoutError:
                logger.warning("the lease was not renewed in time: this process acts no more")
                return
            if not is_ours:
                self._leads_until = 0.0
                logger.warning("another process has taken the lease: this one acts no more")
                return

    async def _renew_once(self) -> bool:
        """Until one renewal succeeds; False where the Lease is another's."""
        while True:
            try:
                if await self._write():
                    return True
                await self._look()
                if self._held_by_another():
                    return False
            except RollfleetError as error:
                logger.warning("the lease was not renewed: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _look(self) -> float:
        """Read the Lease; seconds until it may be taken."""
        try:
            self._lease = await _within(CALL_S, self._cluster.get(LEASES, self._namespace, self._name))
        except NotFound:
            self._lease = None
            return self._rival.free_in(self._identity, self._monotonic())  # deleted: its holder may not know it yet
        self._rival.saw(LeaseRecord.of(self._lease), self._monotonic())
        return self._rival.free_in(self._identity, self._monotonic())

    async def _write(self) -> bool:
        """Take or renew it over exactly what was read; False where somebody else wrote first."""
        began_s = self._monotonic()
        before = LeaseRecord() if self._lease is None else LeaseRecord.of(self._lease)
        self._is_unsure = True
        try:
            self._lease = await _within(CALL_S, self._put(held_by(self._identity, before, self._clock())))
        except (Conflict, AlreadyExists, NotFound):
            return False
        self._is_unsure = False
        self._rival.saw(LeaseRecord.of(self._lease), self._monotonic())
        self._leads_until = began_s + RENEW_DEADLINE_S
        return True

    async def _put(self, record: LeaseRecord) -> Manifest:
        metadata: Manifest = {"name": self._name, "namespace": self._namespace}
        if self._lease is None:
            manifest = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata}
            return await self._cluster.create(LEASES, self._namespace, manifest | {"spec": record.spec()})
        precondition = {"resourceVersion": self._lease["metadata"]["resourceVersion"]}
        patch = {"metadata": precondition, "spec": record.spec()}
        return await self._cluster.merge_patch(LEASES, self._namespace, self._name, patch)

    def _held_by_another(self) -> bool:
        return self._lease is not None and LeaseRecord.of(self._lease).holder != self._identity

    async def _release(self) -> None:
        """So that the next one need not wait. Only after the term has ended."""
        still_ours, self._leads_until = self.leads(), 0.0
        if not still_ours and not self._is_unsure:
            return
        try:
            await _within(RELEASE_S, self._give_back())
        except RollfleetError as error:
            logger.warning("the lease was not given back, others wait for its end: %s", error)

    async def _give_back(self) -> None:
        if self._is_unsure:  # of a write that was cancelled the answer got lost, perhaps not the request
            await self._read_again()
        while self._lease is not None and LeaseRecord.of(self._lease).holder == self._identity:
            try:
                await self._put(released(LeaseRecord.of(self._lease), self._clock()))
            except Conflict:  # it has come just now
                await self._read_again()
            else:
                logger.info("the lease is given back")
                return

    async def _read_again(self) -> None:
        try:
            self._lease = await self._cluster.get(LEASES, self._namespace, self._name)
        except NotFound:
            self._lease = None


async def _within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """One request, or a few. The client's own deadline is far longer than a lease lasts."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise Unreachable(f"no answer of the API server within {seconds:g} s") from error
