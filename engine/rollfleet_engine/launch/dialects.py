"""What differs between vLLM releases on the command line: the only place that knows releases.

The table covers all releases from the first on without a gap. A range is either spoken, its words read from and tried
with the argument parsers of the releases in `verified`, or it says why it is not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from rollfleet_engine.launch.reserved import RESERVED_OPTIONS
from rollfleet_engine.launch.words import Absent, Compilation, Exclusion, Feature, Option, Thing, Vocabulary, Words
from rollfleet_protocol.launch_variables import (
    DETERMINISTIC_VARIABLES,
    NZ_OFF,
    RESERVED_VARIABLES,
    RUNNER_V2,
    SPAWN,
    Reserved,
)

Release = tuple[int, int, int]
# Started with python -m where no API server is: what `vllm serve --headless` does, by whatever name vLLM is installed.
FOLLOWER_MODULE = "rollfleet_engine.vllm.follower"
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?P<development>\.?dev\d+)?(?:\.?post\d+)?(?:\+\S+)?$")


@dataclass(frozen=True)
class Dialect:
    """How the releases from `first` up to, not including, `end` are started."""

    first: Release
    end: Release
    verified: tuple[str, ...]  # releases whose own parser was asked
    options_file: str  # beside this module
    words: Vocabulary
    exclusions: tuple[Exclusion, ...] = ()
    module: str = "vllm.entrypoints.openai.api_server"  # started with python -m
    development: bool = False  # builds between two releases count too

    @property
    def releases(self) -> str:
        """For messages."""
        return f">={_text(self.first)},<{_text(self.end)}"

    @property
    def reserved_options(self) -> tuple[Reserved, ...]:
        """Those that this range has."""
        known = self.option_names()
        return tuple(rule for rule in RESERVED_OPTIONS if any(rule.covers(name) for name in known))

    @property
    def reserved_variables(self) -> tuple[Reserved, ...]:
        """Variables that are not the user's to set."""
        return RESERVED_VARIABLES

    def option_names(self) -> frozenset[str]:
        """All options that this release's parser knows."""
        return _read_options(self.options_file)


@dataclass(frozen=True)
class Unspoken:
    """A range that no plan is made for."""

    first: Release
    end: Release
    reason: str


_ON_PIPELINE = "answers would lack the experts of other stages (vLLM's own check, config/vllm.py)"
_KV_CONNECTOR = "its records are indexed by slots of the local KV cache (vLLM's own check, config/vllm.py)"
_SPECULATION = "--speculative-config"
_TRACE_NEEDS_V2 = "trace replay needs Model Runner V2, which does not do that (config/vllm.py)"
_CONTEXT_SPLIT = "not with context parallelism (vLLM's own check, config/vllm.py)"

_COMMON: Mapping[Feature, Words | Absent] = {
    Feature.SLEEP: Words(args=("--enable-sleep-mode",), env=SPAWN),
    Feature.INSECURE_SERIALIZATION: Words(env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}),
    Feature.TOKENS_ONLY: Words(args=("--tokens-only",)),
    Feature.ROUTED_EXPERTS: Words(args=("--enable-return-routed-experts",)),
    Feature.TOOL_CALLING: Words(args=("--enable-auto-tool-choice", "--tool-call-parser", "{}")),
    Feature.LOGPROBS_MODE: Words(args=("--logprobs-mode", "{}")),
    Feature.MAX_LOGPROBS: Words(args=("--max-logprobs", "{}")),
    Feature.TENSOR: Words(args=("--tensor-parallel-size", "{}")),
    Feature.PIPELINE: Words(args=("--pipeline-parallel-size", "{}")),
    Feature.DATA: Words(args=("--data-parallel-size", "{}")),
    Feature.EXPERT: Words(args=("--enable-expert-parallel",)),
    # Which of how many, the leader's address and port, and the own address: vLLM would ask for the route to 8.8.8.8.
    Feature.NODES: Words(
        args=(
            *("--nnodes", "{0}", "--node-rank", "{1}", "--master-addr", "{2}", "--master-port", "{3}"),
            *("--distributed-executor-backend", "mp"),
        ),
        env={"VLLM_HOST_IP": "{4}"},
    ),
    Feature.FOLLOWS: Words(args=("--headless",), note=f"started as `{FOLLOWER_MODULE}`"),
}
_ALWAYS_THERE = Words(note="served anyway")
# Routed experts are the V1 runner's until V2 learns them (0.29, config/vllm.py).
_BY_V1 = Words(args=("--enable-return-routed-experts",), env={"VLLM_USE_V2_MODEL_RUNNER": "0"})
_NO_TRACE = Absent("it came with 0.29.0", "use an image with vLLM 0.29.0 or later, or set Disabled")
_BEFORE_TRACE: Vocabulary = {
    **_COMMON,
    Feature.TOKEN_ENDPOINT: _ALWAYS_THERE,
    Feature.ROUTED_EXPERTS: _BY_V1,
    Feature.TRACE_REPLAY: _NO_TRACE,
}
_TRACE = Words(args=("--enable-trace-replay",), env=RUNNER_V2)
_NO_STAGES = Exclusion(Feature.ROUTED_EXPERTS, Feature.PIPELINE, _ON_PIPELINE)
# --kv-offloading-size makes a connector too (config/vllm.py, _post_init_kv_transfer_config), after that check.
_ROUTED = (
    _NO_STAGES,
    Exclusion(Feature.ROUTED_EXPERTS, Option("--kv-offloading-size"), _KV_CONNECTOR),
)
_ONE = frozenset({"1"})
_NO_CONTEXT_SPLIT = Exclusion(
    Feature.ROUTED_EXPERTS, Option("--decode-context-parallel-size", values=_ONE, but=True), _CONTEXT_SPLIT
)


def _trace_excludes(*others: Thing, also: Thing | None = None) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(Feature.TRACE_REPLAY, other, _TRACE_NEEDS_V2, also) for other in others)


def _method(*names: str, but: bool = False) -> Option:
    return Option(_SPECULATION, "method", frozenset(names), but)


# config/vllm.py, _get_v2_model_runner_unsupported_features: of 0.29, and of 0.32 with _get_dbo_unsupported_features.
# Where no method is written, vLLM takes it from the draft model, and says itself what it does not do.
_PARALLEL_DRAFTS = _trace_excludes(
    Option(_SPECULATION, "parallel_drafting", frozenset({"true"})), also=_method("dflash", "dspark", but=True)
)
_TRACE_EXCLUDES_29 = (
    *_trace_excludes(
        Option("--enable-dbo"),
        Option("--kv-sharing-fast-prefill"),
        Option("--logits-processors"),
        # Names of MTP of one model are the method mtp (config/speculative.py).
        _method("eagle", "eagle3", "mtp", "*_mtp", "dflash", "dspark", "extract_hidden_states", but=True),
        Compilation("mode", frozenset({"1", "STOCK_TORCH_COMPILE"})),
    ),
    *_trace_excludes(Compilation("pass_config.enable_sp", frozenset({"true"})), also=Feature.TENSOR),
    *_trace_excludes(_method("eagle3"), also=Feature.PIPELINE),
    *_PARALLEL_DRAFTS,
)
_MICROBATCHES = (Option("--enable-dbo"), Option("--ubatch-size", values=frozenset({"0", "1"}), but=True))
_TRACE_EXCLUDES_32 = (
    *_trace_excludes(
        _method("suffix", "medusa", "mlp_speculator", "custom_class"),
        Option(_SPECULATION, "use_heterogeneous_vocab", frozenset({"true"})),
    ),
    *_PARALLEL_DRAFTS,
    *_trace_excludes(*_MICROBATCHES, also=Option(_SPECULATION)),
    *_trace_excludes(*_MICROBATCHES, also=Feature.PIPELINE),
    *_trace_excludes(*_MICROBATCHES, also=Option("--decode-context-parallel-size", values=_ONE, but=True)),
    *_trace_excludes(*_MICROBATCHES, also=Compilation("cudagraph_mode", frozenset({"PIECEWISE", "1"}))),
    *_trace_excludes(*_MICROBATCHES, also=Feature.BATCH_INVARIANT),  # its graphs are PIECEWISE
    *_trace_excludes(*_MICROBATCHES, also=Feature.TRAINING_CONSISTENCY),
)


RANGES: tuple[Dialect | Unspoken, ...] = (
    Dialect(
        first=(0, 23, 0),
        end=(0, 24, 0),
        verified=("0.23.0",),
        options_file="vllm-0.23.0.options",
        words=_BEFORE_TRACE,
        exclusions=_ROUTED,
    ),
    Unspoken((0, 24, 0), (0, 27, 1), "no release of this range was tried"),
    Dialect(
        first=(0, 27, 1),
        end=(0, 28, 0),
        verified=("0.27.1",),
        options_file="vllm-0.27.1.options",
        words=_BEFORE_TRACE,
        exclusions=_ROUTED,
    ),
    Unspoken((0, 28, 0), (0, 29, 0), "no release of this range was tried"),
    # Builds between 0.29 and 0.30 have the token routes only where a variable asks for them (vllm#54579), 0.30 where a
    # flag does (vllm#55176); 0.29.0 itself serves them anyway and warns of the variable.
    Dialect(
        first=(0, 29, 0),
        end=(0, 30, 0),
        verified=("0.29.0",),
        options_file="vllm-0.29.0.options",
        words={
            **_COMMON,
            Feature.TOKEN_ENDPOINT: Words(env={"VLLM_ENABLE_SCALE_OUT_ENDPOINTS": "1"}),
            Feature.TRACE_REPLAY: _TRACE,
        },
        exclusions=(
            *_ROUTED,
            _NO_CONTEXT_SPLIT,
            *_TRACE_EXCLUDES_29,
        ),
        development=True,
    ),
    Unspoken((0, 30, 0), (0, 32, 0), "no release of this range was tried"),
    Dialect(
        first=(0, 32, 0),
        end=(0, 33, 0),
        verified=("0.32.0",),
        options_file="vllm-0.32.0.options",
        words={
            **_COMMON,
            Feature.TOKEN_ENDPOINT: Words(args=("--enable-scale-out",)),
            Feature.TRACE_REPLAY: _TRACE,
        },
        exclusions=(
            _NO_STAGES,
            Exclusion(
                Feature.ROUTED_EXPERTS,
                Option("--no-enable-prefix-caching"),
                "its output connector needs prefix caching (vLLM's own check, config/vllm.py)",
            ),
            Exclusion(
                Feature.ROUTED_EXPERTS,
                Feature.BATCH_INVARIANT,
                "routed experts need prefix caching, which batch invariance switches off",
            ),
            _NO_CONTEXT_SPLIT,
            Exclusion(
                Feature.ROUTED_EXPERTS,
                Option(_SPECULATION, "enable_adaptive_verification", frozenset({"true"})),
                "not with adaptive verification (vLLM's own check, config/vllm.py)",
            ),
            *_TRACE_EXCLUDES_32,
        ),
    ),
)
DIALECTS = tuple(each for each in RANGES if isinstance(each, Dialect))


@dataclass(frozen=True)
class PlatformWords:
    """What a platform adds to, and changes in, the words of every release."""

    name: str
    words: Vocabulary
    env: Mapping[str, str] = field(default_factory=dict)  # for every engine
    cleans_allocator: bool = False  # rl_config takes expandable_segments out of PYTORCH_NPU_ALLOC_CONF


_NPU = "it is vLLM-Ascend's: this engine has another platform"
_NO_NPU = Absent(_NPU, "use an image with vLLM-Ascend, or set it to false")
_FOR_CPU = Absent("it is for CPUs", "use hccl, ipc where trainer and engine share NPUs, or checkpoints alone")
_V2_NEEDS_TRITON = "Model Runner V2 needs Triton on the device, and the CPU has none"
CPU = PlatformWords(
    name="CPU",
    env={"VLLM_TARGET_DEVICE": "cpu"},
    words={
        Feature.RL_MODE: Words(note="nothing to change: no FRACTAL_NZ, no NPU allocator"),
        Feature.EXTRA_CLEANUP: _NO_NPU,
        Feature.TRAINING_CONSISTENCY: _NO_NPU,
        Feature.BATCH_INVARIANT: _NO_NPU,
        # vLLM refuses the flag there (config/model.py: is_sleep_mode_available).
        Feature.SLEEP: Words(env=SPAWN, note="no flag: vLLM refuses it on CPUs"),
        Feature.HCCL: Absent(_NPU, "use gloo"),
        Feature.IPC: Absent(_NPU, "use shm"),
        Feature.GLOO: Words(),
        Feature.SHM: Words(),
        Feature.INSECURE_SERIALIZATION: Absent("gloo and shm pickle nothing", "remove it"),
        Feature.ROUTED_EXPERTS: Absent("vLLM's CPU back end does not record them", "set Disabled, or use NPUs"),
        Feature.TRACE_REPLAY: Absent(_V2_NEEDS_TRITON, "set Disabled, or use NPUs"),
    },
)
_NOTHING = Words(note="no effect on a simulator")
SIMULATOR = PlatformWords(
    name="simulator",
    words={
        **dict.fromkeys(
            (
                *(Feature.RL_MODE, Feature.EXTRA_CLEANUP, Feature.TRAINING_CONSISTENCY, Feature.BATCH_INVARIANT),
                *(Feature.SLEEP, Feature.HCCL, Feature.IPC, Feature.GLOO, Feature.SHM),
                Feature.INSECURE_SERIALIZATION,
            ),
            _NOTHING,
        ),
    },
)

_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF without expandable_segments"
# FA3 and batch-invariant attention cannot be captured (vllm-ascend, docs/source/user_guide/feature_guide).
_PIECEWISE: Mapping[str, str] = {"cudagraph_mode": "PIECEWISE"}
# Not switched off by vLLM-Ascend itself (vllm-ascend#16232): results would still depend on the batch.
_ONE_PREFILL = ("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--block-size", "128")
_MANY_PREFILLS = ("--enable-chunked-prefill", "--enable-prefix-caching")
_ASCEND_TRANSFER: Vocabulary = {
    Feature.HCCL: Words(note="our back end over vLLM-Ascend's HCCL library and packed broadcasts"),
    Feature.IPC: Words(note="our back end over torch_npu's handles, NPUs named as vLLM-Ascend's npu_ipc names them"),
    Feature.GLOO: _FOR_CPU,
    Feature.SHM: _FOR_CPU,
}
# Before vllm-ascend#13748 there is no rl_config: releases to 0.26, and builds of main for vLLM 0.27.1 of 2026-08-13
# to 2026-08-19. The launcher brings about what it would (vllm_ascend/ascend_config.py, worker.py: waking asks the
# setting, updating asks the variable; platform.py: FA3 only under batch invariance).
ASCEND_BEFORE_RL_CONFIG = PlatformWords(
    name="vLLM-Ascend without rl_config",
    cleans_allocator=True,
    words={
        **_ASCEND_TRANSFER,
        Feature.RL_MODE: Words(env=NZ_OFF, additional={"weight_nz_mode": 0}, note=_ALLOCATOR),
        Feature.EXTRA_CLEANUP: Words(additional={"enable_sleep_mode_extra_cleanup": True}),
        Feature.TRAINING_CONSISTENCY: Words(
            args=("--attention-backend", "FLASH_ATTN"), compilation=_PIECEWISE, needs=Feature.BATCH_INVARIANT
        ),
        Feature.BATCH_INVARIANT: Words(
            args=_ONE_PREFILL, env=DETERMINISTIC_VARIABLES, compilation=_PIECEWISE, forbids=_MANY_PREFILLS
        ),
    },
)
ASCEND = PlatformWords(
    name="vLLM-Ascend with rl_config",
    cleans_allocator=True,
    words={
        **_ASCEND_TRANSFER,
        Feature.RL_MODE: Words(env=NZ_OFF, additional={"rl_config": {"enabled": True}}, note=_ALLOCATOR),
        Feature.EXTRA_CLEANUP: Words(additional={"rl_config": {"sleep_mode_extra_cleanup": True}}),
        Feature.TRAINING_CONSISTENCY: Words(
            additional={"rl_config": {"enable_training_consistency": True}}, compilation=_PIECEWISE
        ),
        Feature.BATCH_INVARIANT: Words(
            args=_ONE_PREFILL,
            env=DETERMINISTIC_VARIABLES,
            additional={"rl_config": {"enable_batch_invariant": True}},
            compilation=_PIECEWISE,
            forbids=_MANY_PREFILLS,
        ),
    },
)


def supported_releases() -> str:
    """For messages."""
    return ", ".join(dialect.releases for dialect in DIALECTS)


def range_of(release: str) -> Dialect | Unspoken | None:
    """The range that a release belongs to; None where it is older, newer, or no release."""
    numbers = _RELEASE.match(release)
    if numbers is None:  # a release candidate
        return None
    parsed = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
    found = next((each for each in RANGES if each.first <= parsed < each.end), None)
    if numbers["development"] and not (isinstance(found, Dialect) and found.development):
        return None
    return found


def dialect_of(release: str) -> Dialect | None:
    """The dialect that a release speaks, or None where it is not known."""
    found = range_of(release)
    return found if isinstance(found, Dialect) else None


@cache
def _read_options(name: str) -> frozenset[str]:
    lines = (files(__package__) / name).read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line.startswith("-"))


def _text(release: Release) -> str:
    return ".".join(str(number) for number in release)
