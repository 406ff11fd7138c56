"""Tokens of the operator's own ServiceAccount, one audience per engine, never older than the guards allow.

An engine that was taken over can so not use at another one what it is shown. For a thousand engines that is some two
TokenRequests a second: minted ahead, beside the long polls that need them, spread by chance and few at once, so that
no command ever waits for one but the first.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rollfleet_operator.clients.errors import Unsupported
from rollfleet_operator.ports import SERVICE_ACCOUNTS, Cluster

logger = logging.getLogger(__name__)

LIFE_S = 900  # asked for; guards take no token that is older
RENEW_FROM, RENEW_AT = 1 / 2, 2 / 3  # of a token's life: somewhere between, or a fleet's tokens were all due together
MINTED_AT_ONCE = 16
MAX_AUDIENCES = 10_000
DISCARD_AFTER_S = 10  # at least between tokens of one audience


@dataclass(frozen=True)
class _Token:
    text: str = field(repr=False)
    asked: datetime
    renew: datetime
    expires: datetime


class Tokens:
    """Bearer tokens by audience: minted on first use, renewed beside the callers at two thirds of their life."""

    def __init__(self, cluster: Cluster, namespace: str, service_account: str, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._service_account = service_account
        self._clock = clock
        self._held: dict[str, _Token] = {}
        self._minting: dict[str, asyncio.Task[_Token]] = {}
        self._slots = asyncio.Semaphore(MINTED_AT_ONCE)

    async def bearer(self, audience: str) -> str:
        """A valid token. Waits only where there is none."""
        held, now = self._held.get(audience), self._clock()
        if held is not None and now < held.renew:
            return held.text
        minting = self._mint_once(audience)
        if held is not None and now < held.expires:
            return held.text
        return (await asyncio.shield(minting)).text

    def discard(self, audience: str, text: str) -> None:
        """Forget a token that a guard would not take; a new one that is not taken either will not help."""
        held = self._held.get(audience)
        if held is not None and held.text == text and self._clock() - held.asked >= timedelta(seconds=DISCARD_AFTER_S):
            del self._held[audience]

    async def close(self) -> None:
        """Stop what is being minted."""
        for task in self._minting.values():
            task.cancel()
        await asyncio.gather(*self._minting.values(), return_exceptions=True)

    def _mint_once(self, audience: str) -> "asyncio.Task[_Token]":
        task = self._minting.get(audience)
        if task is None:
            task = asyncio.create_task(self._mint(audience), name=f"token for {audience}")
            self._minting[audience] = task
            task.add_done_callback(lambda done: self._minted(audience, done))
        return task

    def _minted(self, audience: str, task: "asyncio.Task[_Token]") -> None:
        del self._minting[audience]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("no new token for %s: %s", audience, error)

    async def _mint(self, audience: str) -> _Token:
        async with self._slots:
            asked = self._clock()
            token = await self._request(audience, asked)
        self._forget_expired()
        if len(self._held) >= MAX_AUDIENCES:
            self._held.pop(next(iter(self._held)))
        self._held.pop(audience, None)
        self._held[audience] = token  # the newest last, so that the first ones are those that expire first
        return token

    def _forget_expired(self) -> None:
        """Of engines that are gone."""
        now = self._clock()
        while self._held and self._held[next(iter(self._held))].expires <= now:
            del self._held[next(iter(self._held))]

    async def _request(self, audience: str, asked: datetime) -> _Token:
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": LIFE_S},
        }
        answer = await self._cluster.create(
            SERVICE_ACCOUNTS, self._namespace, request, subresource=(self._service_account, "token")
        )
        try:
            text, until = answer["status"]["token"], datetime.fromisoformat(answer["status"]["expirationTimestamp"])
        except (KeyError, TypeError, ValueError) as error:
            raise Unsupported(
                f"TokenRequest for {audience}: the answer has no token ({type(error).__name__})"
            ) from error
        # An API server may extend the life; guards look at the age, so the shorter of the two counts.
        expires = min(until, asked + timedelta(seconds=LIFE_S))
        share = random.uniform(RENEW_FROM, RENEW_AT)  # noqa: S311 - jitter
        return _Token(text, asked, asked + (expires - asked) * share, expires)
