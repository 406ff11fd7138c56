"""The commands of an engine of several pods: one leads, the others hold workers."""

from typing import Any

from rollfleet_engine.launch.facts import EngineKind, Installation
from rollfleet_engine.launch.plan import Plan, Refused, plan
from tests.unit.launch.conftest import build_config, build_facts

NODES = {"count": 2, "waitSeconds": 60}
PLACE = {"node": 0, "leader": "qwen-0-0-a", "leaderHost": "qwen-0-0.qwen-engines.rl.svc"}


def planned(config: dict[str, Any], **facts: Any) -> Plan:
    found = plan(build_config(**config), build_facts(**facts))
    assert isinstance(found, Plan), found
    return found


def value(argv: tuple[str, ...], option: str) -> str:
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


def test_only_the_leading_pod_has_a_server_and_a_guard():
    config = {"nodes": NODES, "tensorParallelSize": 2, "engineArgs": ["--enforce-eager"]}
    leads = planned(config | {"place": PLACE})
    follows = planned(config | {"place": PLACE | {"node": 1}})
    assert leads.argv[2] == "vllm.entrypoints.openai.api_server"
    assert follows.argv[2] == "rollfleet_engine.vllm.follower"
    own = {"--host", "--port", "--api-server-count", "--middleware", "--disable-uvicorn-access-log"}
    assert own <= set(leads.argv)
    assert not own & set(follows.argv)
    assert ("--headless" in leads.argv, "--headless" in follows.argv) == (False, True)
    for found, node in ((leads, "0"), (follows, "1")):
        assert (value(found.argv, "--nnodes"), value(found.argv, "--node-rank")) == ("2", node)
        assert found.argv[-1] == "--enforce-eager"


def test_a_simulated_follower_is_a_simulator_that_serves_nobody():
    config = {"nodes": NODES, "place": PLACE | {"node": 1}, "tensorParallelSize": 2}
    installation = Installation(python="/py", distribution="rollfleet-simulator", release="0.27.1")
    found = planned(config, kind=EngineKind.SIMULATOR, installation=installation)
    assert found.argv[:3] == ("/py", "-m", "rollfleet_engine.simulator")
    assert "--headless" in found.argv


def test_an_own_address_for_the_host_contradicts_the_launchers():
    place = PLACE | {"leaderAddress": "198.51.100.1", "ownAddress": "198.51.100.1"}
    config = {"nodes": NODES, "place": place, "tensorParallelSize": 2}
    found = plan(build_config(**config), build_facts(environ={"VLLM_HOST_IP": "203.0.113.9"}))
    assert isinstance(found, Refused), found
    (problem,) = found.problems
    assert problem.cause == (
        "environment variable VLLM_HOST_IP is '203.0.113.9', but spec.parallelism.nodes needs '198.51.100.1'"
    )
