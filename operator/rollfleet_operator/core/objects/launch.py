"""The spec's words about the launch, as the launcher is told them."""

from typing import TypedDict

from rollfleet_operator.api.launch import InsecureSerialization, SleepMode, Switch
from rollfleet_operator.api.rolloutengine import RolloutEngineSpec
from rollfleet_protocol.engine_config import NodesConfig
from rollfleet_protocol.launch_settings import Features, FleetMode, RlConfig, WeightTransfer

# Nobody kills a pod that follows for being slow. Away for at most 300 s at a time by the kubelet's back-off, two that
# wait for shorter than that could miss each other for ever; who stays for longer than 600 s has none (Kubernetes 1.36).
LED_WAIT_S = 660


class LaunchSettings(TypedDict):
    """Fields of EngineConfig."""

    mode: FleetMode
    rl_config: RlConfig
    sleep_mode: bool
    weight_transfer: WeightTransfer | None
    features: Features
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel: bool
    nodes: NodesConfig | None


def launch_settings(spec: RolloutEngineSpec) -> LaunchSettings:
    """Field by field; names differ only where the spec has an enumeration or a union."""
    rl_config, parallelism = spec.rl_config, spec.parallelism
    return LaunchSettings(
        mode=spec.mode,
        rl_config=RlConfig(
            enabled=rl_config.enabled,
            sleep_mode_extra_cleanup=rl_config.sleep_mode_extra_cleanup,
            enable_training_consistency=rl_config.enable_training_consistency,
            enable_batch_invariant=rl_config.enable_batch_invariant,
        ),
        sleep_mode=spec.sleep_mode is SleepMode.ENABLED,
        weight_transfer=_weight_transfer(spec),
        features=_features(spec),
        data_parallel_size=parallelism.data,
        tensor_parallel_size=parallelism.tensor,
        pipeline_parallel_size=parallelism.pipeline,
        expert_parallel=parallelism.expert is Switch.ENABLED,
        nodes=_nodes(spec),
    )


def _nodes(spec: RolloutEngineSpec) -> NodesConfig | None:
    """None for an engine of one pod, whose configuration must stay what it was without this field."""
    if spec.parallelism.nodes == 1:
        return None
    # Shorter than the kubelet's patience: the launcher says for whom it waited, a kubelet only kills.
    wait_s = max(1, spec.startup.timeout_seconds * 9 // 10)
    return NodesConfig(count=spec.parallelism.nodes, wait_seconds=wait_s, led_wait_seconds=max(wait_s, LED_WAIT_S))


def _weight_transfer(spec: RolloutEngineSpec) -> WeightTransfer | None:
    wanted = spec.weight_transfer
    if wanted is None:
        return None
    return WeightTransfer(
        backend=wanted.backend,
        insecure_serialization=wanted.insecure_serialization is InsecureSerialization.ALLOWED,
    )


def _features(spec: RolloutEngineSpec) -> Features:
    wanted = spec.features
    return Features(
        token_endpoint=wanted.token_endpoint,
        routed_experts=wanted.routed_experts is Switch.ENABLED,
        trace_replay=wanted.trace_replay is Switch.ENABLED,
        tool_parser=None if wanted.tool_calling is None else wanted.tool_calling.parser,
        logprobs_mode=wanted.logprobs.mode,
        max_logprobs=wanted.logprobs.max,
    )
