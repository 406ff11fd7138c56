"""Who is taken for the operator, and what becomes of everybody else."""

import asyncio
import base64
import json
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import certifi
import httpx
import jwt
import pytest

from rollfleet_engine.guard.identity import LEEWAY_S, LONGEST_TOKEN, Caller, ServiceAccountVerifier
from rollfleet_engine.guard.keys import (
    OLDEST_KEYS_S,
    REFETCH_EVERY_S,
    REFRESH_S,
    STALE_S,
    ApiServerKeys,
    IdentityError,
    KeyRing,
)
from rollfleet_protocol.engine_config import TokenVerification
from tests.support.guards import FLEET, OPERATOR
from tests.support.tokens import ISSUER, ApiServer, claims, ec_key, rsa_key, sign

AUDIENCE = FLEET.audience("")
RSA_KEY, OTHER_RSA_KEY, EC_KEY = rsa_key(), rsa_key(), ec_key()


@pytest.fixture
def server() -> ApiServer:
    return ApiServer(first=RSA_KEY, curve=EC_KEY)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenVerification:
    (tmp_path / "token").write_text("pod-token\n")
    return TokenVerification(ca_file=certifi.where(), token_file=str(tmp_path / "token"))


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(server: ApiServer, tokens: TokenVerification, clock: Clock) -> ServiceAccountVerifier:
    return ServiceAccountVerifier(AUDIENCE, tokens, KeyRing(ApiServerKeys(tokens, server.transport()), clock))


async def test_the_operators_token_is_verified_with_keys_fetched_once(
    verifier: ServiceAccountVerifier, server: ApiServer
) -> None:
    for _ in range(3):
        assert await verifier.verify(sign(RSA_KEY)) == Caller(OPERATOR.subject, OPERATOR.uid)
    assert await verifier.verify(sign(EC_KEY, "curve")) == Caller(OPERATOR.subject, OPERATOR.uid)
    assert server.asked == ["/.well-known/openid-configuration", "/openid/v1/jwks"]
    assert server.tokens == {"Bearer pod-token"}


NOW = int(time.time())
BAD_CLAIMS = {
    "another fleet's audience": {"aud": ["rollfleet.io/rl/qwen/another-uid"]},
    "another engine's audience": {"aud": [FLEET.audience("another-pod")]},
    "times that are no numbers": {"exp": "tomorrow"},
    "a time that is true": {"nbf": True},
    "a time without end": {"exp": float("inf")},
    "an audience that is an object": {"aud": {"a": 1}},
    "a subject that is no text": {"sub": 7},
    "the API server's own audience": {"aud": [ISSUER]},
    "no audience": {"aud": None},
    "another issuer": {"iss": "https://another"},
    "expired": {"exp": NOW - 60, "iat": NOW - 120},
    "no expiry": {"exp": None},
    "not valid yet": {"nbf": NOW + 3600},
    "issued in the future": {"iat": NOW + 3600},
    "older than 15 minutes though not expired": {"iat": NOW - 1000, "nbf": NOW - 1000, "exp": NOW + 3600},
    "no time of issue": {"iat": None},
    "no subject": {"sub": None},
    "no ServiceAccount": {"kubernetes.io": None},
    "a ServiceAccount without uid": {"kubernetes.io": {"serviceaccount": {"name": "x"}}},
    "an empty uid": {"kubernetes.io": {"serviceaccount": {"uid": ""}}},
    "a namespace that is no object": {"kubernetes.io": "serviceaccount"},
}


@pytest.mark.parametrize("changes", BAD_CLAIMS.values(), ids=BAD_CLAIMS)
async def test_claims_that_are_refused(verifier: ServiceAccountVerifier, changes: dict[str, object]) -> None:
    with pytest.raises(IdentityError):
        await verifier.verify(sign(RSA_KEY, **changes))


async def test_clocks_may_differ_a_little(verifier: ServiceAccountVerifier) -> None:
    now = int(time.time())
    await verifier.verify(sign(RSA_KEY, iat=now + 5, nbf=now + 5))
    await verifier.verify(sign(RSA_KEY, iat=now - 902, nbf=now - 902))


def unsigned() -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'kid': 'first'})}.{part(claims())}."


def signed_with_the_public_key() -> str:
    """The old confusion: the published key taken for a shared secret."""
    jwk = ApiServer(first=RSA_KEY)._jwk("first", RSA_KEY)
    secret = base64.urlsafe_b64decode(jwk["n"] + "==")
    return jwt.encode(claims(), secret, "HS256", headers={"kid": "first"})


BAD_TOKENS = {
    "nothing": "",
    "words": "let me in",
    "unsigned": unsigned(),
    "signed with a shared secret": signed_with_the_public_key(),
    "signed by another key": sign(OTHER_RSA_KEY),
    "RS512": sign(RSA_KEY, algorithm="RS512"),
    "PS256": sign(RSA_KEY, algorithm="PS256"),
    "ES256 under the name of an RSA key": sign(EC_KEY, "first"),
    "no key id": sign(RSA_KEY, None),
    "cut short": sign(RSA_KEY)[:-4],
    "too long": "a." * LONGEST_TOKEN,
}


@pytest.mark.parametrize("token", BAD_TOKENS.values(), ids=BAD_TOKENS)
async def test_tokens_that_are_refused(verifier: ServiceAccountVerifier, token: str) -> None:
    with pytest.raises(IdentityError) as refused:
        await verifier.verify(token)
    assert not token or token not in str(refused.value)


async def test_rotated_keys_are_taken_without_a_restart(
    verifier: ServiceAccountVerifier, server: ApiServer, clock: Clock
) -> None:
    await verifier.verify(sign(RSA_KEY))
    server.keys["second"] = OTHER_RSA_KEY
    clock.now += REFETCH_EVERY_S
    await verifier.verify(sign(OTHER_RSA_KEY, "second"))


async def test_invented_keys_do_not_make_the_guard_ask_each_time(
    verifier: ServiceAccountVerifier, server: ApiServer, clock: Clock
) -> None:
    await verifier.verify(sign(RSA_KEY))
    for number in range(50):
        with pytest.raises(IdentityError):
            await verifier.verify(sign(OTHER_RSA_KEY, f"invented-{number}"))
    assert server.asked.count("/openid/v1/jwks") == 1
    clock.now += REFETCH_EVERY_S
    with pytest.raises(IdentityError):
        await verifier.verify(sign(OTHER_RSA_KEY, "invented"))
    assert server.asked.count("/openid/v1/jwks") == 2


async def test_an_api_server_that_is_away_does_not_lock_the_operator_out(
    verifier: ServiceAccountVerifier, server: ApiServer, clock: Clock
) -> None:
    await verifier.verify(sign(RSA_KEY))
    server.error = httpx.ConnectError("connection refused")
    clock.now += OLDEST_KEYS_S - 1
    with pytest.raises(IdentityError, match="connection refused"):
        await verifier.verify(sign(OTHER_RSA_KEY, "unknown"))
    asked = len(server.asked)
    for _ in range(3):
        await verifier.verify(sign(RSA_KEY))
    assert len(server.asked) <= asked + 1  # nor is it waited for each time
    clock.now += 2
    with pytest.raises(IdentityError, match=r"read 3601 s ago, and are trusted for 3600 s: .*connection refused"):
        await verifier.verify(sign(RSA_KEY))
    server.error = None
    clock.now += REFETCH_EVERY_S
    await verifier._keys._refetch(lambda: True)
    await verifier.verify(sign(RSA_KEY))


@pytest.mark.parametrize("is_called_meanwhile", [True, False])
async def test_a_withdrawn_key_is_refused_in_time(
    verifier: ServiceAccountVerifier, server: ApiServer, clock: Clock, *, is_called_meanwhile: bool
) -> None:
    await verifier.verify(sign(RSA_KEY))
    del server.keys["first"]
    await verifier.verify(sign(RSA_KEY))  # not yet known
    if is_called_meanwhile:
        clock.now += 1.5 * REFRESH_S
        await verifier.verify(sign(RSA_KEY))  # the last time: the keys are being read beside it
        await asyncio.sleep(0.05)
        assert verifier._keys._refreshing is not None
        await verifier._keys._refreshing
    else:
        clock.now += STALE_S + 1
    with pytest.raises(IdentityError, match="does not publish"):
        await verifier.verify(sign(RSA_KEY))
    await verifier.verify(sign(EC_KEY, "curve"))
    await verifier.close()


class Wall:
    """The clock of an engine's node, so many seconds before the API server's."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def skewed(
    server: ApiServer,
    tokens: TokenVerification,
    ahead_s: float,
    *,
    tells_date: bool,
    wall: Callable[[], float] | None = None,
) -> ServiceAccountVerifier:
    """A guard whose clock goes wrong, and an API server that says what time it is."""
    if tells_date:  # the test's process has one clock: its API server is wrong the other way round
        server.date = lambda: formatdate(time.time() - ahead_s, usegmt=True)
    ring = KeyRing(ApiServerKeys(tokens, server.transport()))
    return ServiceAccountVerifier(AUDIENCE, tokens, ring, wall or Wall(ahead_s))


@pytest.mark.parametrize(
    ("ahead_s", "tells_date", "words"),
    [
        (
            -300,
            True,
            r"valid in (29\d|300) s only, by this engine's clock: that clock is (29\d|30\d) s behind the API server's",
        ),
        (
            -300,
            False,
            r"valid in (29\d|300) s only, by this engine's clock: the clock of this engine's node or the API server's",
        ),
        (1000, True, r"expired 40\d s ago, by this engine's clock: that clock is (99\d|100\d) s ahead of the API"),
        (1000, False, r"expired 40\d s ago, by this engine's clock: get a new one"),
    ],
)
async def test_a_clock_that_is_wrong_is_named(
    server: ApiServer, tokens: TokenVerification, ahead_s: float, words: str, *, tells_date: bool
) -> None:
    with pytest.raises(IdentityError, match=words):
        await skewed(server, tokens, ahead_s, tells_date=tells_date).verify(sign(RSA_KEY))


@pytest.mark.parametrize("off_s", [-LEEWAY_S + 1, LEEWAY_S - 2])
async def test_the_leeway_holds_for_every_time_of_a_token(
    server: ApiServer, tokens: TokenVerification, off_s: float
) -> None:
    now = int(time.time())
    verifier = skewed(server, tokens, off_s, tells_date=True, wall=lambda: now + off_s)  # it stands still
    await verifier.verify(sign(RSA_KEY, iat=now, nbf=now, exp=now + 600))
    await verifier.verify(sign(RSA_KEY, iat=now - 100, nbf=now - 100, exp=now))
    await verifier.verify(sign(RSA_KEY, iat=now - 900, nbf=now - 900, exp=now + 100))


@pytest.mark.parametrize("name", ["iat", "nbf", "exp"])
async def test_beyond_the_leeway_nothing_is_taken(verifier: ServiceAccountVerifier, name: str) -> None:
    now = int(time.time())
    beyond = now - LEEWAY_S - 1 if name == "exp" else now + LEEWAY_S + 60
    with pytest.raises(IdentityError, match="by this engine's clock"):
        await verifier.verify(sign(RSA_KEY, **{name: beyond}))


async def test_without_any_key_the_cause_is_told_and_it_is_tried_again(
    verifier: ServiceAccountVerifier, server: ApiServer, clock: Clock
) -> None:
    server.error = httpx.ConnectError("connection refused")
    with pytest.raises(IdentityError, match="connection refused"):
        await verifier.verify(sign(RSA_KEY))
    server.error = None
    clock.now += REFETCH_EVERY_S
    await verifier.verify(sign(RSA_KEY))


async def test_many_at_once_share_one_fetch(verifier: ServiceAccountVerifier, server: ApiServer) -> None:
    await asyncio.gather(*(verifier.verify(sign(RSA_KEY)) for _ in range(20)))
    assert server.asked.count("/openid/v1/jwks") == 1


BAD_DOCUMENTS = {
    "forbidden": httpx.Response(403, text="forbidden: User cannot get path"),
    "not JSON": httpx.Response(200, text="<html>"),
    "no list": httpx.Response(200, json={"keys": "none"}),
    "a list": httpx.Response(200, json=[]),
    "no usable key": httpx.Response(200, json={"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "first"}]}),
    "too large": httpx.Response(200, content=b" " * ((1 << 20) + 1)),
}


@pytest.mark.parametrize("answer", BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
async def test_key_sets_that_are_not_taken(
    verifier: ServiceAccountVerifier, server: ApiServer, answer: httpx.Response
) -> None:
    server.documents["/openid/v1/jwks"] = answer
    with pytest.raises(IdentityError, match="no token can be verified yet"):
        await verifier.verify(sign(RSA_KEY))


async def test_a_missing_pod_token_is_named(server: ApiServer, tokens: TokenVerification) -> None:
    gone = tokens.model_copy(update={"token_file": "/nowhere/token"})
    keys = ApiServerKeys(gone, server.transport())
    with pytest.raises(IdentityError, match="/nowhere/token"):
        await keys.fetch()


async def test_a_configured_issuer_needs_no_discovery(server: ApiServer, tokens: TokenVerification) -> None:
    fixed = tokens.model_copy(update={"issuer": ISSUER})
    verifier = ServiceAccountVerifier(AUDIENCE, fixed, KeyRing(ApiServerKeys(fixed, server.transport())))
    await verifier.verify(sign(RSA_KEY))
    assert server.asked == ["/openid/v1/jwks"]
