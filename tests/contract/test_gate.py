"""What clients and the kubelet see: versions demanded, liveness, readiness, and an operator that went silent."""

import pytest

from rollfleet_protocol.state import Gate, WeightsState
from tests.contract.client import LONG_ANSWER, Client, Operator, held
from tests.contract.models import Models
from tests.contract.process import until


def test_demanded_versions(serving: Operator, client: Client):
    for headers in (
        {"X-Weight-Version-Required": "1"},
        {"X-Weight-Version-Min": "1"},
        {"X-Weight-Version-Min": "0"},
        {"x-weight-version-required": "1", "x-weight-version-min": "1"},
    ):
        answer = client.complete("abc", 1, headers=headers)
        assert (answer.status, answer.version) == (200, 1), headers
    for headers in (
        {"X-Weight-Version-Required": "2"},
        {"X-Weight-Version-Required": "0"},
        {"X-Weight-Version-Min": "2"},
        {"X-Weight-Version-Required": "1", "X-Weight-Version-Min": "2"},
    ):
        answer = client.complete("abc", 1, headers=headers)
        assert (answer.status, answer.version) == (409, 1), headers
        assert answer.body["error"]["reason"] == "WrongVersion"
    for value in ("", "-1", "one", "1.0", "0x1"):
        assert client.complete("abc", 1, headers={"X-Weight-Version-Required": value}).status == 400, value


def test_a_client_cannot_choose_the_version_that_an_answer_names(serving: Operator, client: Client):
    answer = client.complete("abc", 1, headers={"X-Weight-Version": "77"})
    assert answer.version == 1
    assert answer.headers.get_list("X-Weight-Version") == ["1"]


def test_errors_of_the_engine_carry_the_version_too(serving: Operator, client: Client):
    answer = client.complete("abc", 5000)
    assert (answer.status, answer.version) == (400, 1)
    assert "max_model_len" in answer.body["error"]["message"]
    assert client.http.post("/v1/completions", json={"model": "other", "prompt": "abc"}).status_code == 404


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/inference/v1/generate"])
def test_other_inference_routes(serving: Operator, client: Client, route: str):
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}},
    }[route]
    answer = client.http.post(route, json={"model": "policy", "temperature": 0, **body})
    assert answer.status_code == 200
    assert answer.headers["X-Weight-Version"] == "1"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_chat_can_be_streamed(serving: Operator, client: Client):
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    whole = client.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with client.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["X-Weight-Version"] == "1"
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2].replace(" ", "")
    assert len(whole) == 5


def test_live_and_ready(serving: Operator, client: Client):
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 200
    epoch = serving.next_epoch()
    serving.close(epoch, 2)
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 200  # an ordinary update is no reason to leave the serving set
    serving.do("cancel", epoch)


def test_an_engine_that_was_never_opened_is_live_but_not_ready(fresh_operator: Operator, fresh_client: Client):
    """Whichever test comes first at the fresh engine sees it closed; from then on it serves version 0."""
    if fresh_operator.state().gate is Gate.CLOSED:
        assert fresh_client.get("/livez").status_code == 200
        assert fresh_client.get("/readyz").status_code == 503
        answer = fresh_client.complete("abc", 1)
        assert (answer.status, answer.body["error"]["closedReason"]) == (503, "Starting")
        assert held(fresh_operator.state())[0] is WeightsState.INITIAL
        fresh_operator.serve_initial()
    assert fresh_client.get("/readyz").status_code == 200
    assert fresh_client.complete("abc", 1).version == 0
    assert held(fresh_operator.state()) == (WeightsState.VERIFIED, 0, None)


def test_initial_weights_are_those_of_the_model(fresh_operator: Operator, fresh_client: Client, models: Models):
    if fresh_operator.state().gate is Gate.CLOSED:
        fresh_operator.serve_initial()
    answer = fresh_client.complete(models.short_prompt, 16)
    assert (answer.version, answer.text) == (0, models.answer(2, models.short_prompt)[:16])


def test_a_silent_operator_before_arming_reopens_the_old_version(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    serving.close(epoch, 2, silence_s=1.0)
    assert client.complete("abc", 1).status == 503
    until(lambda: client.complete("abc", 1).status == 200, 10, "reopened by itself")
    answer = client.complete(models.short_prompt, 8)
    assert (answer.version, answer.text) == (1, models.answer(1, models.short_prompt)[:8])
    state = serving.state()
    assert (state.gate, state.paused, state.armed) == (Gate.OPEN, False, False)


def test_an_operator_that_polls_is_not_silent(serving: Operator, client: Client):
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2, silence_s=1.0)
    for _ in range(6):
        state = serving.state(after=state.sequence, wait_s=0.5)
        assert state.gate is Gate.CLOSED
    assert client.complete("abc", 1).status == 503
    serving.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def test_an_armed_engine_waits_for_its_operator(serving: Operator, client: Client):
    epoch = serving.next_epoch()
    serving.close(epoch, 2, silence_s=0.5)
    serving.do("arm", epoch)
    state = serving.state()
    assert serving.state(after=state.sequence, wait_s=2.5).sequence == state.sequence
    assert client.complete("abc", 1).status == 503
    serving.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def test_a_client_that_goes_away_is_not_counted(serving: Operator, client: Client):
    stream = client.stream("abc", LONG_ANSWER)
    with stream.open() as pieces:
        next(pieces)
        assert serving.state().in_flight == 1
    until(lambda: serving.state().in_flight == 0, 10, "the abandoned request left")
