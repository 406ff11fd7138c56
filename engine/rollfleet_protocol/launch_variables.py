"""Environment variables that are not the user's to set, or not against the spec. Pure; operator and launcher both ask.

The operator judges spec.env, whatever the release; the launcher also what the image brings, in its release's words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_rules import RL_CONFIG, Fault, generation_fault, graph_faults


@dataclass(frozen=True)
class Reserved:
    """An option or variable that users may not set, and why."""

    name: str  # with a trailing * for all that begin so
    reason: str
    values: frozenset[str] = frozenset()  # of a variable: those that are refused, in capitals; empty: any
    allowed: frozenset[str] = frozenset()  # of an option: those that say what happens anyway

    def covers(self, name: str) -> bool:
        """Whether `name` is meant."""
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name

    def refuses(self, value: str) -> bool:
        """Whether this value of a variable is refused. "0" and empty leave such a switch off, as we want it."""
        return value not in ("", "0") and (not self.values or value.strip().upper() in self.values)


RANKS_OF_SPEC = "the number of data-parallel ranks comes from spec.parallelism.data"
LOG_IS_READ = "the launcher reads the engine's log for the cause of a failure"
_LEVEL = "at that level it hides errors, which the launcher reads from the engine's log"
_RUST = "the Rust front end passes by ASGI middleware, and so by the guard"
# model_hosting_container_standards, which vLLM's build_app bootstraps, loads handlers and middleware that these name,
# one of them in front of all others (its common/fastapi/middleware/core.py: throttle before the engine's own).
_SAGEMAKER = "vLLM's SageMaker layer loads code by it that runs in front of the guard or in place of its routes"

RESERVED_VARIABLES = (
    Reserved("VLLM_USE_RUST_FRONTEND", _RUST),
    Reserved("VLLM_RUST_FRONTEND_PATH", _RUST),
    Reserved("VLLM_ALLOW_INSECURE_SERIALIZATION", "it comes from spec.weightTransfer.insecureSerialization"),
    Reserved("VLLM_ENABLE_SCALE_OUT_ENDPOINTS", "it comes from spec.features.tokenEndpoint"),
    Reserved("VLLM_LOGGING_CONFIG_PATH", LOG_IS_READ),
    Reserved("VLLM_CONFIGURE_LOGGING", LOG_IS_READ),
    # Where --data-parallel-size is 1, vLLM takes number and rank from these (config/parallel.py).
    Reserved("VLLM_DP_*", RANKS_OF_SPEC),
    Reserved("VLLM_LOGGING_PREFIX", LOG_IS_READ),  # before the level, by which errors are told
    Reserved("VLLM_LOGGING_COLOR", LOG_IS_READ, frozenset({"1"})),  # the same
    Reserved("VLLM_LOGGING_LEVEL", _LEVEL, frozenset({"CRITICAL", "FATAL"})),
    Reserved("CUSTOM_FASTAPI_*", _SAGEMAKER),
    Reserved("CUSTOM_PRE_PROCESS", _SAGEMAKER),
    Reserved("CUSTOM_POST_PROCESS", _SAGEMAKER),
    Reserved("CUSTOM_SCRIPT_FILENAME", _SAGEMAKER),
    Reserved("SAGEMAKER_*", _SAGEMAKER),
    Reserved("PYTHONHOME", "it replaces the interpreter's library"),
    Reserved("PYTHONSTARTUP", "it runs code before the engine"),
    Reserved("PYTHONUSERBASE", "it puts modules in front of the image's"),
    Reserved("PYTHONINSPECT", "the engine would not end when it fails"),
    Reserved("PYTHONOPTIMIZE", "vLLM checks its invariants by assert"),
)
# Variables that every engine gets. Python: our modules and nobody's user site; output line by line as it is written.
PYTHON_VARIABLES = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
# The development routes are the control routes that the guard keeps on its own port. Models come from volumes, never
# from a hub; usage statistics would be sent to the internet.
VLLM_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
# What features need in every release that has them.
DETERMINISTIC_VARIABLES = {BATCH_INVARIANT: "1", "HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
NZ_OFF = {"VLLM_ASCEND_ENABLE_NZ": "0"}
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
RUNNER_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def variable_faults(config: EngineConfig, given: Mapping[str, str]) -> Iterator[Fault]:
    """What of spec.env the launcher would refuse whatever its release."""
    needed = dict(_needed(config, given))
    for name, value in given.items():
        field = f"spec.env[{name}]"
        rule = next((rule for rule in RESERVED_VARIABLES if rule.covers(name) and rule.refuses(value)), None)
        if rule is not None:
            yield Fault(field, f"may not be set: {rule.reason}; remove it")
        elif name in needed and value != needed[name][0]:
            wanted, who = needed[name]
            yield Fault(field, f"is {value!r}, but {who} needs {wanted!r}: remove it")
    if _asks_for_invariance(config, given):
        field = f"spec.env[{BATCH_INVARIANT}]"
        yield from graph_faults(config, field)
        text = generation_fault(config)
        if text:
            yield Fault(field, f"{text}: remove it")


def _asks_for_invariance(config: EngineConfig, given: Mapping[str, str]) -> bool:
    """vLLM-Ascend keeps the variable where rl_config does not ask for the same (RlConfig.apply)."""
    return not config.rl_config.batch_invariant and given.get(BATCH_INVARIANT) == "1"


def _needed(config: EngineConfig, given: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each variable with the value that it must have, and who needs that."""
    npu = config.accelerator is not None
    for who, on, variables in (
        ("the launcher", True, PYTHON_VARIABLES | VLLM_VARIABLES),
        (f"{RL_CONFIG}.enabled", config.rl_config.enabled and npu, NZ_OFF),
        (f"spec.env[{BATCH_INVARIANT}]", _asks_for_invariance(config, given), DETERMINISTIC_VARIABLES),
        (f"{RL_CONFIG}.enableBatchInvariant", config.rl_config.batch_invariant, DETERMINISTIC_VARIABLES),
        ("spec.sleepMode", config.sleep_mode, SPAWN),
        ("spec.features.traceReplay", config.features.trace_replay, RUNNER_V2),
    ):
        if on:
            yield from ((name, (value, who)) for name, value in variables.items())
