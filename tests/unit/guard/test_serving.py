"""The serving port: what is let through, what is refused and how, and what stands on the answers."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from rollfleet_engine.guard.middleware import GuardedApp
from rollfleet_engine.guard.routes import ROUTES, RouteClass
from rollfleet_engine.guard.serving import Serving
from rollfleet_protocol.refusals import ClosedReason, Refusal, RefusalReason
from tests.support.guards import OPERATOR_TOKEN, Guarded, eventually, make_config

INFERENCE = sorted(path for (_, path), kind in ROUTES.items() if kind is RouteClass.INFERENCE)
PROBES = sorted(route for route, kind in ROUTES.items() if kind is RouteClass.PROBE)
CONTROL = sorted(route for route, kind in ROUTES.items() if kind is RouteClass.CONTROL)


@pytest.fixture
async def client(guarded: Guarded) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(guarded.serving)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def refusal_of(answer: httpx.Response) -> Refusal:
    refused = Refusal.model_validate_json(answer.content)
    assert refused.error.code == answer.status_code
    return refused


@pytest.mark.parametrize("path", INFERENCE)
async def test_inference_needs_an_open_gate(client: httpx.AsyncClient, guarded: Guarded, path: str) -> None:
    answer = await client.post(path)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert "X-Weight-Version" not in answer.headers
    refused = refusal_of(answer)
    assert refused.error.reason is RefusalReason.CLOSED
    assert refused.error.closed_reason is ClosedReason.STARTING
    assert guarded.app.seen == []

    await guarded.serve_initial()
    answer = await client.post(path)
    assert (answer.status_code, answer.text) == (200, "model")
    assert answer.headers["X-Weight-Version"] == "0"


@pytest.mark.parametrize(("method", "path"), PROBES)
async def test_what_needs_no_weights_is_passed_whatever_the_gate(
    client: httpx.AsyncClient, guarded: Guarded, method: str, path: str
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 200
    assert "X-Weight-Version" not in answer.headers
    assert guarded.app.seen == [path]


@pytest.mark.parametrize(("method", "path"), CONTROL)
async def test_control_routes_do_not_exist_whoever_asks(
    client: httpx.AsyncClient, guarded: Guarded, method: str, path: str
) -> None:
    await guarded.serve_initial()
    for headers in ({}, {"Authorization": f"Bearer {OPERATOR_TOKEN}"}):
        answer = await client.request(method, path, headers=headers)
        assert answer.status_code == 404
        assert refusal_of(answer).error.reason is RefusalReason.NOT_FOUND
    assert guarded.app.seen == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
        ("POST", "//v1/completions"),
        ("POST", "/V1/completions"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/metrics/"),
        ("DELETE", "/v1/models"),
        ("POST", "/rollfleet/v1/open"),
        ("GET", "/rollfleet/v1/state"),
        ("POST", "/something/new"),
        ("OPTIONS", "/pause"),
        ("POST", "/livez"),
    ],
)
async def test_what_is_not_known_is_refused(
    client: httpx.AsyncClient, guarded: Guarded, method: str, path: str
) -> None:
    await guarded.serve_initial()
    assert (await client.request(method, path)).status_code == 404
    assert guarded.app.seen == []


async def test_an_encoded_path_is_judged_as_the_engine_will_read_it(
    client: httpx.AsyncClient, guarded: Guarded
) -> None:
    await guarded.serve_initial()
    assert (await client.post("/%70ause")).status_code == 404
    assert (await client.post("/v1/%63ompletions")).status_code == 200
    assert guarded.app.seen == ["/v1/completions"]


async def test_a_root_path_would_shift_the_routes_and_is_refused(guarded: Guarded) -> None:
    await guarded.serve_initial()
    transport = httpx.ASGITransport(guarded.serving, root_path="/v1/models")  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        assert (await client.get("/v1/models")).status_code == 404
    assert guarded.app.seen == []


async def test_preflight_of_browsers_is_passed(client: httpx.AsyncClient, guarded: Guarded) -> None:
    assert (await client.options("/v1/chat/completions")).status_code == 200
    assert guarded.app.seen == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("X-Weight-Version-Required", "1", 200),
        ("X-Weight-Version-Required", "0", 409),
        ("X-Weight-Version-Required", "2", 409),
        ("X-Weight-Version-Min", "0", 200),
        ("X-Weight-Version-Min", "1", 200),
        ("X-Weight-Version-Min", "2", 409),
        ("X-Weight-Version-Min", "9" * 4000, 400),
        ("X-Weight-Version-Required", "one", 400),
        ("X-Weight-Version-Required", "-1", 400),
        ("X-Weight-Version-Required", "", 400),
        ("X-Weight-Version-Other", "7", 200),
    ],
)
async def test_a_client_may_demand_a_version(
    client: httpx.AsyncClient, guarded: Guarded, header: str, value: str, status: int
) -> None:
    await guarded.serve_initial()
    await guarded.update(2, 1)
    answer = await client.post("/v1/completions", headers={header: value})
    assert answer.status_code == status
    if status == 409:
        assert refusal_of(answer).error.reason is RefusalReason.WRONG_VERSION
        assert answer.headers["X-Weight-Version"] == "1"


async def test_one_of_two_demands_that_cannot_be_met_is_enough(client: httpx.AsyncClient, guarded: Guarded) -> None:
    await guarded.serve_initial()
    headers = [("X-Weight-Version-Min", "0"), ("X-Weight-Version-Required", "3")]
    assert (await client.post("/v1/completions", headers=headers)).status_code == 409


async def test_an_answer_tells_the_version_at_admission(client: httpx.AsyncClient, guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = True
    asking = asyncio.create_task(client.post("/v1/completions"))
    await eventually(lambda: guarded.state.in_flight == 1)
    await guarded.close(2, 1)
    assert (await asking).headers["X-Weight-Version"] == "0"


async def test_live_and_ready(client: httpx.AsyncClient, guarded: Guarded) -> None:
    async def statuses() -> tuple[int, int]:
        return (await client.get("/livez")).status_code, (await client.get("/readyz")).status_code

    assert await statuses() == (200, 503)
    await guarded.serve_initial()
    assert await statuses() == (200, 200)
    await guarded.close(2, 1)
    assert await statuses() == (200, 200)  # an ordinary update changes no membership
    guarded.engine.is_alive = False
    assert (await statuses())[0] == 503


async def test_a_guard_that_cannot_be_controlled_is_not_live(client: httpx.AsyncClient, guarded: Guarded) -> None:
    guarded.service.break_down("the control port is gone")
    answer = await client.get("/livez")
    assert (answer.status_code, answer.json()) == (503, {"status": "the control port is gone"})


async def test_a_client_that_goes_away_is_not_in_flight_for_ever(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.app.hold = True

    async def never() -> dict[str, object]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(_: object) -> None: ...

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asking = asyncio.create_task(guarded.serving(scope, never, send))  # type: ignore[arg-type]
    await eventually(lambda: guarded.state.in_flight == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert guarded.state.in_flight == 0


async def test_an_engine_that_raises_leaves_nothing_in_flight(client: httpx.AsyncClient, guarded: Guarded) -> None:
    await guarded.serve_initial()

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    guarded.serving._app = broken
    with pytest.raises(ZeroDivisionError):
        await client.post("/v1/completions")
    assert guarded.state.in_flight == 0


@pytest.mark.parametrize("can_answer", [True, False])
async def test_websockets_are_refused(guarded: Guarded, can_answer: bool) -> None:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    app = GuardedApp(guarded.app, config=make_config(), adapter_of=lambda _: guarded.engine, log=guarded.log)
    extensions = {"websocket.http.response": {}} if can_answer else {}
    await app({"type": "websocket", "path": "/v1/realtime", "extensions": extensions}, receive, send)
    assert sent[0].get("status", sent[0].get("code")) == (404 if can_answer else 1008)
    assert guarded.app.seen == []


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_rank_must_be_one_of_the_engine_s(guarded: Guarded, ranks: int) -> None:
    serving = Serving(guarded.app, guarded.turnstile, guarded.service, guarded.waiting, ranks)
    await guarded.serve_initial()
    transport = httpx.ASGITransport(serving)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        for value in ("-1", "abc", "", "1.0", "+0", str(ranks), "10000000000"):
            answer = await client.post("/v1/completions", headers={"X-Data-Parallel-Rank": value})
            assert answer.status_code == 400, value
            assert f"0 to {ranks - 1}" in refusal_of(answer).error.message
        for rank in range(ranks):
            answer = await client.post("/v1/completions", headers={"X-Data-Parallel-Rank": str(rank)})
            assert answer.status_code == 200


@pytest.mark.parametrize("name", ["qwen-2-0", ""])
async def test_an_answer_tells_which_engine_it_is_of(guarded: Guarded, name: str) -> None:
    serving = Serving(guarded.app, guarded.turnstile, guarded.service, guarded.waiting, name=name)
    await guarded.serve_initial()
    transport = httpx.ASGITransport(serving)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post("/v1/completions")
    assert answer.headers.get("X-Rollfleet-Engine", "") == name
