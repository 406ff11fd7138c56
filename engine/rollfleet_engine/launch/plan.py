"""The engine's command line, planned purely from the configuration and what was seen of the container."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollfleet_engine.launch.dialects import CPU, FOLLOWER_MODULE, Dialect, PlatformWords, dialect_of
from rollfleet_engine.launch.facts import EngineKind, Facts
from rollfleet_engine.launch.feature_problems import feature_problems
from rollfleet_engine.launch.memory_needs import workers_of
from rollfleet_engine.launch.options import spellings
from rollfleet_engine.launch.problems import find_problems
from rollfleet_engine.launch.problems_platform import platform_warnings
from rollfleet_engine.launch.wishes import Speech, batch_invariant, json_options, platform_of, spoken
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_variables import PYTHON_VARIABLES, VLLM_VARIABLES
from rollfleet_protocol.termination import Problem

GUARD = "rollfleet_engine.guard.middleware.Guard"
WORKER_EXTENSION = "rollfleet_engine.vllm.worker.RollfleetWorkerExtension"
TRANSFER_BACKEND = "rollfleet"
SIMULATOR_MODULE = "rollfleet_engine.simulator"
DYNAMO_VARIABLE = "TORCHDYNAMO_DISABLE"
_SECRET_OPTIONS = frozenset({"--api-key", "--hf-token"})


_IN_EVERY_POD = (
    # Left to itself, vLLM makes an embedding server of a folder whose config.json names no architecture.
    *("--runner", "generate"),
    *("--worker-extension-cls", WORKER_EXTENSION),
    *("--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKEND})),
)
_AROUND_THE_GUARD = (
    *("--api-server-count", "1"),
    *("--middleware", GUARD),
    "--disable-uvicorn-access-log",
)


@dataclass(frozen=True)
class Plan:
    """How to start the engine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to the container's
    kind: EngineKind
    release: str
    unset: tuple[str, ...] = ()  # variables of the container that the engine does not get
    warnings: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """One line for the log, without secrets."""
        return json.dumps(
            {
                "event": "plan",
                "engine": self.kind.value,
                "release": self.release,
                "argv": redact(self.argv),
                "env": dict(self.env),
                "unset": list(self.unset),
                "warnings": list(self.warnings),
            }
        )


@dataclass(frozen=True)
class Refused:
    """Why the engine cannot be started as configured."""

    problems: tuple[Problem, ...]


def variables_of(kind: EngineKind) -> dict[str, str]:
    """What the launcher adds to an engine's environment."""
    return PYTHON_VARIABLES | (VLLM_VARIABLES if kind is EngineKind.VLLM else {})


def plan(config: EngineConfig, facts: Facts) -> Plan | Refused:
    """The command, or everything that is wrong, all at once."""
    dialect, platform = dialect_of(facts.installation.release), platform_of(facts)
    speech = Speech() if dialect is None or platform is None else spoken(config, facts, dialect, platform)
    env = variables_of(facts.kind) | dict(speech.env)
    problems = [*find_problems(config, facts, dialect, env, speech.why)]
    if dialect is not None and platform is not None:
        problems += feature_problems(config, facts, dialect, platform, speech)
    if problems or dialect is None or platform is None:
        return Refused(tuple(problems))
    argv = (
        *_common_options(config, facts, dialect),
        *speech.args,
        *json_options(config, speech),
        *config.engine_args,
    )
    return Plan(
        argv=argv,
        env=env | _without_compiler(facts, platform),
        kind=facts.kind,
        release=facts.installation.release,
        unset=speech.unset,
        warnings=_warnings(config, facts, platform),
    )


def _without_compiler(facts: Facts, platform: PlatformWords) -> dict[str, str]:
    """torch compiles parts of vLLM's sampler for the CPU at the first logprobs request, eager mode or not.

    Without a compiler in the image that request, the probe for one, would kill the engine core.
    """
    if platform is not CPU or facts.has_compiler or DYNAMO_VARIABLE in facts.environ:
        return {}
    return {DYNAMO_VARIABLE: "1"}


def _common_options(config: EngineConfig, facts: Facts, dialect: Dialect) -> tuple[str, ...]:
    simulated = facts.kind is EngineKind.SIMULATOR
    module = dialect.module if config.leads else FOLLOWER_MODULE
    model = ("--model", config.model.path, "--served-model-name", config.model.served_name)
    server = ("--host", config.bind_address, "--port", str(config.serving_port)) if config.leads else ()
    guarded = _AROUND_THE_GUARD if config.leads else ()
    options = (facts.installation.python, "-m", SIMULATOR_MODULE if simulated else module, *model, *server)
    return options if simulated else (*options, *guarded, *_IN_EVERY_POD)


def _warnings(config: EngineConfig, facts: Facts, platform: PlatformWords) -> tuple[str, ...]:
    found = []
    if config.rl_config.ignored_flags:
        names = ", ".join(config.rl_config.ignored_flags)
        found.append(f"spec.rlConfig.enabled is false: {names} without effect")
    if _without_compiler(facts, platform):
        found.append(f"no C++ compiler in the image: {DYNAMO_VARIABLE}=1, so that torch compiles nothing for the CPU")
    if config.checkpoints_path is None:
        found.append("no checkpoints volume: this engine can only serve the model that it starts with")
    elif facts.checkpoints_error:
        # A volume may be filled later; Prepare names the path when it is used.
        found.append(f"checkpoints folder {config.checkpoints_path}: {facts.checkpoints_error}")
    found += _unread_parsers(config, facts)
    return (*found, *_npu_warnings(config, facts, platform), *platform_warnings(config, facts))


def _unread_parsers(config: EngineConfig, facts: Facts) -> Iterator[str]:
    """The name was not compared with anything, so that a wrong one is found out by the engine only."""
    parser = config.features.tool_parser
    if parser is not None and facts.kind is EngineKind.VLLM and not facts.installation.tool_parsers:
        yield f"vLLM's list of tool parsers could not be read: whether it has {parser!r} was not checked"


def _npu_warnings(config: EngineConfig, facts: Facts, platform: PlatformWords) -> Iterator[str]:
    if not platform.cleans_allocator:
        return
    here = workers_of(config) * config.data_parallel_size
    if config.accelerator is not None and here < config.accelerator.per_pod:
        yield (
            f"spec.accelerator.perPod is {config.accelerator.per_pod}, and by spec.parallelism each pod uses {here}: "
            "the others do nothing"
        )
    if not config.rl_config.enabled:
        yield "spec.rlConfig.enabled is false: vLLM-Ascend takes new weights only where FRACTAL_NZ is off all the same"
    if batch_invariant(config, facts):
        if not config.rl_config.batch_invariant:
            yield "VLLM_BATCH_INVARIANT=1 is set by spec.env or the image: as spec.rlConfig.enableBatchInvariant"
        yield "batch invariance: a preempted request is computed anew otherwise; give the KV cache room for all"
    transfer = config.weight_transfer
    if transfer is not None and transfer.insecure_serialization:
        yield "spec.weightTransfer.insecureSerialization is Allowed: who may push weights may run code in this engine"


def redact(argv: tuple[str, ...]) -> list[str]:
    """The command line with the values of secret options struck out."""
    shown: list[str] = []
    hide = False
    for token in argv:
        if token.startswith("-"):
            spelling = next(spellings((token,), _SECRET_OPTIONS), None)
            hide = spelling is not None and bool(spelling.options)
            head, equals, _ = token.partition("=")
            shown.append(f"{head}=***" if hide and equals else token)
        else:
            shown.append("***" if hide else token)
    return shown
