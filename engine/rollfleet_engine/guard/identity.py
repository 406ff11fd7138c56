"""Who calls: Kubernetes ServiceAccount tokens, verified offline against the API server's published keys."""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import jwt
from jwt.exceptions import PyJWTError

from rollfleet_protocol.engine_config import FleetIdentity, TokenVerification

ALGORITHMS = ("RS256", "ES256")  # what API servers sign with; never "none", never a shared secret
OLDEST_TOKEN_S = 15 * 60
LEEWAY_S = 10  # clocks of nodes differ
LONGEST_TOKEN = 16 * 1024  # characters
FETCH_TIMEOUT_S = 5.0
REFETCH_EVERY_S = 10.0  # for a key that is not known: rotation, or somebody's invention
LARGEST_KEY_SET = 1 << 20  # bytes


@dataclass(frozen=True)
class Caller:
    """A verified identity."""

    subject: str  # system:serviceaccount:<namespace>:<name>
    uid: str  # of the ServiceAccount: one made anew under the same name is somebody else


class IdentityError(Exception):
    """The token proves nothing; the message says why, never the token."""


class Verifier(Protocol):
    """Turns a bearer token into a caller."""

    async def verify(self, token: str) -> Caller:
        """Raises IdentityError."""
        ...


@dataclass(frozen=True)
class KeySet:
    """What the API server publishes."""

    issuer: str
    keys: dict[str, jwt.PyJWK]  # by kid


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
                    return KeySet(issuer, _keys(await _get_json(client, "/openid/v1/jwks")))
        except TimeoutError as error:
            raise IdentityError(f"the API server gave no keys within {FETCH_TIMEOUT_S:g} s") from error
        except (OSError, httpx.HTTPError, ssl.SSLError) as error:
            raise IdentityError(f"the API server gave no keys: {type(error).__name__}: {error}") from error

    def _read_files(self) -> tuple[str, ssl.SSLContext]:
        token = Path(self._tokens.token_file).read_text(encoding="ascii").strip()
        return token, ssl.create_default_context(cafile=self._tokens.ca_file)


async def _get_json(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    if answer.status_code != 200:
        raise IdentityError(f"the API server answered {answer.status_code} to GET {path}: {answer.text[:200]}")
    if len(answer.content) > LARGEST_KEY_SET:
        raise IdentityError(f"the API server's answer to GET {path} is over {LARGEST_KEY_SET} bytes")
    try:
        return answer.json()
    except ValueError as error:
        raise IdentityError(f"the API server's answer to GET {path} is not JSON: {error}") from error


async def _issuer(client: httpx.AsyncClient) -> str:
    document = await _get_json(client, "/.well-known/openid-configuration")
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


class KeyRing:
    """Cached keys. Survives an API server that is away; asks again for an unknown key, but not for each one."""

    def __init__(self, source: KeySource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._known: KeySet | None = None
        self._error: IdentityError | None = None
        self._next_fetch = float("-inf")
        self._fetching = asyncio.Lock()

    async def find(self, kid: str) -> tuple[str, jwt.PyJWK]:
        """Issuer and key. Raises IdentityError."""
        if self._known is None or kid not in self._known.keys:
            await self._refetch(kid)
        if self._known is None:
            raise IdentityError(f"no token can be verified yet: {self._error}")
        key = self._known.keys.get(kid)
        if key is None:
            why = "" if self._error is None else f" ({self._error})"
            raise IdentityError(f"the token was signed with a key that the API server does not publish{why}")
        return self._known.issuer, key

    async def _refetch(self, kid: str) -> None:
        async with self._fetching:  # whoever waited here finds the answer of who came first
            if self._known is not None and kid in self._known.keys:
                return
            if self._clock() < self._next_fetch:
                return
            self._next_fetch = self._clock() + REFETCH_EVERY_S
            try:
                self._known = await self._source.fetch()
                self._error = None
            except IdentityError as error:
                self._error = error


class ServiceAccountVerifier:
    """Verifies the tokens of one fleet's audience."""

    def __init__(self, fleet: FleetIdentity, tokens: TokenVerification, keys: KeyRing | None = None) -> None:
        self._audience = fleet.audience
        self._keys = keys or KeyRing(ApiServerKeys(tokens))

    async def verify(self, token: str) -> Caller:
        """As Verifier says; about 0.1 ms once the key is known."""
        if len(token) > LONGEST_TOKEN:
            raise IdentityError(f"the token is longer than {LONGEST_TOKEN} characters")
        kid, algorithm = _read_header(token)
        issuer, key = await self._keys.find(kid)
        if key.algorithm_name != algorithm:
            raise IdentityError(f"the token says {algorithm}, its key is for {key.algorithm_name}")
        return _caller(self._claims(token, key, issuer))

    def _claims(self, token: str, key: jwt.PyJWK, issuer: str) -> dict[str, Any]:
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._audience,
                issuer=issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iat", "nbf", "iss", "aud", "sub"]},
            )
        except PyJWTError as error:
            raise IdentityError(f"the token is refused: {error}") from error
        age_s = time.time() - float(claims["iat"])
        if age_s > OLDEST_TOKEN_S + LEEWAY_S:
            raise IdentityError(f"the token is {age_s:.0f} s old, at most {OLDEST_TOKEN_S} s are taken: get a new one")
        return claims


def _read_header(token: str) -> tuple[str, str]:
    try:
        header = jwt.get_unverified_header(token)
    except PyJWTError as error:
        raise IdentityError(f"not a token: {error}") from error
    kid, algorithm = header.get("kid"), header.get("alg")
    if not isinstance(kid, str) or algorithm not in ALGORITHMS:
        raise IdentityError(f"the token must name its key and be signed by {' or '.join(ALGORITHMS)}")
    return kid, str(algorithm)


def _caller(claims: dict[str, Any]) -> Caller:
    account = claims.get("kubernetes.io")
    account = account.get("serviceaccount") if isinstance(account, dict) else None
    uid = account.get("uid") if isinstance(account, dict) else None
    if not isinstance(uid, str) or not uid:
        raise IdentityError("the token is not a ServiceAccount's: it has no kubernetes.io.serviceaccount.uid")
    return Caller(str(claims["sub"]), uid)
