"""An engine of which a spec asks for more than completions: it starts with every word that the launcher says."""

import json
from collections.abc import Iterator

import pytest

from tests.contract.client import Client, Operator
from tests.contract.conftest import run_engine
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site

MOST = 3
FEATURES = {
    "tokenEndpoint": "Enabled",
    "toolParser": "hermes",
    "logprobsMode": "processed_logprobs",
    "maxLogprobs": MOST,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def featured(kind: Kind, site: Site, models: Models) -> Iterator[EngineProcess]:
    yield from run_engine(
        kind,
        site,
        "featured",
        models.folder(0),
        models,
        features=FEATURES,
        sleepMode=True,
        additionalConfig={"of": {"another": "platform"}},
        compilationConfig={"cudagraph_mode": "NONE"},
    )


@pytest.fixture(scope="module")
def client(featured: EngineProcess, site: Site) -> Iterator[Client]:
    operator = Operator(featured, site)
    operator.serve_initial()
    one = Client(featured)
    yield one
    one.close_client()
    operator.close_client()


def test_it_was_started_with_them(featured: EngineProcess):
    argv = json.loads(next(line for line in featured.log().splitlines() if '"event": "plan"' in line))["argv"]
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert argv[argv.index("--max-logprobs") + 1] == str(MOST)
    assert json.loads(argv[argv.index("--additional-config") + 1]) == {"of": {"another": "platform"}}


def test_tokens_go_in_and_out(client: Client):
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
    answer = client.http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
    assert answer.headers["X-Weight-Version"] == "0"


@pytest.mark.parametrize(("count", "status"), [(MOST, 200), (MOST + 1, 400)])
def test_log_probabilities_are_bounded(client: Client, models: Models, count: int, status: int):
    answer = client.complete(models.short_prompt, 2, logprobs=count)
    assert answer.status == status
    if status == 400:
        assert f"greater than max allowed: {MOST}" in json.dumps(answer.body)


def test_c21_tools_may_be_offered(client: Client):
    """Without both flags vLLM refuses tools that the model may choose."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "look"}],
        "max_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "auto",
    }
    answer = client.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
