"""The part of a RolloutEngine that decides how its engines are started; docs/launch.md has each release's words."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rollfleet_operator.api.accelerators import deterministic_rules
from rollfleet_operator.api.meta import ApiModel, ServiceAccountName
from rollfleet_operator.api.rules import Schema, rule, rules
from rollfleet_protocol.launch_settings import LogprobsMode, TokenEndpoint, TransferBackend

# vLLM's and vLLM-Ascend's own settings: theirs to name, so that the API server keeps whatever is written.
_FREE: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": 64}
FreeObject = Annotated[dict[str, Any], WithJsonSchema(_FREE)]


class RlConfig(ApiModel):
    """vLLM-Ascend's rl_config. Engines of other platforms refuse what only vLLM-Ascend can do."""

    enabled: bool = True
    """What weights are updated under: FRACTAL_NZ off, control routes on, and expandable_segments taken out of
    PYTORCH_NPU_ALLOC_CONF. The other fields have no effect without it (condition SettingsIgnored)."""
    sleep_mode_extra_cleanup: bool = False
    """Asleep, HCCL groups and graph workspaces are given back too; waking takes longer. Needs sleepMode Enabled."""
    enable_training_consistency: bool = False
    """Attention by FA3, as trainers compute it. Needs the package flash_attn_npu_v3 in the image. Atlas A2 and A3
    only."""
    enable_batch_invariant: bool = False
    """Results do not depend on what else is in the batch: deterministic kernels and communication; chunked prefill
    and prefix caching are off, blocks hold 128 tokens. Atlas A2 and A3 only."""


class SleepMode(StrEnum):
    """Whether engines can sleep."""

    DISABLED = "Disabled"
    ENABLED = "Enabled"


class InsecureSerialization(StrEnum):
    """Consent to handles that are pickled."""

    FORBIDDEN = "Forbidden"
    ALLOWED = "Allowed"


class WeightTransfer(ApiModel):
    """How a trainer pushes weights."""

    backend: TransferBackend
    """hccl: between engines and trainer on different NPUs (untested on hardware). gloo: the same on CPUs. ipc: on
    the same NPUs, mode Colocated (untested on hardware). shm: the same on CPUs of one host."""
    insecure_serialization: InsecureSerialization = InsecureSerialization.FORBIDDEN
    """Allowed: engines unpickle handles that an authenticated trainer sends (VLLM_ALLOW_INSECURE_SERIALIZATION=1): it
    may run code in them. Only for backend ipc with a trainer that keeps vLLM's own HTTP client; rollfleet_trainer sends
    handles as JSON and needs no consent."""


class TrainerRef(ApiModel):
    """Who may push weights."""

    service_account_name: ServiceAccountName
    """A ServiceAccount in the fleet's own namespace."""


class Switch(StrEnum):
    """Off or on."""

    DISABLED = "Disabled"
    ENABLED = "Enabled"


class ToolCalling(ApiModel):
    """Tool calls in /v1/chat/completions."""

    parser: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """vLLM's name of the parser that fits the model, for example hermes; the launcher checks it against vLLM's list."""


class Logprobs(ApiModel):
    """How log-probabilities are computed and how many of them a request may ask for."""

    mode: LogprobsMode | None = None
    """vLLM's own names; raw_logprobs where absent."""
    max: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """At most so many for each token; 20 where absent, -1: the whole vocabulary."""


class Features(
    ApiModel,
    json_schema_extra=rules(
        rule(
            "!(has(self.tokenEndpoint) && self.tokenEndpoint == 'TokensOnly' && has(self.toolCalling))",
            "spec.features.tokenEndpoint TokensOnly excludes spec.features.toolCalling: such an engine has no chat",
            field=".tokenEndpoint",
        ),
        rule(
            "!(has(self.traceReplay) && self.traceReplay == 'Enabled') || "
            "(has(self.tokenEndpoint) && self.tokenEndpoint != 'Disabled')",
            "spec.features.traceReplay needs spec.features.tokenEndpoint Enabled or TokensOnly",
            field=".traceReplay",
        ),
    ),
):
    """What engines can do beyond completing prompts."""

    token_endpoint: TokenEndpoint = TokenEndpoint.DISABLED
    """/inference/v1/generate: token ids in and out. Enabled: beside the OpenAI routes. TokensOnly: without them.
    Releases before 0.30 serve it whether it is asked for or not."""
    routed_experts: Switch = Switch.DISABLED
    """Answers carry which experts each token took. MoE models only."""
    trace_replay: Switch = Switch.DISABLED
    """Requests may prescribe the tokens that are generated. Needs vLLM 0.29, tokenEndpoint, and devices with Triton."""
    tool_calling: ToolCalling | None = None
    """Tool calls are parsed out of the model's text; absent: they are not."""
    logprobs: Logprobs = Logprobs()
    """Log-probabilities in answers."""


class Parallelism(ApiModel):
    """How one engine spreads over its devices: tensor x pipeline x data of them, on one node or several."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages that the layers are cut into."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Data-parallel ranks of each engine: cores of their own behind one address. All are closed, loaded and probed."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods of one engine, each with accelerator.perPod devices and as many of the workers. One of them serves and is
    updated; they start, drain and end as one. More than 1 needs data 1."""
    expert: Switch = Switch.DISABLED
    """Enabled: experts are spread over tensor x data devices instead of each being split. MoE models only."""

    @property
    def workers(self) -> int:
        """Processes of an engine, each with a device."""
        return self.tensor * self.pipeline * self.data


_OWNED_FLAGS = (
    "model|served[-_]model[-_]name|host|port|uds|api[-_]server[-_]count|middleware|root[-_]path|"
    "worker[-_]extension[-_]cls|grpc|data[-_]parallel[-_]size"
)
# One rule for each of these: a rule's estimated cost grows with its pattern, and the API server bounds it.
_FIELD_FLAGS = {
    "spec.parallelism": "tensor[-_]parallel[-_]size|pipeline[-_]parallel[-_]size|enable[-_]expert[-_]parallel|nnodes",
    "spec.sleepMode and spec.weightTransfer": "enable[-_]sleep[-_]mode|weight[-_]transfer[-_]config",
    "spec.engine.additionalConfig and spec.engine.compilationConfig": "(additional|compilation)[-_]config",
    "spec.features.tokenEndpoint": "tokens[-_]only|enable[-_]scale[-_]out",
    "spec.features.routedExperts": "enable[-_]return[-_]routed[-_]experts",
    "spec.features.traceReplay": "enable[-_]trace[-_]replay",
    "spec.features.toolCalling": "enable[-_]auto[-_]tool[-_]choice|tool[-_]call[-_]parser",
    "spec.features.logprobs": "logprobs[-_]mode|max[-_]logprobs",
}


def _field_rules() -> tuple[Schema, ...]:
    return tuple(
        rule(f"!self.matches('^--({flags})([.=]|$)')", f"spec.engine.args must not set what has a field: {field}")
        for field, flags in _FIELD_FLAGS.items()
    )


class EngineOptions(ApiModel):
    """What goes to vLLM as it is."""

    args: Annotated[
        tuple[
            Annotated[
                str,
                Field(
                    max_length=4096,
                    json_schema_extra=rules(
                        rule(
                            f"!self.matches('^--({_OWNED_FLAGS})(=|$)')",
                            "spec.engine.args must not set --model, --served-model-name (both: spec.model), --host, "
                            "--port, --uds, --api-server-count, --middleware, --root-path, --worker-extension-cls, "
                            "--data-parallel-size (spec.parallelism.data) or --grpc: the launcher sets them, or they "
                            "lead round the guard",
                        ),
                        *_field_rules(),
                        rule(
                            "!self.matches('^--dp[-_]routing[-_]config(=|$)')",
                            "spec.engine.args: neither vLLM nor vLLM-Ascend has --dp-routing-config: requests name a "
                            "rank by X-data-parallel-rank, and spec.router spreads them over engines",
                        ),
                    ),
                ),
            ],
            ...,
        ],
        Field(max_length=128),
    ] = ()
    """Further flags of vLLM's server. What contradicts the spec or bypasses the guard is refused, here or at launch."""
    additional_config: FreeObject = Field(default_factory=dict)
    """vLLM's --additional-config, with which vLLM-Ascend is set; merged with what the spec asks for."""
    compilation_config: FreeObject = Field(default_factory=dict)
    """vLLM's --compilation-config; merged with what the spec asks for."""


def launch_rules() -> tuple[Schema, ...]:
    """CEL rules of the spec between these fields and others."""
    backend = "has(self.weightTransfer) && self.weightTransfer.backend"
    return (
        rule(
            "self.mode != 'Colocated' || self.sleepMode == 'Enabled'",
            "spec.sleepMode must be Enabled for spec.mode Colocated",
            field=".sleepMode",
        ),
        rule(
            "!self.rlConfig.enabled || !self.rlConfig.sleepModeExtraCleanup || self.sleepMode == 'Enabled'",
            "spec.rlConfig.sleepModeExtraCleanup needs spec.sleepMode Enabled",
            field=".rlConfig.sleepModeExtraCleanup",
        ),
        rule(
            f"!({backend} in ['ipc', 'shm']) || self.mode == 'Colocated'",
            "spec.weightTransfer.backend ipc and shm need spec.mode Colocated: use gloo on CPUs",
            field=".weightTransfer",
        ),
        rule(
            f"!({backend} == 'hccl') || self.mode == 'Disaggregated'",
            "spec.weightTransfer.backend hccl needs spec.mode Disaggregated: use shm on CPUs",
            field=".weightTransfer",
        ),
        rule(
            "!(has(self.weightTransfer) && self.weightTransfer.insecureSerialization == 'Allowed') || "
            "(self.mode == 'Colocated' && self.weightTransfer.backend == 'ipc')",
            "spec.weightTransfer.insecureSerialization may be Allowed for backend ipc of mode Colocated only",
            field=".weightTransfer",
        ),
        rule(
            "self.accelerator.perPod == 0 || "
            "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data <= "
            "self.accelerator.perPod * self.parallelism.nodes",
            "spec.parallelism: tensor x pipeline x data must not exceed spec.accelerator.perPod x nodes",
            field=".parallelism",
        ),
        *deterministic_rules(),
        rule(
            "self.parallelism.nodes == 1 || self.parallelism.data == 1",
            "spec.parallelism.data must be 1 where spec.parallelism.nodes is more: raise spec.replicas instead",
            field=".parallelism",
        ),
        rule(
            "self.parallelism.tensor * self.parallelism.pipeline % self.parallelism.nodes == 0",
            "spec.parallelism: tensor x pipeline must be divisible by nodes: each node has as many workers",
            field=".parallelism",
        ),
        rule(
            f"!({backend} in ['ipc', 'shm']) || self.parallelism.nodes == 1",
            "spec.weightTransfer.backend ipc and shm need spec.parallelism.nodes 1: handles are of one host",
            field=".weightTransfer",
        ),
    )
