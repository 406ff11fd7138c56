"""What in a RolloutEngine's launch contradicts itself, whatever the release. Pure; operator and launcher both ask."""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from rollfleet_protocol.accelerators import ASCEND910, DETERMINISTIC, AcceleratorProfile, fits_a3, profiles_of
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_settings import FleetMode, TokenEndpoint, TransferBackend

RL_CONFIG = "spec.rlConfig"
ADDITIONAL = "spec.engine.additionalConfig"
COMPILATION = "spec.engine.compilationConfig"
RL_KEY = "rl_config"  # in additional_config
REMOVED_CLEANUP_KEY = "enable_sleep_mode_extra_cleanup"
NZ_KEY = "weight_nz_mode"
GRAPH_KEY = "cudagraph_mode"
# vLLM-Ascend's key of rl_config -> ours.
RL_KEYS = {
    "enabled": "enabled",
    "sleep_mode_extra_cleanup": "sleepModeExtraCleanup",
    "enable_training_consistency": "enableTrainingConsistency",
    "enable_batch_invariant": "enableBatchInvariant",
}
PIECEWISE = "PIECEWISE"
# Graphs that leave attention out, or none at all: FA3 and the batch-invariant attention cannot be captured
# (vllm-ascend, docs/source/user_guide/feature_guide: flash_attention.md, batch_invariance.md).
_WITHOUT_ATTENTION = frozenset({PIECEWISE, "NONE"})


class Fault(NamedTuple):
    """A field, and what is wrong with it and what to do."""

    field: str
    text: str


def faults(config: EngineConfig) -> Iterator[Fault]:
    """All that is wrong."""
    yield from _accelerator(config)
    yield from _modes(config)
    yield from _nodes(config)
    yield from _features(config)
    yield from _additional(config)
    yield from _compilation(config)


def _accelerator(config: EngineConfig) -> Iterator[Fault]:
    asked = config.accelerator
    if asked is None:
        return
    named, profile = profiles_of(asked.resource_name), asked.profile
    if profile is not None and profile not in named:
        text = f"{asked.resource_name} is not of spec.accelerator.profile {profile}: leave it out, or correct one"
        yield Fault("spec.accelerator.resourceName", text)
    if profile is AcceleratorProfile.A3 and asked.resource_name == ASCEND910 and not fits_a3(asked.per_pod):
        yield Fault(
            "spec.accelerator.perPod", f"is {asked.per_pod}: of profile A3 it must be 1 or an even number to 16"
        )
    text = generation_fault(config)
    for flag, on in (
        ("enableBatchInvariant", config.rl_config.batch_invariant),
        ("enableTrainingConsistency", config.rl_config.training_consistency),
    ):
        if on and text:
            yield Fault(f"{RL_CONFIG}.{flag}", f"{text}: set it to false")


def generation_fault(config: EngineConfig) -> str:
    """Why these NPUs cannot do what only A2 and A3 can, as far as the spec tells; empty where they may."""
    asked = config.accelerator
    if asked is None:
        return ""
    possible = profiles_of(asked.resource_name) if asked.profile is None else (asked.profile,)
    if set(possible) & set(DETERMINISTIC):
        return ""
    whose = f"profile {asked.profile}" if asked.profile else f"spec.accelerator.resourceName {asked.resource_name}"
    return f"works on Atlas A2 and A3 only, and {whose} is of another generation"


def _modes(config: EngineConfig) -> Iterator[Fault]:
    colocated = config.mode is FleetMode.COLOCATED
    if colocated and not config.sleep_mode:
        yield Fault("spec.sleepMode", "must be Enabled for mode Colocated: the engine gives its NPUs to the trainer")
    if config.rl_config.extra_cleanup and not config.sleep_mode:
        yield Fault(f"{RL_CONFIG}.sleepModeExtraCleanup", "needs spec.sleepMode Enabled: it cleans up while asleep")
    transfer = config.weight_transfer
    if transfer is None:
        return
    if transfer.backend in (TransferBackend.IPC, TransferBackend.SHM) and not colocated:
        text = f"{transfer.backend} needs spec.mode Colocated: handles are of one host; use gloo on CPUs"
        yield Fault("spec.weightTransfer.backend", text)
    if transfer.backend is TransferBackend.HCCL and colocated:
        yield Fault("spec.weightTransfer.backend", "hccl needs spec.mode Disaggregated: use shm on CPUs")
    if transfer.insecure_serialization and not (colocated and transfer.backend is TransferBackend.IPC):
        text = "may be Allowed for backend ipc of mode Colocated only: remove it"
        yield Fault("spec.weightTransfer.insecureSerialization", text)


def _nodes(config: EngineConfig) -> Iterator[Fault]:
    """An engine of several pods."""
    if config.nodes is None:
        return
    count, workers = config.nodes.count, config.tensor_parallel_size * config.pipeline_parallel_size
    if config.data_parallel_size > 1:
        text = "must be 1 where spec.parallelism.nodes is more: NotSupported: raise spec.replicas instead"
        yield Fault("spec.parallelism.data", text)
    elif workers % count:
        text = f"is {count}: tensor x pipeline, {workers}, must be divisible by it: each node has as many workers"
        yield Fault("spec.parallelism.nodes", text)
    transfer = config.weight_transfer
    if transfer is not None and transfer.backend in (TransferBackend.IPC, TransferBackend.SHM):
        text = f"{transfer.backend} needs spec.parallelism.nodes 1: handles are of one host"
        yield Fault("spec.weightTransfer.backend", text)


def _features(config: EngineConfig) -> Iterator[Fault]:
    features = config.features
    if features.token_endpoint is TokenEndpoint.TOKENS_ONLY and features.tool_parser is not None:
        text = "TokensOnly excludes spec.features.toolCalling: such an engine has no chat; set Enabled"
        yield Fault("spec.features.tokenEndpoint", text)
    if features.trace_replay and features.token_endpoint is TokenEndpoint.DISABLED:
        text = "needs spec.features.tokenEndpoint Enabled or TokensOnly: traces are sent to /inference/v1/generate"
        yield Fault("spec.features.traceReplay", text)


def _additional(config: EngineConfig) -> Iterator[Fault]:
    given, rl_config = config.additional_config, config.rl_config
    if REMOVED_CLEANUP_KEY in given:
        text = f"was removed from vLLM-Ascend: set {RL_CONFIG}.sleepModeExtraCleanup"
        yield Fault(f"{ADDITIONAL}.{REMOVED_CLEANUP_KEY}", text)
    if rl_config.enabled and not _is(given.get(NZ_KEY, 0), 0):
        text = f"is {_json(given[NZ_KEY])}, but {RL_CONFIG}.enabled needs 0 (weights are updated without FRACTAL_NZ)"
        yield Fault(f"{ADDITIONAL}.{NZ_KEY}", f"{text}: remove it, or set enabled to false")
    if RL_KEY not in given:
        return
    written = given[RL_KEY]
    if not isinstance(written, dict):
        yield Fault(f"{ADDITIONAL}.{RL_KEY}", f"must be an object: use {RL_CONFIG}")
        return
    yield from _rl_keys(config, written)


def _rl_keys(config: EngineConfig, written: Mapping[str, JsonValue]) -> Iterator[Fault]:
    wanted = config.rl_config.model_dump(by_alias=True)
    for key, value in written.items():
        field = f"{ADDITIONAL}.{RL_KEY}.{key}"
        if key not in RL_KEYS:
            yield Fault(field, f"is no key of rl_config; there are {', '.join(RL_KEYS)}")
        elif not isinstance(value, bool):
            yield Fault(field, f"is {_json(value)}, but must be true or false")
        elif value is not wanted[RL_KEYS[key]]:
            ours = f"{RL_CONFIG}.{RL_KEYS[key]}"
            yield Fault(field, f"is {_json(value)}, but {ours} is {_json(wanted[RL_KEYS[key]])}: write it there only")


def _compilation(config: EngineConfig) -> Iterator[Fault]:
    rl_config = config.rl_config
    flag = next(
        (
            name
            for name, on in (
                ("enableBatchInvariant", rl_config.batch_invariant),
                ("enableTrainingConsistency", rl_config.training_consistency),
            )
            if on
        ),
        None,
    )
    if flag is not None:
        yield from graph_faults(config, f"{RL_CONFIG}.{flag}")


def graph_faults(config: EngineConfig, asker: str) -> Iterator[Fault]:
    """Graphs that hold attention which cannot be captured; `asker` is what brings that attention."""
    mode = config.compilation_config.get(GRAPH_KEY, PIECEWISE)
    if isinstance(mode, str) and mode.upper() in _WITHOUT_ATTENTION:
        return
    text = f"is {_json(mode)}, but {asker} needs {PIECEWISE} (or NONE): its attention cannot be captured"
    yield Fault(f"{COMPILATION}.{GRAPH_KEY}", text)


def _is(value: JsonValue, number: int) -> bool:
    """Equal and of the same kind: False is no 0."""
    return type(value) is int and value == number


def _json(value: JsonValue) -> str:
    return json.dumps(value)
