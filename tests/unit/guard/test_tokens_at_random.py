"""Tokens that nobody signed, searched for: whatever is damaged or invented is refused, with its cause."""

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import certifi
import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfleet_engine.guard.control import ControlApp
from rollfleet_engine.guard.identity import LONGEST_TOKEN, Caller, ServiceAccountVerifier
from rollfleet_engine.guard.keys import LONGEST_CAUSE, ApiServerKeys, IdentityError, KeyRing
from rollfleet_protocol.commands import STATE_PATH
from rollfleet_protocol.engine_config import TokenVerification
from rollfleet_protocol.refusals import Refusal
from rollfleet_protocol.words import visible
from tests.support.guards import FLEET, OPERATOR, Guarded
from tests.support.tokens import ApiServer, claims, ec_key, rsa_key, sign

RSA_KEY, EC_KEY = rsa_key(), ec_key()
GOOD = {"first": sign(RSA_KEY), "curve": sign(EC_KEY, "curve")}
OPERATORS = Caller(OPERATOR.subject, OPERATOR.uid)
# JSON can say halves of pairs, and what steers a terminal.
TEXT = st.text(st.characters() | st.sampled_from("\x1b\x9b\u202e\ud800\udfff\x00"), max_size=20)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SEARCH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def client(guarded: Guarded, verifier: ServiceAccountVerifier) -> AsyncIterator[httpx.AsyncClient]:
    app = ControlApp(guarded.service, verifier, OPERATOR, guarded.log)
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="https://guard") as client:
        yield client
    app.close()


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> ServiceAccountVerifier:
    folder: Path = tmp_path_factory.mktemp("pod")
    (folder / "token").write_text("pod-token")
    tokens = TokenVerification(ca_file=certifi.where(), token_file=str(folder / "token"))
    server = ApiServer(first=RSA_KEY, curve=EC_KEY)
    return ServiceAccountVerifier(FLEET.audience(""), tokens, KeyRing(ApiServerKeys(tokens, server.transport())))


async def refused(verifier: ServiceAccountVerifier, token: str) -> None:
    with pytest.raises(IdentityError) as error:
        await verifier.verify(token)
    assert str(error.value)
    assert len(token) < 40 or token not in str(error.value)
    assert len(str(error.value)) < 2000


async def refused_by_the_port(client: httpx.AsyncClient, guarded: Guarded, token: str) -> str:
    """Answered in the guard's words, counted, and told in lines that show what they say. The message."""
    counted = guarded.service.tallies.control["state", "Unauthenticated"]
    answer = await client.get(STATE_PATH, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    error = Refusal.model_validate_json(answer.content).error
    assert error.reason == "Unauthenticated"
    assert len(error.message) <= LONGEST_CAUSE
    assert guarded.service.tallies.control["state", "Unauthenticated"] == counted + 1
    log = guarded.stream.getvalue()
    for text in (error.message, log):
        assert visible(text) == text
    assert max(map(len, log.splitlines()), default=0) < 2000
    return error.message


def b64(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@SEARCH
@given(
    st.sampled_from(sorted(GOOD)),
    st.integers(0, 10**6),
    st.characters(max_codepoint=0x10FFFF, exclude_categories=["Cs"]),
)
async def test_one_changed_character(verifier: ServiceAccountVerifier, kid: str, place: int, by: str) -> None:
    good = GOOD[kid]
    token = good[: place % len(good)] + by + good[place % len(good) + 1 :]
    try:
        assert await verifier.verify(token) == OPERATORS  # the last bits of base64 may say nothing
        assert token == good or place % len(good) == len(good) - 1 or token.rstrip("=") == good
    except IdentityError:
        assert token != good


@SEARCH
@given(st.text(max_size=200) | st.lists(st.text(max_size=40), min_size=2, max_size=4).map(".".join))
async def test_any_words(verifier: ServiceAccountVerifier, token: str) -> None:
    await refused(verifier, token)


@SEARCH
@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "jwk", "jku", "x5u", "b64", "zip"]), ANY))
async def test_any_head_over_good_claims(verifier: ServiceAccountVerifier, head: dict[str, Any]) -> None:
    _, body, signature = GOOD["first"].split(".")
    await refused(verifier, f"{b64(head)}.{body}.{signature}")
    await refused(verifier, f"{b64({'alg': 'RS256', 'kid': 'first'} | head)}.{body}.{signature}x")


@SEARCH
@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), ANY | st.lists(TEXT, max_size=3)))
async def test_any_head_at_the_control_port(client: httpx.AsyncClient, guarded: Guarded, head: dict[str, Any]) -> None:
    await refused_by_the_port(client, guarded, f"{b64({'alg': 'RS256', 'kid': 'first'} | head)}.{b64(claims())}.eA")


async def test_what_a_token_says_is_quoted_short_and_visible(client: httpx.AsyncClient, guarded: Guarded) -> None:
    half = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngiLCJjcml0IjpbIlx1ZDgwMCJdfQ.e30.eA"
    assert "\\ud800" in await refused_by_the_port(client, guarded, half)
    steering = {"alg": "RS256", "kid": "x", "crit": ["\x1b]0;owned\x07\u202e\u009b2J" + "A" * 11_000]}
    message = await refused_by_the_port(client, guarded, f"{b64(steering)}.e30.eA")
    assert "\\x1b]0;owned\\x07\\u202e\\x9b2JA" in message
    assert message.endswith("A…")


async def test_what_python_cannot_parse_is_no_token(client: httpx.AsyncClient, guarded: Guarded) -> None:
    for head in (
        "[" * 9000,
        '{"alg": ' + "9" * 5000 + "}",
        '{"alg": "RS256", "kid": "first", "crit": 7}',
        "\x00",
        '"x"',
    ):
        text = base64.urlsafe_b64encode(head.encode()).rstrip(b"=").decode()
        await refused_by_the_port(client, guarded, f"{text}.{b64(claims())}.eA")


@SEARCH
@given(
    st.sampled_from(["iss", "aud", "sub", "iat", "nbf", "exp", "kubernetes.io"]),
    ANY.filter(lambda value: value is not None),
)
async def test_any_claim_of_another_kind(verifier: ServiceAccountVerifier, name: str, value: Any) -> None:
    """Signed by the API server itself, which would not: nobody but the operator comes of it, and nothing breaks."""
    try:
        token = sign(RSA_KEY, **{name: value})
    except (TypeError, ValueError):  # what no JWT library would sign
        return
    with suppress(IdentityError):
        caller = await verifier.verify(token)
        assert caller == (Caller(value, OPERATOR.uid) if name == "sub" else OPERATORS)


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
@pytest.mark.parametrize("form", ["PEM", "DER", "modulus"])
async def test_the_published_key_is_no_shared_secret(
    verifier: ServiceAccountVerifier, algorithm: str, form: str
) -> None:
    public = RSA_KEY.public_key()
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    secret = {
        "PEM": public.public_bytes(serialization.Encoding.PEM, spki),
        "DER": public.public_bytes(serialization.Encoding.DER, spki),
        "modulus": public.public_numbers().n.to_bytes(256, "big"),
    }[form]
    head, body = b64({"alg": algorithm, "kid": "first"}), b64(claims())
    signer = jwt.algorithms.HMACAlgorithm(getattr(jwt.algorithms.HMACAlgorithm, f"SHA{algorithm[2:]}"))
    signature = base64.urlsafe_b64encode(signer.sign(f"{head}.{body}".encode(), secret)).rstrip(b"=").decode()
    await refused(verifier, f"{head}.{body}.{signature}")


@pytest.mark.parametrize("spelling", ["none", "None", "NONE", "nOnE", "", None, ["RS256"], {"alg": "RS256"}])
async def test_unsigned_in_every_spelling(verifier: ServiceAccountVerifier, spelling: Any) -> None:
    for signature in ("", GOOD["first"].split(".")[2]):
        await refused(verifier, f"{b64({'alg': spelling, 'kid': 'first'})}.{b64(claims())}.{signature}")


async def test_a_key_that_the_token_brings_along_is_not_asked(verifier: ServiceAccountVerifier) -> None:
    own = rsa_key()
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(own.public_key()))
    head = {"kid": "first", "jwk": jwk, "jku": "https://elsewhere.example/keys", "x5u": "https://elsewhere.example/x"}
    await refused(verifier, jwt.encode(claims(), own, "RS256", headers=head))
    await refused(verifier, jwt.encode(claims(), own, "RS256", headers=head | {"kid": "mine"}))


async def test_a_token_of_any_size_is_judged_at_once(verifier: ServiceAccountVerifier) -> None:
    began = time.perf_counter()
    for token in ("a" * LONGEST_TOKEN, "a." * (LONGEST_TOKEN // 2), "e30." + "e" * (LONGEST_TOKEN - 4), "." * 10_000):
        await refused(verifier, token)
    await refused(verifier, sign(RSA_KEY, padding="x" * LONGEST_TOKEN))
    await refused(verifier, "[" * 5000 + "." + "]" * 5000)
    nested = base64.urlsafe_b64encode(b"[" * 9000).decode()
    await refused(verifier, f"{nested}.{b64(claims())}.x")
    assert time.perf_counter() - began < 20, "what grows with the square of its size takes minutes"
