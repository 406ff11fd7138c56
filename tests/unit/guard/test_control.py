"""The control port's application: who gets in, what is answered, and in what bounds."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from rollfleet_engine.guard.audit import DENIALS_EVERY_S, READS_EVERY_S
from rollfleet_engine.guard.control import COMMANDS, LARGEST_BODY, ControlApp
from rollfleet_engine.guard.routes import ROUTES, RouteClass
from rollfleet_protocol.commands import LOOK_PATH, Command
from rollfleet_protocol.refusals import Refusal, RefusalReason
from rollfleet_protocol.state import EngineState, Gate
from tests.support.guards import OPERATOR, OPERATOR_TOKEN, SILENCE_S, TOKENS, Guarded, MemoryVerifier, eventually

STATE = "/rollfleet/v1/state"
OPERATOR_NAMES = (OPERATOR.subject, OPERATOR.uid)
IDENTIFIED = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}


@pytest.fixture
async def client(guarded: Guarded) -> AsyncIterator[httpx.AsyncClient]:
    app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="https://guard", headers=IDENTIFIED) as client:
        yield client


def scope_of(method: str, path: str, query: bytes = b"") -> dict[str, object]:
    """A request of the operator, for what httpx cannot do."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"authorization", IDENTIFIED["Authorization"].encode())],
        "query_string": query,
        "root_path": "",
        "server": ("guard", 8001),
        "scheme": "https",
        "http_version": "1.1",
    }


def reason_of(answer: httpx.Response) -> RefusalReason:
    refused = Refusal.model_validate_json(answer.content)
    assert refused.error.code == answer.status_code
    assert refused.error.message
    return refused.error.reason


def verify_0(guarded: Guarded, **changes: object) -> dict[str, object]:
    incarnation = guarded.service.incarnation
    return {"incarnation": incarnation, "epoch": 1, "version": 0, "probeTokens": TOKENS, "deadlineSeconds": 5} | changes


@pytest.mark.parametrize(
    "path", [STATE, "/rollfleet/v1/open", "/pause", "/collective_rpc", "/v1/completions", "/", "/x"]
)
@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Basic b3BlcmF0b3I6", 401),
        ("Bearer ", 401),
        ("Bearer rubbish", 401),
        (f"Bearer {OPERATOR.subject}/another-uid", 403),
        ("Bearer system:serviceaccount:rl:grpo/trainer-uid", 403),
    ],
)
async def test_nobody_else_gets_in(
    client: httpx.AsyncClient, guarded: Guarded, path: str, header: str | None, status: int
) -> None:
    del client.headers["Authorization"]
    before = guarded.state.sequence
    for method in ("GET", "POST"):
        answer = await client.request(method, path, headers={} if header is None else {"Authorization": header})
        assert answer.status_code == status
        expected = RefusalReason.UNAUTHENTICATED if status == 401 else RefusalReason.FORBIDDEN
        assert reason_of(answer) is expected
    assert guarded.state.sequence == before


async def test_two_identities_at_once_are_none(client: httpx.AsyncClient) -> None:
    headers = [("Authorization", f"Bearer {OPERATOR_TOKEN}"), ("Authorization", "Bearer x/y")]
    del client.headers["Authorization"]
    assert (await client.get(STATE, headers=headers)).status_code == 401


@pytest.mark.looptime
async def test_who_only_looks_is_not_taken_for_the_operator(client: httpx.AsyncClient, guarded: Guarded) -> None:
    """A person who looks at a hung update must not keep it from reopening."""
    await guarded.serve_initial()
    await guarded.close(2, 1)
    loop = asyncio.get_running_loop()
    end = loop.time() + 2 * SILENCE_S
    gates = set()
    while loop.time() < end:
        answer = await client.get(LOOK_PATH)
        gates.add(EngineState.model_validate_json(answer.content).gate)
        await asyncio.sleep(SILENCE_S / 10)
    assert gates == {Gate.CLOSED, Gate.OPEN}, "told all the while, and reopened"


async def test_the_state_is_told(client: httpx.AsyncClient, guarded: Guarded) -> None:
    answer = await client.get(STATE)
    assert answer.status_code == 200
    assert EngineState.model_validate_json(answer.content).incarnation == guarded.service.incarnation


@pytest.mark.parametrize(
    "query", ["after=x", "waitSeconds=x", "after=1&waitSeconds=56", "waitSeconds=-1", "waitSeconds=nan"]
)
async def test_bad_polls_are_refused(client: httpx.AsyncClient, query: str) -> None:
    assert reason_of(await client.get(f"{STATE}?{query}")) is RefusalReason.INVALID_REQUEST


async def test_a_long_poll_returns_at_the_next_change(client: httpx.AsyncClient, guarded: Guarded) -> None:
    polling = asyncio.create_task(client.get(STATE, params={"after": guarded.state.sequence, "waitSeconds": 55}))
    await eventually(lambda: guarded.service._followers == 1)
    answer = await client.post("/rollfleet/v1/verify", json=verify_0(guarded))
    assert answer.status_code == 202
    assert EngineState.model_validate_json((await polling).content).operation is not None


async def test_a_follower_that_went_away_makes_room(guarded: Guarded) -> None:
    app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)
    went = asyncio.Event()

    async def receive() -> dict[str, object]:
        await went.wait()
        return {"type": "http.disconnect"}

    async def send(_: object) -> None: ...

    query = f"after={guarded.state.sequence}&waitSeconds=55".encode()
    polling = asyncio.create_task(app(scope_of("GET", STATE, query), receive, send))  # type: ignore[arg-type]
    await eventually(lambda: guarded.service._followers == 1)
    went.set()
    await polling
    await eventually(lambda: guarded.service._followers == 0)


async def test_a_verified_engine_is_opened_at_once(client: httpx.AsyncClient, guarded: Guarded) -> None:
    await client.post("/rollfleet/v1/verify", json=verify_0(guarded))
    await guarded.ended()
    body = {"incarnation": guarded.service.incarnation, "epoch": 1, "version": 0}
    answer = await client.post("/rollfleet/v1/open", json=body)
    assert answer.status_code == 200
    assert EngineState.model_validate_json(answer.content).gate is Gate.OPEN


async def test_refusals_name_their_reason(client: httpx.AsyncClient, guarded: Guarded) -> None:
    me = guarded.service.incarnation
    asked = {
        RefusalReason.WRONG_INCARNATION: ("open", {"incarnation": "another", "epoch": 1, "version": 0}),
        RefusalReason.NOT_VERIFIED: ("open", {"incarnation": me, "epoch": 7, "version": 0}),
        RefusalReason.STALE_EPOCH: ("cancel", {"incarnation": me, "epoch": 6}),
        RefusalReason.ORDER_VIOLATION: ("arm", {"incarnation": me, "epoch": 7}),
    }
    for reason, (command, body) in asked.items():
        answer = await client.post(f"/rollfleet/v1/{command}", json=body)
        assert answer.status_code == 409
        assert reason_of(answer) is reason


BAD_BODIES = {
    "nothing": b"",
    "not JSON": b"{",
    "a list": b"[]",
    "an unknown field": b'{"incarnation": "x", "epoch": 1, "versoin": 0, "version": 0}',
    "no epoch": b'{"incarnation": "x", "version": 0}',
    "epoch 0": b'{"incarnation": "x", "epoch": 0, "version": 0}',
    "a negative version": b'{"incarnation": "x", "epoch": 1, "version": -1}',
    "pickle": b"\x80\x04\x95",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_bad_bodies_are_refused(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/rollfleet/v1/open", content=body)
    assert answer.status_code == 400
    assert reason_of(answer) is RefusalReason.INVALID_REQUEST


async def test_the_field_that_is_wrong_is_named(client: httpx.AsyncClient, guarded: Guarded) -> None:
    answer = await client.post("/rollfleet/v1/verify", json=verify_0(guarded, probeTokens=[1]))
    assert "probeTokens" in answer.json()["error"]["message"]


def test_every_command_of_the_protocol_has_a_route() -> None:
    assert set(COMMANDS.values()) == set(Command.__subclasses__())


async def test_bodies_are_bounded(client: httpx.AsyncClient) -> None:
    answer = await client.post("/rollfleet/v1/open", content=b" " * (LARGEST_BODY + 1))
    assert answer.status_code == 413
    assert reason_of(answer) is RefusalReason.TOO_LARGE


@pytest.mark.looptime
async def test_a_body_that_never_comes_is_given_up(guarded: Guarded) -> None:
    app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await app(scope_of("POST", "/rollfleet/v1/open"), receive, send)
    assert sent[0]["status"] == 408


CONTROL_ROUTES = sorted(route for route, kind in ROUTES.items() if kind is RouteClass.CONTROL)


@pytest.mark.parametrize(("method", "path"), CONTROL_ROUTES)
async def test_native_control_routes_answer_with_the_cure(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 409
    assert reason_of(answer) is RefusalReason.ORDER_VIOLATION
    assert answer.json()["error"]["message"].startswith(f"{path} of the engine is closed to everybody: ")


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/health", "/metrics", "/", "/rollfleet/v1", "/rollfleet/v1/state/"]
)
async def test_nothing_else_is_on_the_control_port(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        assert reason_of(await client.request(method, path)) is RefusalReason.NOT_FOUND


async def test_every_command_is_logged_with_caller_and_outcome(client: httpx.AsyncClient, guarded: Guarded) -> None:
    await client.post("/rollfleet/v1/verify", json=verify_0(guarded))
    await client.post("/rollfleet/v1/cancel", json={"incarnation": "another", "epoch": 5})
    lines = guarded.lines("control")
    assert [(line["command"], line["epoch"], line["outcome"], line["status"]) for line in lines] == [
        ("verify", 1, "Accepted", 202),
        ("cancel", 5, "WrongIncarnation", 409),
    ]
    assert {(line["caller"], line["uid"], line["role"]) for line in lines} == {(*OPERATOR_NAMES, "operator")}
    assert [line["incarnation"] for line in lines] == [guarded.service.incarnation, "another"]
    assert all(line["peer"] == "127.0.0.1:123" and line["milliseconds"] >= 0 for line in lines)
    assert OPERATOR_TOKEN not in guarded.stream.getvalue()


@pytest.mark.looptime
async def test_strangers_cannot_fill_the_log_and_all_of_them_are_counted(
    client: httpx.AsyncClient, guarded: Guarded
) -> None:
    for _ in range(100):
        await client.get(STATE, headers={"Authorization": "Bearer x"})
    assert len(guarded.lines("control.denied")) == 1
    await asyncio.sleep(DENIALS_EVERY_S + 0.1)
    first, rest = guarded.lines("control.denied")
    assert (first["status"], first["outcome"], first["path"]) == (401, "Unauthenticated", STATE)
    assert rest["unreported"] == 98
    assert guarded.service.tallies.control == {("state", "Unauthenticated"): 100}


@pytest.mark.looptime
async def test_reads_are_told_when_they_begin_and_then_as_a_sum(client: httpx.AsyncClient, guarded: Guarded) -> None:
    for _ in range(10):
        await client.get(STATE)
    await asyncio.sleep(READS_EVERY_S + 1)
    assert [(line["caller"], line["count"]) for line in guarded.lines("control.reads")] == [
        (OPERATOR.subject, 1),
        (OPERATOR.subject, 9),
    ]


async def test_words_of_a_caller_are_shown_as_text_and_bounded(client: httpx.AsyncClient, guarded: Guarded) -> None:
    command = {"incarnation": "\x1b[2J\u202e" + "x" * 5000, "epoch": 5}
    await client.post("/rollfleet/v1/cancel", json=command)
    await client.get("/" + "y" * 5000)
    cancel, unknown = guarded.lines("control")
    assert cancel["incarnation"].startswith("\\x1b[2J\\u202exxx")
    assert len(cancel["incarnation"]) < 300
    assert (unknown["command"], unknown["outcome"], len(unknown["path"])) == ("unknown", "NotFound", 200)


async def test_who_goes_away_in_mid_command_is_told_as_gone(guarded: Guarded) -> None:
    app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        """To nobody."""

    await app(scope_of("POST", "/rollfleet/v1/open"), receive, send)
    assert [(line["command"], line["outcome"], line["status"]) for line in guarded.lines("control")] == [
        ("open", "Gone", None)
    ]


def test_there_is_a_route_for_each_command() -> None:
    assert {model.__name__.lower() for model in COMMANDS.values()} == set(COMMANDS)
