"""What clients and the kubelet see: liveness, readiness, and an operator that went silent."""

# Versions demanded and told, errors, chat and token ids: checks of conformance, in test_conformance.py.

import time

from rollfleet_protocol.state import Gate, WeightsState
from tests.contract.client import LONG_ANSWER, Client, Operator, held
from tests.contract.models import Models
from tests.contract.process import until


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
    serving.close(epoch, 2, silence_s=6.0)
    assert client.complete("abc", 1).status == 503
    until(lambda: client.complete("abc", 1).status == 200, 40, "reopened by itself")
    answer = client.complete(models.short_prompt, 8)
    assert (answer.version, answer.text) == (1, models.answer(1, models.short_prompt)[:8])
    state = serving.state()
    assert (state.gate, state.paused, state.armed) == (Gate.OPEN, False, False)


def test_an_operator_that_polls_is_not_silent(serving: Operator, client: Client):
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2, silence_s=6.0)
    until_s = time.monotonic() + 8
    while time.monotonic() < until_s:
        state = serving.state(after=state.sequence, wait_s=5)  # it is held for a third of the silence
        assert state.gate is Gate.CLOSED
    assert client.complete("abc", 1).status == 503
    serving.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def test_an_armed_engine_waits_for_its_operator(serving: Operator, client: Client):
    epoch = serving.next_epoch()
    serving.close(epoch, 2, silence_s=3.0)
    serving.do("arm", epoch)
    state = serving.state()
    assert serving.state(after=state.sequence, wait_s=5).sequence == state.sequence
    assert client.complete("abc", 1).status == 503
    serving.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def test_a_client_that_goes_away_is_not_counted(serving: Operator, client: Client):
    stream = client.stream("abc", LONG_ANSWER)
    with stream.open() as pieces:
        next(pieces)
        assert serving.state().in_flight == 1
    until(lambda: serving.state().in_flight == 0, 10, "the abandoned request left")
