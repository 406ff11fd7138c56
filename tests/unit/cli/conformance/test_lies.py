"""Every check of conformance can fail: an honest engine passes, each lie is found, and nothing passes on nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS
from rollfleet_cli.conformance.checks.check import Check
from rollfleet_cli.conformance.checks.wire import Exchange, Identity, Port
from rollfleet_protocol.refusals import SPANS_HEADER, WEIGHT_VERSION_HEADER, RefusalReason
from tests.support.honest_engine import (
    STATE,
    TOKENS,
    VERSION,
    HonestEngine,
    error,
    experts,
    make_subject,
    refuse,
)

CHECKS = {check.id: check for check in ENGINE_CHECKS}
Lie = Callable[[Exchange], Exchange]


def on(path: str, change: Lie, **where: Any) -> Lie:
    """Only of answers of this path."""

    def lie(exchange: Exchange) -> Exchange:
        call = exchange.call
        fits = call.path.startswith(path) and all(getattr(call, name) == value for name, value in where.items())
        return change(exchange) if fits else exchange

    return lie


def status(code: int, body: bytes = b"{}") -> Lie:
    return lambda exchange: replace(exchange, status=code, body=body)


def body(change: Callable[[Any], Any]) -> Lie:
    """Another document, where it is one."""

    def lie(exchange: Exchange) -> Exchange:
        document = exchange.json
        return exchange if document is None else replace(exchange, body=json.dumps(change(document)).encode())

    return lie


def put(*path: str | int, to: Any) -> Lie:
    """One value in the body."""

    def change(document: Any) -> Any:
        place = document
        for step in path[:-1]:
            if not (isinstance(place, list) and isinstance(step, int)) and step not in place:
                return document
            place = place[step]
        if place is not None:
            place[path[-1]] = to
        return document

    return body(change)


def text(old: str, new: str) -> Lie:
    return lambda exchange: replace(exchange, body=exchange.body.replace(old.encode(), new.encode()))


def headers(*told: tuple[str, str]) -> Lie:
    return lambda exchange: replace(exchange, headers=told)


def asked_with(header: str, change: Lie, value: str | None = None) -> Lie:
    """Only of requests that have it."""

    def lie(exchange: Exchange) -> Exchange:
        had = dict(exchange.call.headers)
        return change(exchange) if header in had and value in (None, had[header]) else exchange

    return lie


def let_in(identity: Identity) -> Lie:
    return lambda exchange: status(200)(exchange) if exchange.call.identity is identity else exchange


COMPLETIONS, CHAT, GENERATE, PROBE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/rollfleet/v1/probe",
)
OF_OTHERS = [{"0": {"logprob": -1}}] * 5
VERSIONED = (WEIGHT_VERSION_HEADER, str(VERSION))
LIES: dict[str, dict[str, Lie]] = {
    "state": {
        "another pod": put("podUid", to="u-2"),
        "unverified": put("weights", "state", to="Uncertain"),
        "no version": put("weights", "version", to=None),
        "closed": put("gate", to="Closed"),
        "paused": put("paused", to=True),
        "armed": put("armed", to=True),
        "asleep": put("sleep", "level", to=1),
        "half awake": put("sleep", "awake", to=["weights"]),
        "not ready": put("ready", to=False),
        "no epoch": put("epoch", to=0),
        "dead": put("alive", to=False),
        "restarted": put("incarnation", to="incarnation-2"),
        "a reason": put("closedReason", to="Updating"),
        "no state": body(lambda _: {}),
    },
    "facts": {"another release": put("version", to="0.27.1"), "none": status(404)},
    "probes": {
        "unhealthy": on("/health", status(503)),
        "not live": on("/livez", status(503)),
        "not ready": on("/readyz", status(503)),
        "another model": on("/v1/models", put("data", 0, "id", to="base")),
    },
    "metrics": {
        "no guard": text("rollfleet_guard_gate_open 1.0", ""),
        "closed": text("rollfleet_guard_gate_open 1.0", "rollfleet_guard_gate_open 0.0"),
        "another version": text(f"weight_version {float(VERSION)}", "weight_version 3.0"),
        "twice": text("rollfleet_guard_gate_open 1.0", "rollfleet_guard_gate_open 1.0\nrollfleet_guard_gate_open 1.0"),
        "no engine": text("vllm:num_requests_running", "other"),
    },
    "identity": {
        identity.value: let_in(identity)
        for identity in Identity
        if identity not in (Identity.OPERATOR, Identity.OTHER_ACCOUNT)
    }
    | {
        "of another server": lambda exchange: replace(exchange, body=b'{"detail": "Unauthorized"}'),
        "forbidden": lambda exchange: refuse(exchange.call, 403, RefusalReason.FORBIDDEN),
        "told": lambda exchange: replace(exchange, body=exchange.body.replace(b"refused", STATE.incarnation.encode())),
        "only one route": on("/update_weights", status(200)),
    },
    "other-account": {"let in": let_in(Identity.OTHER_ACCOUNT), "unknown": status(401)},
    "native-control": {
        "obeyed": on("/pause", status(200)),
        "vLLM's own refusal": on("/collective_rpc", status(400, b'{"detail": "Missing method"}')),
        "no cure": put("error", "message", to="no"),
    },
    "no-control-on-serving": {
        "read": on("/is_sleeping", status(200, b'{"is_sleeping": false}')),
        "reached": on("/sleep", status(500)),
        "another's 404": status(404, b'{"detail": "Not Found"}'),
    },
    "unknown-routes": {
        "documentation": on("/docs", status(200)),
        "state": on("/rollfleet/v1/state", status(401)),
        "redirected": on("/pause/", status(307)),
    },
    "spellings": {"decoded": on("/%69s_paused", status(200)), "resolved": on("/v1/../is_paused", status(307))},
    "websockets": {"upgraded": on("/v1/realtime", status(101))},
    "body-limits": {"read": on(COMPLETIONS, status(400)), "taken": on("/tokenize", status(200))},
    "version-on-answers": {
        "none": headers(),
        "another": headers((WEIGHT_VERSION_HEADER, "6")),
        "twice": headers(VERSIONED, VERSIONED),
        "the client's": asked_with(WEIGHT_VERSION_HEADER, headers((WEIGHT_VERSION_HEADER, str(VERSION + 77)))),
        "spans": headers(VERSIONED, (SPANS_HEADER, "[]")),
        "too few tokens": put("usage", "completion_tokens", to=3),
        "aborted": put("choices", 0, "finish_reason", to="abort"),
        "two choices": body(lambda document: document | {"choices": document["choices"] * 2}),
    },
    "demanded-versions": {
        "any version": asked_with("X-Weight-Version-Required", status(200)),
        "any minimum": asked_with("X-Weight-Version-Min", status(200)),
        "malformed": asked_with("X-Weight-Version-Required", status(200), "0x1"),
        "no version told": lambda exchange: headers()(exchange) if exchange.status == 409 else exchange,
        "never": lambda exchange: refuse(exchange.call, 409, RefusalReason.WRONG_VERSION, headers=(VERSIONED,)),
    },
    "streams": {
        "no end": text("data: [DONE]", ""),
        "two ends": text("data: [DONE]", "data: [DONE]\n\ndata: [DONE]"),
        "no reason": text('"length"}]}\n\ndata: [DONE]', "null}]}\n\ndata: [DONE]"),
        "spans": text("data: [DONE]", ": x-weight-version-spans []\n\ndata: [DONE]"),
        "silent": text('"text": "x"', '"text": ""'),
        "no version": headers(),
    },
    "errors": {
        "no form": lambda exchange: replace(exchange, body=b'{"detail": "no"}'),
        "another code": put("error", "code", to=500),
        "no message": put("error", "message", to=""),
        "any model": asked_with("Content-Type", on(COMPLETIONS, lambda e: status(200)(e) if e.status == 404 else e)),
        "no version": headers(),
        "dies": lambda exchange: status(500)(exchange) if exchange.status == 400 else exchange,
    },
    "ranks": {
        "all on one": text('vllm:request_success_total{engine="1"}', "other"),
        "out of range": asked_with("X-data-parallel-rank", status(200), "2"),
        "no number": asked_with("X-data-parallel-rank", status(200), "abc"),
        "no range told": put("error", "message", to="no"),
    },
    "token-ids": {
        "none": put("choices", 0, "token_ids", to=None),
        "too few": put("choices", 0, "token_ids", to=[1]),
        "another prompt": put("choices", 0, "prompt_token_ids", to=[1, 2]),
        "text": put("choices", 0, "token_ids", to=["a"] * 4),
    },
    "chat": {"absent": status(404), "too short": put("usage", "completion_tokens", to=1)},
    "logprobs": {
        "none": put("choices", 0, "logprobs", to=None),
        "too few": put("choices", 0, "logprobs", to={"token_logprobs": [-1.0]}),
        "above zero": put("choices", 0, "logprobs", to={"token_logprobs": [0.5] * 4}),
        "no numbers": put("choices", 0, "logprobs", to={"token_logprobs": [-1.0, None, -1.0, -1.0]}),
        "no bound": lambda e: status(200)(e) if e.status == 400 else e,
        "another bound": text("max allowed: 3", "max allowed: 20"),
    },
    "probe": {
        "refused": status(409),
        "no report": body(lambda _: {}),
        "one rank": body(lambda document: document | {"byRank": document["byRank"][:1]}),
        "no ranks": put("byRank", to=[]),
        "ranks differ": put("byRank", 1, to=[-1.0] * 5),
        "too few": put("byRank", to=[[-1.0], [-1.0]]),
        "above zero": put("byRank", to=[[1.0] * 5] * 2),
        "other tokens": put("tokens", to=[1, 2]),
        "another process": put("incarnation", to="other"),
    },
    "probe-as-served": {
        "other numbers": on(PROBE, put("byRank", 0, to=[-9.0] * 5)),
        "no prompt_logprobs": on(COMPLETIONS, put("choices", 0, "prompt_logprobs", to=None)),
        "of other tokens": on(COMPLETIONS, put("choices", 0, "prompt_logprobs", to=[None, *OF_OTHERS])),
        "no probe": on(PROBE, status(409)),
        "no answer": on(COMPLETIONS, status(400)),
    },
    "token-endpoint": {
        "absent": status(404),
        "no tokens": put("choices", 0, "token_ids", to=None),
        "no version": headers(),
    },
    "tool-calling": {
        "refused": status(400),
        "no version": headers(),
        "no template": status(400, json.dumps(error(400, "no chat template")).encode()),
    },
    "routed-experts": {
        "none": put("choices", 0, "routed_experts", to=None),
        "too few": put("choices", 0, "routed_experts", to=experts(3)),
        "no layers": put("choices", 0, "routed_experts", to=experts(len(TOKENS) + 3, layers=0)),
        "floats": put("choices", 0, "routed_experts", to=experts(len(TOKENS) + 3, kind="<f4")),
        "a pickle": put("choices", 0, "routed_experts", to="gASVBAAAAAAAAABLAS4="),
        "no base64": put("choices", 0, "routed_experts", to="%%%"),
    },
    "trace-replay": {
        "other tokens": put("choices", 0, "token_ids", to=[9, 9, 9, 9]),
        "no logprobs": put("choices", 0, "logprobs", to=None),
        "refused": status(400),
    },
    "batch-invariance": {
        "refused": status(400),
    },
}


def alternating(change: Lie) -> Lie:
    """Of every second answer to the request that is looked at."""
    seen = [0]

    def lie(exchange: Exchange) -> Exchange:
        if json.loads(exchange.call.body or b"{}").get("return_token_ids"):
            seen[0] += 1
            return change(exchange) if seen[0] == 2 else exchange
        return exchange

    return lie


@pytest.mark.parametrize("name", CHECKS)
def test_an_honest_engine_passes(name: str) -> None:
    assert CHECKS[name].unless(make_subject()) == ""
    assert HonestEngine().drive(CHECKS[name]) == ()


def test_every_check_has_a_lie() -> None:
    assert set(LIES) == set(CHECKS)


@pytest.mark.parametrize(("name", "lie"), [(name, lie) for name, lies in LIES.items() for lie in lies])
def test_a_lie_is_found(name: str, lie: str) -> None:
    faults = HonestEngine(LIES[name][lie]).drive(CHECKS[name])
    assert faults
    assert all(fault.cause for fault in faults)


@pytest.mark.parametrize(
    "change",
    [
        put("choices", 0, "logprobs", to={"token_logprobs": [-1.0000001] * 8}),
        put("choices", 0, "token_ids", to=[9] * 8),
        put("choices", 0, "logprobs", to=None),
    ],
    ids=["by a hair", "tokens", "none"],
)
def test_what_depends_on_the_batch_is_found(change: Lie) -> None:
    assert HonestEngine(alternating(change)).drive(CHECKS["batch-invariance"])


@pytest.mark.parametrize(
    "facts",
    [{"worldSize": 1}, {"dataParallelSize": 1}, {"capabilities": []}, {"engineVersion": ""}, {"guardVersion": ""}],
    ids=str,
)
def test_facts_that_do_not_fit_the_spec_are_found(facts: dict[str, Any]) -> None:
    document = json.loads(STATE.facts.model_dump_json(by_alias=True)) | facts
    state = STATE.model_copy(update={"facts": type(STATE.facts).model_validate(document)})
    assert HonestEngine(state=state).drive(CHECKS["facts"], make_subject(state=state))


GARBAGE = st.one_of(
    st.builds(lambda words: (0, b"", words), st.text(max_size=20)),
    st.builds(
        lambda code, content: (code, content, ""),
        st.sampled_from([200, 204, 301, 418, 500, 502]),
        st.one_of(
            st.binary(max_size=40),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            ["choices", "usage", "error", "data", "version", "message", "completion_tokens"]
                        ),
                        inner,
                        max_size=4,
                    )
                ),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
        ),
    ),
)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.id)
@given(garbage=GARBAGE)
@settings(max_examples=60, deadline=None)
def test_nothing_passes_on_nothing(check: Check, garbage: tuple[int, bytes, str]) -> None:
    code, content, words = garbage

    def lie(exchange: Exchange) -> Exchange:
        return Exchange(exchange.call, code, body=content, error=words)

    assert HonestEngine(lie).drive(check)


def test_only_the_serving_port_is_spoken_to_without_an_identity() -> None:
    """And what has the operator's identity is a look, a probe, or what vLLM would refuse."""
    asked: list[Exchange] = []

    def note(exchange: Exchange) -> Exchange:
        asked.append(exchange)
        return exchange

    for check in ENGINE_CHECKS:
        HonestEngine(note).drive(check)
    commands = {"prepare", "close", "arm", "transfer", "verify", "sleep", "wake", "cancel"}
    for call in (exchange.call for exchange in asked):
        if call.port is Port.CONTROL:
            assert call.path.partition("?")[0].rpartition("/")[2] not in commands or "none" in call.path
            assert call.path != "/rollfleet/v1/open" or (call.identity is not Identity.OPERATOR and call.body == b"{}")
            assert call.path != "/rollfleet/v1/state", "a look is no word of the operator"
