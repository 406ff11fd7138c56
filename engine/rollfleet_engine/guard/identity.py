"""Who calls: Kubernetes ServiceAccount tokens, verified offline against the API server's published keys."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import jwt
from jwt.exceptions import PyJWTError

from rollfleet_engine.guard.keys import ALGORITHMS, ApiServerKeys, IdentityError, KeyRing
from rollfleet_protocol.engine_config import TokenVerification

OLDEST_TOKEN_S = 15 * 60
LEEWAY_S = 10  # for nbf, iat, exp and the age: clocks of nodes differ
LONGEST_TOKEN = 16 * 1024  # characters
# What reading a stranger's token raises; of releases of PyJWT, the older let more through of what is below them.
UNREADABLE = (PyJWTError, ValueError, TypeError, RecursionError)


@dataclass(frozen=True)
class Caller:
    """A verified identity."""

    subject: str  # system:serviceaccount:<namespace>:<name>
    uid: str  # of the ServiceAccount: one made anew under the same name is somebody else


class Verifier(Protocol):
    """Turns a bearer token into a caller."""

    async def verify(self, token: str) -> Caller:
        """Raises IdentityError."""
        ...

    async def close(self) -> None:
        """The process ends."""
        ...


class ServiceAccountVerifier:
    """Verifies the tokens of one audience."""

    def __init__(
        self,
        audience: str,
        tokens: TokenVerification,
        keys: KeyRing | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._audience = audience
        self._keys = keys or KeyRing(ApiServerKeys(tokens))
        self._wall_clock = wall_clock

    async def verify(self, token: str) -> Caller:
        """As Verifier says; about 0.1 ms once the key is known."""
        if len(token) > LONGEST_TOKEN:
            raise IdentityError(f"the token is longer than {LONGEST_TOKEN} characters")
        kid, algorithm = _read_header(token)
        issuer, key = await self._keys.find(kid)
        if key.algorithm_name != algorithm:
            raise IdentityError(f"the token says {algorithm}, its key is for {key.algorithm_name}")
        claims = self._claims(token, key, issuer)
        self._check_times(claims)
        return _caller(claims)

    async def close(self) -> None:
        """The process ends."""
        await self._keys.close()

    def _claims(self, token: str, key: jwt.PyJWK, issuer: str) -> dict[str, Any]:
        """Signature, issuer and audience hold. Times are looked at after that, so that it can be told by how much."""
        wanted: dict[str, Any] = {"require": ["exp", "iat", "nbf", "iss", "aud", "sub"]}
        later = {"verify_exp": False, "verify_nbf": False, "verify_iat": False}
        try:
            return jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._audience,
                issuer=issuer,
                options=wanted | later,  # type: ignore[arg-type]
            )
        except jwt.InvalidAudienceError as error:
            raise IdentityError(f"the token is refused: it is not for audience {self._audience}") from error
        except UNREADABLE as error:
            raise IdentityError(f"the token is refused: {_cause(error)}") from error

    def _check_times(self, claims: dict[str, Any]) -> None:
        now = self._wall_clock()
        iat, nbf, exp = (_seconds(claims, name) for name in ("iat", "nbf", "exp"))
        early_s, late_s, age_s = max(iat, nbf) - now, now - exp, now - iat
        if early_s > LEEWAY_S:
            problem = f"the token is valid in {early_s:.0f} s only, by this engine's clock"
        elif late_s >= LEEWAY_S:
            problem = f"the token expired {late_s:.0f} s ago, by this engine's clock"
        elif age_s > OLDEST_TOKEN_S + LEEWAY_S:
            problem = f"the token is {age_s:.0f} s old by this engine's clock, at most {OLDEST_TOKEN_S} s are taken"
        else:
            return
        raise IdentityError(f"{problem}: {self._clock_words(early_s > LEEWAY_S)}")

    def _clock_words(self, is_early: bool) -> str:
        ahead_s = self._keys.clock_ahead_s()
        if abs(ahead_s) > LEEWAY_S:
            where = "ahead of" if ahead_s > 0 else "behind"
            return f"that clock is {abs(ahead_s):.0f} s {where} the API server's, set the node's right"
        if is_early:
            return "the clock of this engine's node or the API server's is wrong"
        return "get a new one"


def _seconds(claims: dict[str, Any], name: str) -> float:
    value = claims[name]
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):  # of an integer
            if math.isfinite(seconds := float(value)):
                return seconds
    raise IdentityError(f"the token is refused: {name} is no time")


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, PyJWTError) else type(error).__name__


def _read_header(token: str) -> tuple[str, str]:
    try:
        header = jwt.get_unverified_header(token)
    except UNREADABLE as error:
        raise IdentityError(f"not a token: {_cause(error)}") from error
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
    subject = claims["sub"]
    if not isinstance(subject, str):  # PyJWT looks at that since 2.10
        raise IdentityError("the token is refused: its subject is no text")
    return Caller(subject, uid)
