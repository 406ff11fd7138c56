"""Every plan of a matrix of specs is understood by the release that it was made for, as it was meant."""

import itertools
import json
from typing import Any

import pytest

from rollfleet_engine.launch import probe
from rollfleet_engine.launch.dialects import DIALECTS, dialect_of
from rollfleet_engine.launch.facts import Installation
from rollfleet_engine.launch.options import ALIASES, positional_words
from rollfleet_engine.launch.plan import Plan, plan
from rollfleet_engine.launch.reserved import UNKNOWN_OPTIONS
from tests.parsers.conftest import RELEASES, Release
from tests.unit.launch.conftest import NEW_ASCEND, OLD_ASCEND, build_config, build_facts, on_cpu, on_npu

pytestmark = pytest.mark.timeout(300)

SIZES = (
    {},
    {"tensorParallelSize": 2, "pipelineParallelSize": 2},
    {"tensorParallelSize": 4, "dataParallelSize": 2, "expertParallel": True},
)
RL = (
    {"rlConfig": {"enabled": False}},
    {"rlConfig": {"enabled": True}},
    {"rlConfig": {"enableBatchInvariant": True, "enableTrainingConsistency": True}},
    {"rlConfig": {"sleepModeExtraCleanup": True}, "sleepMode": True},
)
FEATURES = (
    {},
    {"features": {"tokenEndpoint": "Enabled", "toolParser": "hermes", "logprobsMode": "processed_logprobs"}},
    {"features": {"tokenEndpoint": "TokensOnly", "maxLogprobs": -1}},
    {"features": {"routedExperts": True}},
    {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}},
)
OWN = (
    {},
    {
        "engineArgs": ["--max-model-len", "1024", "--dtype=bfloat16", "--seed", "7"],
        "additionalConfig": {"eplb_config": {"dynamic_eplb": True}},
        "compilationConfig": {"cudagraph_capture_sizes": [1, 2, 4]},
    },
)
TRANSFER = (
    {},
    {"weightTransfer": {"backend": "hccl"}},
    {"weightTransfer": {"backend": "gloo"}},
    {
        "weightTransfer": {"backend": "ipc", "insecureSerialization": True},
        "mode": "Colocated",
        "sleepMode": True,
    },
)


def _places(release: str) -> tuple[Installation, ...]:
    return on_npu(NEW_ASCEND, release), on_npu(OLD_ASCEND, release), on_cpu(release)


def _plans(release: str) -> list[tuple[dict[str, Any], Plan]]:
    """Of all combinations those that can be had from the release."""
    made = []
    for parts in itertools.product(SIZES, RL, FEATURES, OWN, TRANSFER):
        spec = {key: value for part in parts for key, value in part.items()}
        for installation in _places(release):
            found = plan(build_config(**spec), build_facts(installation=installation))
            if isinstance(found, Plan):
                made.append((spec, found))
    return made


def test_the_matrix_is_worth_its_name():
    for release in RELEASES:
        plans = _plans(release)
        assert len({found.argv for _, found in plans}) > 100, release
        for words in ("--enable-return-routed-experts", "--tokens-only", "--block-size", "--enable-sleep-mode"):
            assert any(words in found.argv for _, found in plans), (release, words)


def test_every_plan_is_understood_as_it_was_meant(release: Release):
    seen: dict[tuple[str, ...], dict[str, Any]] = {}
    for spec, found in _plans(release.name):
        arguments = found.argv[3:]
        if arguments in seen:
            continue
        understood = seen[arguments] = release.parse(arguments)
        assert "error" not in understood, (arguments, understood)
        features = spec.get("features", {})
        assert understood["tensor_parallel_size"] == spec.get("tensorParallelSize", 1)
        assert understood["pipeline_parallel_size"] == spec.get("pipelineParallelSize", 1)
        assert understood["data_parallel_size"] == spec.get("dataParallelSize", 1)
        assert understood["enable_expert_parallel"] is spec.get("expertParallel", False)
        assert understood["tokens_only"] is (features.get("tokenEndpoint") == "TokensOnly")
        assert understood["enable_return_routed_experts"] is features.get("routedExperts", False)
        assert understood["enable_auto_tool_choice"] is ("toolParser" in features)
        assert understood["tool_call_parser"] == features.get("toolParser")
        assert understood["max_logprobs"] == features.get("maxLogprobs", 20)
        assert understood["logprobs_mode"] == features.get("logprobsMode", "raw_logprobs")
        assert understood["middleware"] == ["rollfleet_engine.guard.middleware.Guard"]
        _json_is_understood(arguments, understood)
        _batch_invariance_is_understood(spec, understood, on_npus="--block-size" in arguments)
    assert len(seen) > 100


NODES = {"count": 2, "waitSeconds": 60}


def _on_node(node: int, release: str, **spec: Any) -> list[Plan]:
    """Of an engine of two pods, once their launchers have met, on each platform."""
    address = f"198.51.100.{node + 1}"
    place = {"node": node, "leader": "qwen-0-0-a", "leaderHost": "qwen-0-0.qwen-engines.rl.svc"}
    place |= {"leaderAddress": "198.51.100.1", "ownAddress": address}
    found = [
        plan(build_config(nodes=NODES, place=place, **spec), build_facts(installation=each))
        for each in _places(release)
    ]
    return [each for each in found if isinstance(each, Plan)]


@pytest.mark.parametrize("sizes", [{"tensorParallelSize": 4}, {"tensorParallelSize": 2, "pipelineParallelSize": 2}])
@pytest.mark.parametrize("features", FEATURES[:3])
def test_leader_and_follower_of_two_nodes_are_understood(
    release: Release, sizes: dict[str, Any], features: dict[str, Any]
):
    for node in range(2):
        plans = _on_node(node, release.name, **sizes, **features)
        assert len(plans) == len(_places(release.name))
        for found in plans:
            understood = release.parse(found.argv[3:])
            assert "error" not in understood, understood
            assert (understood["nnodes"], understood["node_rank"]) == (2, node)
            assert (understood["master_addr"], understood["master_port"]) == ("198.51.100.1", 29501)
            assert understood["distributed_executor_backend"] == "mp"
            assert understood["worker_extension_cls"] == "rollfleet_engine.vllm.worker.RollfleetWorkerExtension"
            assert understood["headless"] is (node == 1)
            assert understood["middleware"] == (["rollfleet_engine.guard.middleware.Guard"] if node == 0 else [])
            assert understood["api_server_count"] == (1 if node == 0 else None)
            assert found.env["VLLM_HOST_IP"] == f"198.51.100.{node + 1}"
            assert found.argv[2] == (
                "vllm.entrypoints.openai.api_server" if node == 0 else "rollfleet_engine.vllm.follower"
            )


def test_what_starts_a_follower_is_where_it_is_looked_for(release: Release):
    """rollfleet_engine.vllm.follower takes these from vLLM's own command."""
    source = (release.folder / "vllm" / "entrypoints" / "cli" / "serve.py").read_text()
    for words in (
        "def run_headless(",
        "class ServeSubcommand",
        "MultiprocExecutor(vllm_config, monitor_workers=False)",
    ):
        assert words in source
    for name in ("make_arg_parser", "validate_parsed_serve_args", "FlexibleArgumentParser"):
        assert name in source.partition("class ServeSubcommand")[0]


def _json_is_understood(arguments: tuple[str, ...], understood: dict[str, Any]) -> None:
    given = (
        json.loads(arguments[arguments.index("--additional-config") + 1]) if "--additional-config" in arguments else {}
    )
    assert understood["additional_config"] == given


def _batch_invariance_is_understood(spec: dict[str, Any], understood: dict[str, Any], *, on_npus: bool) -> None:
    """C13."""
    wanted = spec["rlConfig"].get("enableBatchInvariant", False)
    assert wanted is on_npus
    if wanted:
        assert understood["enable_chunked_prefill"] is False
        assert understood["enable_prefix_caching"] is False
        assert understood["block_size"] == 128
        assert "PIECEWISE" in str(understood["compilation_config"])


def test_the_recorded_options_are_those_of_the_release(release: Release):
    dialect = dialect_of(release.name)
    assert dialect is not None
    assert set(release.known["options"]) == dialect.option_names()


def test_every_spoken_range_has_a_release_that_is_asked():
    assert sorted(name for dialect in DIALECTS for name in dialect.verified) == sorted(RELEASES)


def test_what_no_release_has_this_one_has_not(release: Release):
    for option in UNKNOWN_OPTIONS:
        assert "error" in release.parse(("--model", "/m", option, "x"))


def test_c21_the_list_of_tool_parsers_is_read_from_the_files_as_vllm_registers_it(release: Release):
    assert probe.tool_parsers(release.folder / "vllm") == release.known["tool_parsers"]


def test_c21_a_lone_flag_is_refused_by_the_release_and_an_unknown_parser_only_when_it_serves(release: Release):
    """What the launcher refuses before: no release looks the name up where it reads the command line."""
    unknown = release.parse(("--model", "/m", "--enable-auto-tool-choice", "--tool-call-parser", "hermess"))
    assert unknown["tool_call_parser"] == "hermess"
    assert "error" in release.parse(("--model", "/m", "--enable-auto-tool-choice"))


def test_the_launcher_knows_every_second_name_and_every_switch(release: Release):
    known = frozenset(release.known["options"])
    second = {}
    for names in release.known["actions"]:
        first = next((name for name in names if name.startswith("--")), "")
        negation = f"--no-{first.removeprefix('--')}"
        second.update({name: first for name in names if name not in (first, negation)})
    assert second == {name: option for name, option in ALIASES.items() if name in known}
    for name in release.known["options"]:
        told = list(positional_words((name, "word"), known)) == ["word"]
        assert told is (name in release.known["switches"]), name
