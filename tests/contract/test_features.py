"""An engine of which a spec asks for more than completions: it starts with every word that the launcher says."""

import json
from collections.abc import Iterator

import pytest

from rollfleet_cli.conformance.running import Result
from tests.contract.client import Operator
from tests.contract.conforming import BY_ID, run
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
def operator(featured: EngineProcess, site: Site) -> Iterator[Operator]:
    one = Operator(featured, site)
    one.serve_initial()
    yield one
    one.close_client()


def test_it_was_started_with_them(featured: EngineProcess):
    argv = json.loads(next(line for line in featured.log().splitlines() if '"event": "plan"' in line))["argv"]
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert argv[argv.index("--max-logprobs") + 1] == str(MOST)
    assert json.loads(argv[argv.index("--additional-config") + 1]) == {"of": {"another": "platform"}}


@pytest.mark.parametrize("name", ["facts", "token-endpoint", "logprobs", "chat", "tool-calling"])
def test_c21_what_the_spec_asks_for_is_there(featured: EngineProcess, site: Site, operator: Operator, name: str):
    """As `rollfleet conformance` checks it. Without both flags vLLM refuses tools that the model may choose."""
    verdict = run(featured, site, operator, BY_ID[name])
    assert (verdict.result, verdict.faults) == (Result.PASSED, ())
