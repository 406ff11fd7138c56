"""Every route of the engine that really runs has a class, and its class is what happens on both ports."""

import httpx
import pytest
from starlette.routing import Route

from rollfleet_cli.conformance.checks.judging import missing
from rollfleet_cli.conformance.checks.locked import cured
from rollfleet_engine.guard.routes import ROUTES, RouteClass, classify
from rollfleet_engine.simulator.adapter import RELEASE
from rollfleet_engine.simulator.app import Settings, build_app
from rollfleet_engine.simulator.core import Core
from rollfleet_engine.simulator.requests import Limits
from rollfleet_engine.simulator.weights import HeldWeights
from tests.contract.client import Client, Operator
from tests.contract.conforming import exchange_of
from tests.contract.process import EngineProcess

CONTROL = sorted(path for (_, path), found in ROUTES.items() if found is RouteClass.CONTROL)
DOCUMENTATION = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}


def _concrete(path: str) -> str:
    return path.replace("{response_id}", "resp_1")


def test_the_table_that_runs_is_the_one_that_was_thought_about(engine: EngineProcess):
    routes = engine.routes()
    assert len(routes) > 40
    for method, path in routes:
        refused = path in DOCUMENTATION or "{response_id}" in path
        assert refused or classify(method, path) is not None, f"{method} {path} has no class"


def test_the_simulator_has_the_routes_of_its_release(engine: EngineProcess):
    """Another release of real vLLM has all of them too, and more."""
    app = build_app(Core(HeldWeights((), ""), 0, lambda: True), Settings("", Limits("policy", 1), False))
    simulated = {(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods}
    real = {(method, path) for method, path in engine.routes() if path not in DOCUMENTATION}
    assert simulated <= real
    assert real == simulated or engine.kind.release != RELEASE


def test_c14_control_routes_do_not_exist_on_the_serving_port(engine: EngineProcess, client: Client, operator: Operator):
    for method, path in sorted(engine.routes()):
        if classify(method, path) is RouteClass.CONTROL:
            for headers in ({}, {"Authorization": f"Bearer {operator.token}"}):
                answer = client.http.request(method, path, headers=headers, json={})
                assert tuple(missing(exchange_of(answer))) == ()


def test_stored_responses_are_refused(engine: EngineProcess, client: Client):
    for method, path in engine.routes():
        if "{response_id}" in path:
            assert client.http.request(method, _concrete(path)).status_code == 404


@pytest.mark.parametrize(
    "path", ["/pause", "/PAUSE", "/pause?mode=abort", "/v1/../pause", "/%70ause", "/v1/models/../../pause", "/./pause"]
)
def test_spellings_of_a_control_route_lead_nowhere(engine: EngineProcess, operator: Operator, path: str):
    before = operator.state()
    raw = httpx.URL(engine.serving_url).copy_with(raw_path=path.encode())
    with httpx.Client() as http:
        assert http.post(raw).status_code == 404
    assert operator.state().paused == before.paused


def test_c14_native_control_routes_answer_409_with_the_cure_on_the_control_port(
    engine: EngineProcess, operator: Operator
):
    asked = 0
    for method, path in sorted(engine.routes()):
        if classify(method, path) is RouteClass.CONTROL:
            answer = operator.request(method, path, json={})
            assert tuple(cured(exchange_of(answer))) == ()
            asked += 1
    assert asked > 15


def test_probes_and_tokenizer_routes_pass_whatever_the_gate(engine: EngineProcess, client: Client, serving: Operator):
    epoch = serving.next_epoch()
    serving.close(epoch, 1)
    try:
        for path in ("/health", "/version", "/metrics", "/v1/models", "/livez", "/load", "/ping"):
            assert client.get(path).status_code == 200, path
        tokens = client.http.post("/tokenize", json={"model": "policy", "prompt": "abc"}).json()
        assert tokens["tokens"] == [66, 67, 68]
        assert client.http.post("/detokenize", json={"model": "policy", "tokens": [66]}).json()["prompt"] == "a"
        assert client.get("/version").json() == {"version": engine.kind.release}
        assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
    finally:
        serving.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def test_inference_routes_are_refused_while_closed(engine: EngineProcess, client: Client, serving: Operator):
    epoch = serving.next_epoch()
    serving.close(epoch, 1)
    try:
        inference = [route for route in engine.routes() if classify(*route) is RouteClass.INFERENCE]
        assert len(inference) >= 6
        for method, path in inference:
            answer = client.http.request(method, path, json={})
            assert answer.status_code == 503, f"{method} {path}"
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["reason"] == "Closed"
            assert answer.json()["error"]["closedReason"] == "Updating"
    finally:
        serving.do("cancel", epoch)
