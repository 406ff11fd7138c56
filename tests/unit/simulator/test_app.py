"""The HTTP surface without a guard, in the words that vLLM 0.27.1 was seen to use."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from rollfleet_engine.simulator.app import Settings, build_app
from rollfleet_engine.simulator.core import Core
from rollfleet_engine.simulator.model import greedy
from rollfleet_engine.simulator.requests import Limits
from rollfleet_engine.simulator.tokens import decode, encode
from rollfleet_engine.simulator.weights import HeldWeights, elements_by_layer
from rollfleet_engine.weights.coverage import layer_of
from rollfleet_kernels.digest import TensorDigest

DIGEST = "sha256:test"


@pytest.fixture
def core() -> Core:
    return Core(HeldWeights((), DIGEST), 0.0, lambda: True)


@pytest.fixture
async def http(core: Core) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(core, Settings("/model", Limits("policy", 100), tell_cached_tokens=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client


async def test_completion(http: httpx.AsyncClient):
    body = {"model": "policy", "prompt": "abc", "max_tokens": 4, "logprobs": 2, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    tokens = greedy(DIGEST, encode("abc"), 4)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (decode(tokens), "length", list(tokens))
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    for token, logprob, top in zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert max(top, key=lambda text: top[text]) == decode([token])
        assert top[decode([token])] == logprob
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 7,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
    }


async def test_token_ids_and_text_are_the_same_prompt(http: httpx.AsyncClient):
    answers = [
        (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})).json()["choices"][0]["text"]
        for prompt in ("abc", list(encode("abc")))
    ]
    assert answers[0] == answers[1]


async def _events(http: httpx.AsyncClient, route: str, body: dict) -> list[dict]:
    text = (await http.post(route, json=body | {"stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_streamed_completion(http: httpx.AsyncClient):
    body = {"prompt": "abc", "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, last = await _events(http, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == decode(greedy(DIGEST, encode("abc"), 3))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_chat(http: httpx.AsyncClient):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    expected = decode(greedy(DIGEST, encode("user: hi\nassistant:"), 3))
    choice = answer["choices"][0]
    assert choice["message"]["content"] == expected
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list(expected)
    first, *chunks = await _events(http, "/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected


async def test_tokens_in_tokens_out(http: httpx.AsyncClient):
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}}
    answer = (await http.post("/inference/v1/generate", json=body)).json()
    assert answer["choices"][0]["token_ids"] == list(greedy(DIGEST, (1, 2, 3), 5))


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"model": "other", "prompt": "a"}, 404, "`other`"),
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 101}, 400, "max_model_len"),
        ({"prompt": "a" * 99, "max_tokens": 2}, 400, "maximum context length"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "n": 2}, 400, "body.n"),
        ({"prompt": [98]}, 400, "prompt"),
    ],
)
async def test_bad_requests(http: httpx.AsyncClient, body: dict, status: int, word: str):
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    assert word in error["message"]


async def test_bodies_that_are_not_json(http: httpx.AsyncClient):
    assert (await http.post("/v1/completions", content=b"abc")).status_code == 400
    bad = await http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert bad.status_code == 400
    assert "JSON" in bad.json()["error"]["message"]


async def test_a_dead_core_is_told(http: httpx.AsyncClient, core: Core):
    core._alive = lambda: False
    assert (await http.get("/health")).status_code == 503
    answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert "EngineCore" in answer.json()["error"]["message"]


async def test_metrics_have_vllms_names(http: httpx.AsyncClient):
    await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    text = (await http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="policy"} 2' in text
    assert 'vllm:num_requests_running{engine="0",model_name="policy"} 0' in text


async def test_what_is_not_simulated_says_so(http: httpx.AsyncClient):
    answer = await http.post("/v1/responses", json={})
    assert answer.status_code == 501
    assert "/v1/responses" in answer.json()["error"]["message"]


def test_layers_of_tensor_names():
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3"
    assert layer_of("model.embed_tokens.weight") == "embed_tokens"
    assert layer_of("lm_head.weight") == "lm_head"
    tensors = [
        TensorDigest("model.layers.0.a.weight", "F32", (2, 3), (0, 0)),
        TensorDigest("model.layers.0.b.weight", "F32", (4,), (0, 0)),
        TensorDigest("lm_head.weight", "F32", (5,), (0, 0)),
    ]
    assert elements_by_layer(tensors) == {"model.layers.0": 10, "lm_head": 5}
