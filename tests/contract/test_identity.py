"""Nobody without a valid identity controls an engine, by any route of the control port."""

import base64
import json
import ssl
import time
from collections.abc import Callable

import httpx
import jwt
import pytest

from rollfleet_cli.conformance.checks.locked import forbidden, unauthenticated
from rollfleet_engine.guard.control import COMMANDS
from rollfleet_protocol.commands import PREFIX, PROBE_PATH, STATE_PATH
from tests.contract.client import Operator
from tests.contract.conforming import exchange_of
from tests.contract.process import OPERATOR_UID, SUBJECT, EngineProcess, Site
from tests.support.issuer import SigningKey

OTHER_SUBJECT = "system:serviceaccount:default:default"


def _unsigned(operator: Operator) -> str:
    """The operator's own claims under alg none."""
    claims = operator.token.split(".")[1]
    header = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT", "kid": "key-1"}).encode())
    return f"{header.rstrip(b'=').decode()}.{claims}."


def _by_shared_secret(operator: Operator) -> str:
    """Signed by HMAC with something that everybody knows."""
    claims = jwt.decode(operator.token, options={"verify_signature": False})
    return jwt.encode(claims, "known to everybody " * 2, algorithm="HS256", headers={"kid": "key-1"})


def _another_claim(operator: Operator) -> str:
    """A good signature, over other claims."""
    header, _, signature = operator.token.split(".")
    claims = jwt.decode(operator.token, options={"verify_signature": False}) | {"exp": int(time.time()) + 10**6}
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"{header}.{body}.{signature}"


BAD: dict[str, tuple[int, Callable[[Operator], str]]] = {
    "none": (401, lambda _: ""),
    "garbage": (401, lambda _: "not.a.token"),
    "alg-none": (401, _unsigned),
    "shared-secret": (401, _by_shared_secret),
    "forged-key": (401, lambda operator: operator.make_token(key=SigningKey("key-1"))),
    "unknown-key": (401, lambda operator: operator.make_token(key=SigningKey("key-2"))),
    "changed-claims": (401, _another_claim),
    "expired": (401, lambda operator: operator.make_token(exp=int(time.time()) - 60, iat=int(time.time()) - 600)),
    "too-old": (401, lambda operator: operator.make_token(iat=int(time.time()) - 3600)),
    "not-yet": (401, lambda operator: operator.make_token(nbf=int(time.time()) + 600)),
    "no-expiry": (401, lambda operator: operator.make_token(exp=None)),
    "wrong-audience": (401, lambda operator: operator.make_token(audience="rollfleet.io/rl/qwen/other-uid")),
    "another-engine-s": (
        401,
        lambda operator: operator.make_token(audience="rollfleet.io/rl/qwen/f1e2-fleet/other-pod"),
    ),
    "the-whole-fleet-s": (401, lambda operator: operator.make_token(audience="rollfleet.io/rl/qwen/f1e2-fleet")),
    "api-server-audience": (401, lambda operator: operator.make_token(audience="https://kubernetes.default.svc")),
    "wrong-issuer": (401, lambda operator: operator.make_token(iss="https://elsewhere.example")),
    "no-service-account": (401, lambda operator: operator.make_token(**{"kubernetes.io": None})),
    "wrong-subject": (403, lambda operator: operator.make_token(subject=OTHER_SUBJECT)),
    "wrong-uid": (403, lambda operator: operator.make_token(uid="made-anew-under-the-same-name")),
}


@pytest.mark.parametrize("name", BAD)
def test_c14_bad_identities_get_nothing(operator: Operator, name: str):
    status, make = BAD[name]
    before = operator.state()
    token = make(operator)
    body = {"incarnation": before.incarnation, "epoch": before.epoch + 1}
    answers = [operator.request("GET", STATE_PATH, token=token)]
    answers += [operator.request("POST", f"{PREFIX}/{command}", token=token, json=body) for command in COMMANDS]
    answers += [
        operator.request("POST", path, token=token, json={}) for path in (PROBE_PATH, "/pause", "/update_weights", "/x")
    ]
    judge = {401: unauthenticated, 403: forbidden}[status]
    for answer in answers:
        assert tuple(judge(exchange_of(answer), before.incarnation, token)) == ()
    assert operator.state() == before


def test_the_operator_is_let_in(engine: EngineProcess, operator: Operator):
    assert operator.request("GET", STATE_PATH, token=operator.make_token()).status_code == 200
    assert operator.state().facts.engine_version == engine.kind.release


def test_two_authorization_headers_are_one_too_many(operator: Operator, engine: EngineProcess):
    name = engine.config.fleet.control_server_name
    headers = [("Host", name), ("Authorization", f"Bearer {operator.token}"), ("Authorization", "Bearer x")]
    answer = operator.http.get(STATE_PATH, headers=headers, extensions={"sni_hostname": name})
    assert answer.status_code == 401


def test_the_control_port_shows_the_fleets_certificate(operator: Operator, engine: EngineProcess, site: Site):
    context = ssl.create_default_context(cadata=site.authority.pem.decode())
    with (
        httpx.Client(base_url=engine.control_url, verify=context) as http,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),  # by address, which it does not name
    ):
        http.get(STATE_PATH)
    with httpx.Client() as plain, pytest.raises(httpx.TransportError):
        plain.get(engine.control_url.replace("https", "http") + STATE_PATH)


def test_an_oversized_token_is_refused(operator: Operator):
    assert operator.request("GET", STATE_PATH, token="x" * 60_000).status_code in (400, 401, 431)
    assert operator.state().alive


def test_denials_are_logged_without_the_token(engine: EngineProcess, operator: Operator):
    token = operator.make_token(subject=OTHER_SUBJECT)
    assert operator.request("GET", STATE_PATH, token=token).status_code == 403
    log = engine.log()
    assert token not in log
    assert operator.token not in log
    assert "control.denied" in log


def test_bodies_are_bounded_and_checked(operator: Operator):
    state = operator.state()
    body = {"incarnation": state.incarnation, "epoch": state.epoch + 1}
    large = operator.request("POST", f"{PREFIX}/arm", json=body | {"x": "y" * (2 << 20)})
    assert large.status_code == 413
    unknown = operator.request("POST", f"{PREFIX}/arm", json=body | {"versoin": 3})
    assert unknown.status_code == 400
    assert "versoin" in unknown.json()["error"]["message"]
    assert operator.request("POST", f"{PREFIX}/arm", content=b"{").status_code == 400
    assert operator.request("POST", f"{PREFIX}/open", json=body | {"version": -1}).status_code == 400
    assert operator.state().epoch == state.epoch


def test_long_polls_are_bounded(operator: Operator):
    assert operator.request("GET", STATE_PATH, params={"waitSeconds": 56}).status_code == 400
    assert operator.request("GET", STATE_PATH, params={"after": "x"}).status_code == 400
    state = operator.state()
    began = time.monotonic()
    assert operator.state(after=state.sequence, wait_s=0.5).sequence == state.sequence
    assert 0.4 < time.monotonic() - began < 5
    assert operator.state(after=state.sequence - 1, wait_s=30).sequence == state.sequence


def test_identity_is_by_name_and_uid(engine: EngineProcess):
    assert (engine.config.operator.subject, engine.config.operator.uid) == (SUBJECT, OPERATOR_UID)
