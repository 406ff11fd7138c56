"""Keeps the sender's Lease: taken, renewed beside whatever the trainer does, offered with, and given back.

It runs in the loop of the SDK's own thread. A training step that holds Python's interpreter lock for longer than the
renew deadline loses the Lease, as it should: nobody could tell it from one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from rollfleet_protocol.senders import account_of, sender_lease
from rollfleet_protocol.words import fitted
from rollfleet_trainer.apiserver import LEASES_API, ApiServer, Manifest, path_of
from rollfleet_trainer.errors import (
    AnotherSender,
    ApiServerError,
    ConflictError,
    DeniedError,
    NotFoundError,
    NotPossible,
    SenderLost,
    UnreachableError,
)
from rollfleet_trainer.leases import DURATION_S, PERIOD_SHARE, RENEW_SHARE, LeaseRecord, Rival, holding, releasing

logger = logging.getLogger("rollfleet.trainer")

CALL_SHARE = 1 / 5  # of the duration: one request; several fit into the renew deadline
RETRY_S = 0.5
LOOK_S = 1.0  # between looks at another's Lease
RELEASE_S = 2.0
MISSING_S = 10.0  # how long a Lease that is not there is waited for: the operator makes it with the fleet
JITTER = 0.2
LONGEST_HOLDER = 200  # characters in a message


class Keeper:
    """One process's hold on one fleet's Lease. Methods run in one event loop; `holds` may be asked from any thread."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        fleet: str,
        holder: str,
        duration_s: int = DURATION_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holder = holder
        self.name = sender_lease(fleet)
        self._api = api
        self._path = path_of(LEASES_API, namespace, "leases", self.name)
        self._place = f"{namespace}/{fleet}"
        self._duration_s = duration_s
        self._monotonic = monotonic
        self._lease = LeaseRecord()
        self._offers = self._message = ""
        self._holds_until = 0.0
        self._lost = ""
        self._is_unsure = False  # whether a write that had no answer has taken it
        self._writing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    def holds(self) -> bool:
        """Whether nobody else can hold the Lease by now."""
        return self._monotonic() < self._holds_until

    def why_lost(self) -> str:
        """For messages, while it does not hold."""
        return self._lost or f"Lease {self.name} was not renewed for {self._duration_s * RENEW_SHARE:g} s"

    async def take(self, wait_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Until the Lease is ours. AnotherSender where another process has renewed it, and still does after `wait_s`.

        One whose holder does not renew is taken over once its duration has passed. check: raises where nobody wants it
        any more.
        """
        if self._renewing is not None and not self._renewing.done() and self.holds():
            return
        await self._stop_renewing()
        rival, began = Rival(self.holder), self._monotonic()
        self._offers = self._message = ""
        while True:
            check()
            free_in_s = await self._look(rival, began)
            if free_in_s <= 0 and await self._write():
                break
            if rival.lives and self._monotonic() - began >= wait_s:
                raise AnotherSender(
                    f"{self._place}: {self._rival!r} holds Lease {self.name} and renews it: end that trainer, "
                    f"or wait for it (wait_s; {wait_s:g} s have passed)",
                    self._rival,
                )
            await asyncio.sleep(min(max(free_in_s, RETRY_S), LOOK_S))
        self._lost = ""
        self._renewing = asyncio.create_task(self._renew(), name=f"renewal of {self.name}")

    @property
    def _rival(self) -> str:
        """Who holds the Lease, for messages: it is whatever somebody wrote there."""
        return fitted(self._lease.holder, LONGEST_HOLDER)

    async def _look(self, rival: Rival, began: float) -> float:
        """Read the Lease; seconds until it may be taken."""
        try:
            self._lease = LeaseRecord.of(await self._within(self._api.get(self._path)))
        except NotFoundError as error:
            if self._monotonic() - began < MISSING_S:
                return MISSING_S
            account = account_of(self.holder)
            raise NotPossible(
                f"{self._place} has no Lease {self.name}: the operator makes it for fleets that name trainers; add "
                f"serviceAccountName {account!r} to spec.trainers of the RolloutEngine"
            ) from error
        return rival.saw(self._lease, self._monotonic())

    async def offer(self, offers: str, message: str = "") -> None:
        """Stand ready to send this; empty: for nothing, and why. SenderLost where the Lease is not ours any more."""
        self._offers, self._message = offers, message
        await self._write_now()

    async def release(self, message: str = "") -> None:
        """Give the Lease back, so that the next one need not wait. Does not raise: at worst others wait for its end.

        message: for the operator; else why the last version was offered no more.
        """
        await self._stop_renewing()
        still_ours, self._holds_until = self.holds(), 0.0
        self._offers = ""
        if not still_ours and not self._is_unsure:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._give_back(message or self._message)
        except (ApiServerError, TimeoutError) as error:
            logger.warning("Lease %s was not given back, others wait for its end: %s", self.name, error)

    async def _give_back(self, message: str) -> None:
        if self._is_unsure:  # of a write that was cancelled the answer got lost, perhaps not the request
            await self._read_again()
        while self._lease.holder == self.holder:
            try:
                await self._api.patch(self._path, releasing(self._lease, datetime.now(UTC), message))
            except ConflictError:  # it has come just now
                await self._read_again()
            else:
                return

    async def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
            self._renewing = None

    async def _renew(self) -> None:
        """Until the Lease is lost. It is lost in time, whatever becomes of the requests."""
        while True:
            pause_s = self._duration_s * PERIOD_SHARE * random.uniform(1 - JITTER, 1.0)  # noqa: S311 - jitter
            try:
                async with asyncio.timeout(max(0.0, self._holds_until - self._monotonic())):
                    await asyncio.sleep(pause_s)
                    await self._write_now()
            except TimeoutError:
                self._lose(f"Lease {self.name} was not renewed for {self._duration_s * RENEW_SHARE:g} s")
                return
            except SenderLost:
                return

    async def _write_now(self) -> None:
        """Until one write succeeds, within the time that we hold; SenderLost where the Lease is another's."""
        while self.holds():
            try:
                if await self._write():
                    return
                await self._read_again()
            except UnreachableError as error:
                logger.warning("Lease %s was not renewed: %s", self.name, error)
            except ApiServerError as error:  # refused, or gone
                self._lose(f"Lease {self.name}: {error}")
                break
            if self._lease.holder != self.holder:
                self._lose(f"{self._rival or 'nobody'!r} holds Lease {self.name} now")
                break
            await asyncio.sleep(RETRY_S)
        raise SenderLost(f"{self._place}: {self.why_lost()}: this process sends no more; start the update anew")

    async def _read_again(self) -> None:
        self._lease = LeaseRecord.of(await self._within(self._api.get(self._path)))

    def _lose(self, why: str) -> None:
        self._lost, self._holds_until = why, 0.0
        logger.warning("%s: %s", self._place, why)

    async def _write(self) -> bool:
        """Take or renew it over exactly what was read; False where somebody else wrote first."""
        async with self._writing:
            began_s = self._monotonic()
            patch = holding(self._lease, self.holder, self._duration_s, datetime.now(UTC), self._offers, self._message)
            was_unsure, self._is_unsure = self._is_unsure, True
            try:
                self._lease = LeaseRecord.of(await self._within(self._api.patch(self._path, patch)))
            except ConflictError:
                return False
            except (DeniedError, NotFoundError):
                self._is_unsure = was_unsure
                raise
            self._is_unsure = False
            self._holds_until = began_s + self._duration_s * RENEW_SHARE
            return True

    async def _within(self, call: Coroutine[Any, Any, Manifest]) -> Manifest:
        """One request. The client's own deadline is far longer than a Lease lasts."""
        seconds = self._duration_s * CALL_SHARE
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError as error:
            raise UnreachableError(f"no answer of the API server within {seconds:g} s") from error
