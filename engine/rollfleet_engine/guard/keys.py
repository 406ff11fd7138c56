"""The API server's published keys: fetched with the pod's own token, cached, and fetched anew before they are old.

A key that was withdrawn is refused after REFRESH_S and a half at the latest where the guard is called meanwhile and
after STALE_S where it is not, as long as the API server answers; while it does not, after OLDEST_KEYS_S. No token lives
that long without the API server, so that limit locks nobody out who could show one.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

import httpx
import jwt
from jwt.exceptions import PyJWTError

from rollfleet_protocol.engine_config import TokenVerification
from rollfleet_protocol.words import fitted

ALGORITHMS = ("RS256", "ES256")  # what API servers sign with; never "none", never a shared secret
FETCH_TIMEOUT_S = 5.0
REFETCH_EVERY_S = 10.0  # at most: for a key that is not known (rotation, or somebody's invention), and after failures
REFRESH_S = 300.0  # up to half more of it by chance, so that a thousand engines do not ask together
STALE_S = 600.0
OLDEST_KEYS_S = 3600.0
LARGEST_KEY_SET = 1 << 20  # bytes
LONGEST_CAUSE = 500  # characters


class IdentityError(Exception):
    """The token proves nothing; the message says why, never the token.

    What it quotes is a stranger's, by way of whoever read it: bounded, and fit to be shown and sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(fitted(message, LONGEST_CAUSE))


@dataclass(frozen=True)
class KeySet:
    """What the API server publishes."""

    issuer: str
    keys: dict[str, jwt.PyJWK]  # by kid
    clock_ahead_s: float = 0.0  # this machine's clock before the API server's; 0 where that does not tell the time


class KeySource(Protocol):
    """Where keys come from."""

    async def fetch(self) -> KeySet:
        """Raises IdentityError."""
        ...


class ApiServerKeys:
    """Issuer and keys from the API server, with the pod's own token."""

    def __init__(self, tokens: TokenVerification, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._tokens = tokens
        self._transport = transport

    async def fetch(self) -> KeySet:
        """One attempt; files are read again each time, since the kubelet renews them."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                token, context = await asyncio.to_thread(self._read_files)
                async with httpx.AsyncClient(
                    base_url=self._tokens.api_server,
                    headers={"Authorization": f"Bearer {token}"},
                    verify=context,
                    transport=self._transport,
                    timeout=FETCH_TIMEOUT_S,
                    trust_env=False,
                ) as client:
                    issuer = self._tokens.issuer or await _issuer(client)
                    asked = time.time()
                    document, date = await _get_json(client, "/openid/v1/jwks")
                    return KeySet(issuer, _keys(document), _ahead_s(asked, time.time(), date))
        except TimeoutError as error:
            raise IdentityError(f"the API server gave no keys within {FETCH_TIMEOUT_S:g} s") from error
        except (OSError, httpx.HTTPError, ssl.SSLError) as error:
            raise IdentityError(f"the API server gave no keys: {type(error).__name__}: {error}") from error

    def _read_files(self) -> tuple[str, ssl.SSLContext]:
        token = Path(self._tokens.token_file).read_text(encoding="ascii").strip()
        return token, ssl.create_default_context(cafile=self._tokens.ca_file)


async def _get_json(client: httpx.AsyncClient, path: str) -> tuple[Any, str]:
    """The document, and the answer's Date."""
    answer = await client.get(path)
    if answer.status_code != 200:
        raise IdentityError(f"the API server answered {answer.status_code} to GET {path}: {answer.text[:200]}")
    if len(answer.content) > LARGEST_KEY_SET:
        raise IdentityError(f"the API server's answer to GET {path} is over {LARGEST_KEY_SET} bytes")
    try:
        return answer.json(), answer.headers.get("date", "")
    except ValueError as error:
        raise IdentityError(f"the API server's answer to GET {path} is not JSON: {error}") from error


async def _issuer(client: httpx.AsyncClient) -> str:
    document, _ = await _get_json(client, "/.well-known/openid-configuration")
    issuer = document.get("issuer") if isinstance(document, dict) else None
    if not isinstance(issuer, str) or not issuer:
        raise IdentityError("the API server's discovery document names no issuer")
    return issuer


def _keys(document: Any) -> dict[str, jwt.PyJWK]:
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise IdentityError("the API server's key set has no list of keys")
    keys: dict[str, jwt.PyJWK] = {}
    for entry in entries:
        try:
            key = jwt.PyJWK.from_dict(entry)
        except PyJWTError:
            continue  # a kind of key that is not used here
        if key.key_id and key.algorithm_name in ALGORITHMS:
            keys[key.key_id] = key
    if not keys:
        raise IdentityError(f"the API server's key set has no key for {' or '.join(ALGORITHMS)}")
    return keys


def _ahead_s(asked: float, answered: float, date: str) -> float:
    """Of whole seconds, which a Date is cut to: right within a second and half the way there and back."""
    try:
        told = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0
    return (asked + answered) / 2 - (told + 0.5)


class KeyRing:
    """Cached keys. Survives an API server that is away; asks again for an unknown key, but not for each one."""

    def __init__(self, source: KeySource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._known: KeySet | None = None
        self._fetched = float("-inf")
        self._refresh_at = float("-inf")
        self._error: IdentityError | None = None  # of the newest fetch
        self._next_fetch = float("-inf")
        self._fetching = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def find(self, kid: str) -> tuple[str, jwt.PyJWK]:
        """Issuer and key. Raises IdentityError."""
        if self._is_missing(kid) or (self._is_stale() and self._error is None):
            await self._refetch(lambda: self._is_missing(kid) or self._is_stale())
        elif self._clock() >= self._refresh_at:  # beside the caller, who need not wait for an API server that is away
            self._refresh()
        if self._known is None:
            raise IdentityError(f"no token can be verified yet: {self._error}")
        age_s = self._clock() - self._fetched
        if age_s > OLDEST_KEYS_S:
            raise IdentityError(
                f"the API server's keys were read {age_s:.0f} s ago, and are trusted for {OLDEST_KEYS_S:.0f} s: "
                f"{self._error or 'they are being read again'}"
            )
        key = self._known.keys.get(kid)
        if key is None:
            why = "" if self._error is None else f" ({self._error})"
            raise IdentityError(f"the token was signed with a key that the API server does not publish{why}")
        return self._known.issuer, key

    def clock_ahead_s(self) -> float:
        """How far this machine's clock was before the API server's when keys were fetched last."""
        return 0.0 if self._known is None else self._known.clock_ahead_s

    async def close(self) -> None:
        """End what is being fetched."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    def _is_missing(self, kid: str) -> bool:
        return self._known is None or kid not in self._known.keys

    def _is_stale(self) -> bool:
        return self._clock() - self._fetched > STALE_S

    def _refresh(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            is_due = self._refetch(lambda: self._clock() >= self._refresh_at)
            self._refreshing = asyncio.create_task(is_due, name="rollfleet-keys")

    async def _refetch(self, is_needed: Callable[[], bool]) -> None:
        async with self._fetching:  # whoever waited here finds the answer of who came first
            if not is_needed() or self._clock() < self._next_fetch:
                return
            self._next_fetch = self._clock() + REFETCH_EVERY_S
            try:
                self._known = await self._source.fetch()
            except IdentityError as error:
                self._error = error
                return
            self._error = None
            self._fetched = self._clock()
            self._refresh_at = self._fetched + REFRESH_S * random.uniform(1.0, 1.5)  # noqa: S311 - jitter
