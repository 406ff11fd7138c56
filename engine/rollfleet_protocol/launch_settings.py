"""What a RolloutEngine asks of the launch, in words of the field; how a release says it is the launcher's part.

Both sides hold it: the operator's CRD uses the enumerations, the launcher the rest.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_protocol.base import Request


class FleetMode(StrEnum):
    """Where trainer and engines run."""

    DISAGGREGATED = "Disaggregated"  # on different NPUs
    COLOCATED = "Colocated"  # on the same NPUs: the engine sleeps while the trainer steps


class TransferBackend(StrEnum):
    """How pushed weights travel; vLLM's and vLLM-Ascend's own names where they have one."""

    HCCL = "hccl"  # collectives between different NPUs
    IPC = "ipc"  # handles to memory of the same NPU
    GLOO = "gloo"  # collectives between CPUs
    SHM = "shm"  # shared memory of one host: what ipc is on a CPU


class TokenEndpoint(StrEnum):
    """Whether /inference/v1/generate is served: token ids in, token ids out."""

    DISABLED = "Disabled"
    ENABLED = "Enabled"  # beside the OpenAI routes
    TOKENS_ONLY = "TokensOnly"  # alone: no chat, no detokenizing, no stop strings


class LogprobsMode(StrEnum):
    """vLLM's own names (vllm/config/model.py, LogprobsMode)."""

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"


class RlConfig(Request):
    """vLLM-Ascend's additional_config.rl_config (vllm_ascend/ascend_config.py, RlConfig), key by key."""

    enabled: bool = True
    sleep_mode_extra_cleanup: bool = False
    enable_training_consistency: bool = False
    enable_batch_invariant: bool = False

    @property
    def optional_flags(self) -> tuple[str, ...]:
        """The optional keys that are set, by their names in the spec."""
        flags = {
            "sleepModeExtraCleanup": self.sleep_mode_extra_cleanup,
            "enableTrainingConsistency": self.enable_training_consistency,
            "enableBatchInvariant": self.enable_batch_invariant,
        }
        return tuple(name for name, on in flags.items() if on)

    @property
    def ignored_flags(self) -> tuple[str, ...]:
        """Those that have no effect because `enabled` is false."""
        return () if self.enabled else self.optional_flags

    @property
    def extra_cleanup(self) -> bool:
        """sleepModeExtraCleanup, in effect."""
        return self.enabled and self.sleep_mode_extra_cleanup

    @property
    def training_consistency(self) -> bool:
        """enableTrainingConsistency, in effect."""
        return self.enabled and self.enable_training_consistency

    @property
    def batch_invariant(self) -> bool:
        """enableBatchInvariant, in effect."""
        return self.enabled and self.enable_batch_invariant


class WeightTransfer(Request):
    """What the composite transfer engine may use for pushed weights. It stays vLLM's one configured backend itself."""

    backend: TransferBackend
    insecure_serialization: bool = False  # the user's consent to VLLM_ALLOW_INSECURE_SERIALIZATION=1


class Features(Request):
    """What an engine can do beyond completing prompts."""

    token_endpoint: TokenEndpoint = TokenEndpoint.DISABLED
    routed_experts: bool = False
    trace_replay: bool = False
    tool_parser: Annotated[str, Field(min_length=1, max_length=64)] | None = None  # None: no tool calling
    logprobs_mode: LogprobsMode | None = None  # None: the engine's default
    max_logprobs: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None  # -1: the whole vocabulary
