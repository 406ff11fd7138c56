"""Nobody without a valid identity controls an engine, and no way round its guard is open.

A fleet that serves is asked, and what asks expects the worst of it: every call here is one that vLLM itself, without a
guard in front, would refuse as malformed or only answer (read in its sources, 0.27.1 and 0.32.0). None can change it.
"""

from collections.abc import Iterator

from rollfleet_cli.conformance.checks.check import Check, Fault, Promise, Steps, Subject
from rollfleet_cli.conformance.checks.judging import each, has_status, missing, refusal_of, refused
from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port, get, post
from rollfleet_protocol.commands import CANARY_PATH, LOOK_PATH, PROBE_PATH, STATE_PATH
from rollfleet_protocol.refusals import RefusalReason

# Without the field or with the value that makes vLLM refuse them: 400 or 422 of its own, never an effect.
HARMLESS_POSTS = (
    "/pause?mode=none-of-these",
    "/sleep?level=none",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/update_weights",
    "/v1/load_lora_adapter",
)
READS = ("/is_paused", "/is_sleeping", "/get_world_size", "/server_info", "/weight_info")
UNKNOWN = ("/docs", "/openapi.json", "/nothing", STATE_PATH, "/", "/pause/", "//is_paused")
SPELLINGS = ("/IS_PAUSED", "/v1/../is_paused", "/%69s_paused", "/v1/models/../../is_paused", "/./is_paused")
STRANGERS = (
    Identity.NOBODY,
    Identity.GARBAGE,
    Identity.ALG_NONE,
    Identity.SHARED_SECRET,
    Identity.FORGED_KEY,
    Identity.CHANGED_CLAIMS,
    Identity.WRONG_AUDIENCE,
)
UPGRADE = (
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),  # RFC 6455's own example
)
TOO_LONG = str(1 << 40)  # bytes
LOOK_AT_GUARD = (
    "what answers there is no guard of this release, or something stands before it: take this release's image"
)
LOOK_AT_RBAC = "docs/security.md tells what a guard takes; look at the container's log for control.denied"


def control_calls(identity: Identity) -> tuple[Call, ...]:
    """One of each kind: a read, a command without content, a probe without content, native routes."""
    to = {"port": Port.CONTROL, "identity": identity}
    return (
        Call(method="GET", path=LOOK_PATH, **to),  # type: ignore[arg-type]
        *(post(path, {}, port=Port.CONTROL, identity=identity) for path in (CANARY_PATH, PROBE_PATH)),
        *(post(path, {}, port=Port.CONTROL, identity=identity) for path in HARMLESS_POSTS),
        get("/server_info", port=Port.CONTROL, identity=identity),
    )


def _strangers(subject: Subject) -> Steps:
    found: list[Fault] = []
    for identity in STRANGERS:
        if identity not in subject.missing:
            answers = yield control_calls(identity)
            found += each(answers, lambda answer: unauthenticated(answer, subject.state.incarnation))
    return tuple(found)


def unauthenticated(exchange: Exchange, *secrets: str) -> Iterator[Fault]:
    """Nobody that the engine knows."""
    yield from refused(exchange, 401, RefusalReason.UNAUTHENTICATED, *secrets)


def forbidden(exchange: Exchange, *secrets: str) -> Iterator[Fault]:
    """Somebody, but not its operator."""
    yield from refused(exchange, 403, RefusalReason.FORBIDDEN, *secrets)


def _other_account(subject: Subject) -> Steps:
    answers = yield control_calls(Identity.OTHER_ACCOUNT)
    return tuple(each(answers, lambda answer: forbidden(answer, subject.state.incarnation)))


def _without_other_account(subject: Subject) -> str:
    return subject.missing.get(Identity.OTHER_ACCOUNT, "")


def _cures(subject: Subject) -> Steps:
    to = {"port": Port.CONTROL, "identity": Identity.OPERATOR}
    answers = yield (
        *(post(path, {}, port=Port.CONTROL, identity=Identity.OPERATOR) for path in HARMLESS_POSTS),
        *(Call(method="GET", path=path, **to) for path in READS),  # type: ignore[arg-type]
    )
    return tuple(each(answers, cured))


def cured(exchange: Exchange) -> Iterator[Fault]:
    """409, and what to do instead of calling this route."""
    path = exchange.call.path.partition("?")[0]
    yield from refused(exchange, 409, RefusalReason.ORDER_VIOLATION)
    found = refusal_of(exchange)
    if found is not None and path not in found.error.message:
        yield Fault(f"{exchange.call.words}: the refusal does not name {path}", exchange.told)


def _no_control(subject: Subject) -> Steps:
    answers = yield (*(post(path, {}) for path in HARMLESS_POSTS), *(get(path) for path in READS))
    return tuple(each(answers, missing))


def _unknown(subject: Subject) -> Steps:
    answers = yield (*(get(path) for path in UNKNOWN), *(post(path, {}) for path in (STATE_PATH, "/nothing", "/")))
    return tuple(each(answers, missing))


def _spellings(subject: Subject) -> Steps:
    answers = yield tuple(get(path) for path in SPELLINGS)
    return tuple(each(answers, lambda answer: has_status(answer, 400, 404)))  # 400: the server would not read it


def _websockets(subject: Subject) -> Steps:
    answers = yield tuple(Call(Port.SERVING, "GET", path, headers=UPGRADE) for path in ("/v1/realtime", "/nothing"))
    return tuple(each(answers, lambda answer: has_status(answer, 403, 404)))


def _limits(subject: Subject) -> Steps:
    answers = yield tuple(
        post(path, b"{", headers=(("Content-Length", TOO_LONG),)) for path in ("/v1/completions", "/tokenize")
    )
    return tuple(each(answers, lambda answer: refused(answer, 413, RefusalReason.TOO_LARGE)))


CHECKS = (
    Check(
        "identity",
        "control calls without a token, or with one that is forged, unsigned, changed or for another audience, get 401",
        Promise.LOCKED,
        LOOK_AT_RBAC,
        _strangers,
    ),
    Check(
        "other-account",
        "control calls with a valid token of another ServiceAccount get 403",
        Promise.LOCKED,
        LOOK_AT_RBAC,
        _other_account,
        _without_other_account,
    ),
    Check(
        "native-control",
        "vLLM's own control routes answer even the operator 409, with what to do instead",
        Promise.LOCKED,
        LOOK_AT_GUARD,
        _cures,
    ),
    Check(
        "no-control-on-serving",
        "vLLM's control routes do not exist on the serving port",
        Promise.LOCKED,
        LOOK_AT_GUARD,
        _no_control,
    ),
    Check("unknown-routes", "what nobody has classified does not exist", Promise.LOCKED, LOOK_AT_GUARD, _unknown),
    Check(
        "spellings",
        "no other spelling of a path leads to a control route",
        Promise.LOCKED,
        LOOK_AT_GUARD,
        _spellings,
    ),
    Check("websockets", "websockets are refused", Promise.LOCKED, LOOK_AT_GUARD, _websockets),
    Check(
        "body-limits",
        "a body that says it is too long is refused before it is read: 413",
        Promise.LOCKED,
        LOOK_AT_GUARD,
        _limits,
    ),
)
