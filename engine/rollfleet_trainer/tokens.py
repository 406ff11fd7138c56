"""Tokens of the trainer's ServiceAccount, one audience per engine: what one is shown is worthless at all others.

They live as long as guards take them, 15 minutes, and are asked for from the threads that call engines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollfleet_trainer.apiserver import ApiServer, path_of
from rollfleet_trainer.background import Background
from rollfleet_trainer.errors import ApiServerError, NotPossible

LIFE_S = 900  # asked for; guards take no token that is older
RENEW_S = 450  # a token that is older is not shown any more: a call may wait at the guard for a while
AT_ONCE = 16


@dataclass(frozen=True)
class _Token:
    text: str = field(repr=False)
    until_s: float


class Tokens:
    """Bearer tokens by audience."""

    def __init__(
        self,
        api: ApiServer,
        background: Background,
        account: tuple[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._background = background
        self._path = path_of("/api/v1", account[0], "serviceaccounts", account[1], "token")
        self._clock = clock
        self._held: dict[str, _Token] = {}
        self._lock = threading.Lock()
        self._slots = asyncio.Semaphore(AT_ONCE)

    def bearer(self, audience: str) -> str:
        """A token that is good for a while; from any thread but the loop's own."""
        if (text := self._good(audience)) is not None:
            return text
        return self._background.run(self._minted(audience))

    async def prepare(self, audiences: Iterable[str]) -> None:
        """Have tokens for all of these, and forget those of others."""
        wanted = frozenset(audiences)
        with self._lock:
            self._held = {audience: token for audience, token in self._held.items() if audience in wanted}
        missing = [audience for audience in wanted if self._good(audience) is None]
        await asyncio.gather(*(self._minted(audience) for audience in missing))

    async def require_right(self, audience: str) -> None:
        """Raise now what engines' tokens would meet. `audience`: one that no engine has; its token is thrown away."""
        await self._minted(audience)
        with self._lock:
            self._held.pop(audience, None)

    def forget(self) -> None:
        """Make new ones from now on."""
        with self._lock:
            self._held = {}

    def _good(self, audience: str) -> str | None:
        with self._lock:
            held = self._held.get(audience)
        return held.text if held is not None and self._clock() < held.until_s else None

    async def _minted(self, audience: str) -> str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": LIFE_S},
        }
        async with self._slots:
            asked = self._clock()
            answer = await self._api.create(self._path, body)
        try:
            text = str(answer["status"]["token"])
        except (KeyError, TypeError) as error:
            raise ApiServerError(f"TokenRequest for {audience}: the answer has no token") from error
        with self._lock:
            self._held[audience] = _Token(text, asked + RENEW_S)
        return text


SERVICE_ACCOUNT = "system:serviceaccount:"


async def account_of_caller(api: ApiServer, namespace: str, trainers: tuple[str, ...]) -> str:
    """The ServiceAccount to send as: our own, where we are one of the fleet's namespace, else the fleet's only trainer.

    NotPossible where that is not clear.
    """
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = await api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    username = str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")
    return chosen_account(username, namespace, trainers)


def chosen_account(username: str, namespace: str, trainers: tuple[str, ...]) -> str:
    """See account_of_caller."""
    own = username.removeprefix(f"{SERVICE_ACCOUNT}{namespace}:")
    if own != username and own in trainers:
        return own
    if own == username and len(trainers) == 1:
        return trainers[0]
    named = ", ".join(trainers)
    raise NotPossible(
        f"{username or 'this caller'} is none of the fleet's spec.trainers ({named}): add it there, or say as whom to "
        "send by service_account"
    )
