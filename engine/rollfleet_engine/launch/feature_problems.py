"""What keeps the features of a spec from being had with this image, release, platform and model. Pure."""

from collections.abc import Iterator, Mapping

from rollfleet_engine.launch.dialects import ASCEND, ASCEND_BEFORE_RL_CONFIG, Dialect, PlatformWords
from rollfleet_engine.launch.exclusions import excluded
from rollfleet_engine.launch.facts import EngineKind, Facts, Plugin
from rollfleet_engine.launch.merge import differences
from rollfleet_engine.launch.options import GivenOptions, given_options
from rollfleet_engine.launch.wishes import Speech, Wish, wishes, words_for
from rollfleet_engine.launch.words import Absent, Feature, Words
from rollfleet_protocol.accelerators import DETERMINISTIC
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.launch_rules import ADDITIONAL, COMPILATION, GRAPH_KEY, RL_KEY, faults, graph_faults
from rollfleet_protocol.termination import Problem

_ARGS = "spec.engine.args"
_PARSER_PLUGIN = "--tool-parser-plugin"


def feature_problems(
    config: EngineConfig, facts: Facts, dialect: Dialect, platform: PlatformWords, speech: Speech
) -> Iterator[Problem]:
    """All of them."""
    asked = {wish.feature: wish for wish in wishes(config, facts)}
    given = given_options(config.engine_args, dialect.option_names())
    for fault in faults(config):
        yield Problem(cause=f"{fault.field} {fault.text}", remedy=f"correct {fault.field}")
    for wish in asked.values():
        yield from _spoken_against(wish, asked, given, dialect, platform)
    yield from excluded(config, asked, given, dialect)
    yield from _merged(config, speech)
    yield from _model(asked, facts)
    yield from _tool_parser(config, facts, given)
    yield from _npu(config, facts, platform, asked)


def _spoken_against(
    wish: Wish, asked: Mapping[Feature, Wish], given: GivenOptions, dialect: Dialect, platform: PlatformWords
) -> Iterator[Problem]:
    """What the release or platform lacks, and arguments that undo what is asked for."""
    words = words_for(wish.feature, dialect, platform)
    if isinstance(words, Absent):
        where = f"vLLM {dialect.releases} on {platform.name}"
        remedy = f"remove {wish.variable}" if wish.variable else words.remedy
        yield Problem(cause=f"{wish.named} cannot be had from {where}: {words.reason}", remedy=remedy)
        return
    if words.needs is not None and words.needs not in asked:
        yield Problem(
            cause=f"{wish.feature} has no effect in {platform.name} without {words.needs}",
            remedy=f"set both, or use an image with {ASCEND.name}",
        )
    for option in words.forbids:
        for each in given.get(option, ()):
            yield _contradiction(each.spelling.word, wish, words)
    for name, value in words.options(wish.value):
        for each in given.get(name, ()):
            if each.value != value:
                yield _contradiction(f"{name} {each.value}", wish, words)


def _contradiction(word: str, wish: Wish, words: Words) -> Problem:
    return Problem(
        cause=f"{_ARGS}: {word} contradicts {wish.named}, which needs {' '.join(words.args)}",
        remedy=f"remove it from {_ARGS}, or change {wish.named}",
    )


def _merged(config: EngineConfig, speech: Speech) -> Iterator[Problem]:
    """Values that the user and the spec's fields want otherwise. Those that launch_rules knows are told there."""
    own = {key: value for key, value in config.additional_config.items() if key not in (RL_KEY, "weight_nz_mode")}
    graphs = {key: value for key, value in config.compilation_config.items() if key != GRAPH_KEY}
    for field, theirs, ours in ((ADDITIONAL, own, speech.additional), (COMPILATION, graphs, speech.compilation)):
        for path, present, wanted in differences(theirs, ours):
            name = ".".join((field, *path))
            yield Problem(
                cause=f"{name} is {present!r}, but the spec's fields need {wanted!r}", remedy=f"remove {name}"
            )


def _model(asked: Mapping[Feature, Wish], facts: Facts) -> Iterator[Problem]:
    for feature in (Feature.ROUTED_EXPERTS, Feature.EXPERT):
        if feature in asked and facts.model.experts == 0:
            yield Problem(
                cause=f"{feature} needs a model with experts, and config.json of spec.model.path names none",
                remedy="set Disabled, or another model",
            )


def _tool_parser(config: EngineConfig, facts: Facts, given: GivenOptions) -> Iterator[Problem]:
    parser, known = config.features.tool_parser, facts.installation.tool_parsers
    if parser is None or not known or parser in known or _PARSER_PLUGIN in given:
        return
    yield Problem(
        cause=f"{Feature.TOOL_CALLING}.parser {parser!r} is no parser of this vLLM; it has {', '.join(known)}",
        remedy="name the one that fits the model",
    )


def _npu(
    config: EngineConfig, facts: Facts, platform: PlatformWords, asked: Mapping[Feature, Wish]
) -> Iterator[Problem]:
    if platform not in (ASCEND, ASCEND_BEFORE_RL_CONFIG) or facts.kind is EngineKind.SIMULATOR:
        return
    plugin = facts.installation.plugin
    yield from _built_for_another(config, plugin)
    if config.sleep_mode and not plugin.custom_kernels:
        yield _without_kernels(asked[Feature.SLEEP])
    if Feature.BATCH_INVARIANT in asked:
        yield from _batch_invariance(config, plugin, asked[Feature.BATCH_INVARIANT])
    for feature in (Feature.BATCH_INVARIANT, Feature.TRAINING_CONSISTENCY):
        if feature in asked:
            yield from _not_deterministic(asked[feature], plugin)


def _batch_invariance(config: EngineConfig, plugin: Plugin, wish: Wish) -> Iterator[Problem]:
    if wish.variable:  # a flag's own graphs are judged with it (launch_rules)
        for fault in graph_faults(config, wish.named):
            yield Problem(cause=f"{fault.field} {fault.text}", remedy=f"correct {fault.field}, or remove {wish.named}")
    if not plugin.custom_kernels:
        yield _without_kernels(wish)
    if not plugin.batch_invariant_kernels:
        yield Problem(
            cause=f"{wish.named} needs batch-invariant kernels: neither batch_invariant_ops nor Triton is in the image",
            remedy="build vLLM-Ascend with VLLM_BATCH_INVARIANT=1, or install triton-ascend",
        )


def _built_for_another(config: EngineConfig, plugin: Plugin) -> Iterator[Problem]:
    """An image is built for one generation of NPUs."""
    built_for = plugin.device.lstrip("_")
    said = None if config.accelerator is None else config.accelerator.profile
    if built_for and said is not None and built_for != said:
        yield Problem(
            cause=f"this image is built for {built_for}, and spec.accelerator.profile is {said}",
            remedy="use an image of that generation, or correct the profile",
        )


def _not_deterministic(wish: Wish, plugin: Plugin) -> Iterator[Problem]:
    built_for = plugin.device.lstrip("_")
    if built_for and built_for not in DETERMINISTIC:
        give_up = f"remove {wish.variable}" if wish.variable else "set it to false"
        yield Problem(
            cause=f"{wish.named} works on Atlas A2 and A3, and this image is built for {built_for}",
            remedy=f"{give_up}, or use nodes and an image of A2 or A3",
        )


def _without_kernels(wish: Wish) -> Problem:
    return Problem(
        cause=f"{wish.named} needs vLLM-Ascend's own kernels, and vllm_ascend_C is not in the image",
        remedy="build vLLM-Ascend with COMPILE_CUSTOM_KERNELS=1",
    )
