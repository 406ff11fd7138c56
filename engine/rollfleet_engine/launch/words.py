"""What can be asked of an engine, and the words in which a release is told."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue


class Feature(StrEnum):
    """What a spec can ask for, by the field that asks for it."""

    RL_MODE = "spec.rlConfig.enabled"
    EXTRA_CLEANUP = "spec.rlConfig.sleepModeExtraCleanup"
    TRAINING_CONSISTENCY = "spec.rlConfig.enableTrainingConsistency"
    BATCH_INVARIANT = "spec.rlConfig.enableBatchInvariant"
    SLEEP = "spec.sleepMode"
    HCCL = "spec.weightTransfer.backend hccl"
    IPC = "spec.weightTransfer.backend ipc"
    GLOO = "spec.weightTransfer.backend gloo"
    SHM = "spec.weightTransfer.backend shm"
    INSECURE_SERIALIZATION = "spec.weightTransfer.insecureSerialization"
    TOKEN_ENDPOINT = "spec.features.tokenEndpoint Enabled"  # noqa: S105 - no password
    TOKENS_ONLY = "spec.features.tokenEndpoint TokensOnly"
    ROUTED_EXPERTS = "spec.features.routedExperts"
    TRACE_REPLAY = "spec.features.traceReplay"
    TOOL_CALLING = "spec.features.toolCalling"
    LOGPROBS_MODE = "spec.features.logprobs.mode"
    MAX_LOGPROBS = "spec.features.logprobs.max"
    TENSOR = "spec.parallelism.tensor"
    PIPELINE = "spec.parallelism.pipeline"
    DATA = "spec.parallelism.data"
    EXPERT = "spec.parallelism.expert"
    NODES = "spec.parallelism.nodes"
    FOLLOWS = "spec.parallelism.nodes in the pods that follow"


@dataclass(frozen=True)
class Words:
    """How a release is told one thing."""

    args: tuple[str, ...] = ()  # "{}" stands for the value, "{0}" for the first word of it
    env: Mapping[str, str] = field(default_factory=dict)  # the same
    additional: Mapping[str, JsonValue] = field(default_factory=dict)  # merged into --additional-config
    compilation: Mapping[str, JsonValue] = field(default_factory=dict)  # merged into --compilation-config
    forbids: tuple[str, ...] = ()  # options of spec.engine.args that would undo it
    needs: Feature | None = None  # without which it has no effect in this release
    note: str = ""  # what else there is to say, for the documentation

    def options(self, value: str = "") -> Iterable[tuple[str, str | None]]:
        """Each option with its value, None for a switch."""
        words = [filled(word, value) for word in self.args]
        for index, word in enumerate(words):
            if word.startswith("--"):
                following = words[index + 1 : index + 2]
                yield word, following[0] if following and not following[0].startswith("--") else None


def filled(word: str, value: str) -> str:
    """The value in the place of "{}", one of its words in the place of "{0}" and so on."""
    if word == "{}":
        return value
    if not (word.startswith("{") and word.endswith("}")):
        return word
    parts, place = value.split(" "), int(word[1:-1])
    return parts[place] if place < len(parts) else parts[-1]


@dataclass(frozen=True)
class Absent:
    """Why a release or platform does not have it, and what to do instead."""

    reason: str
    remedy: str


Vocabulary = Mapping[Feature, Words | Absent]


@dataclass(frozen=True)
class Option:
    """An option of spec.engine.args, or one key of it where it takes JSON, where only some values matter."""

    name: str
    key: str = ""  # a path with dots
    values: frozenset[str] = frozenset()  # empty: any. As JSON writes them, words without quotes; * as in a shell
    but: bool = False  # every value but these, where one is written


@dataclass(frozen=True)
class Compilation:
    """A key of spec.engine.compilationConfig with the values that matter."""

    key: str  # a path with dots
    values: frozenset[str]  # as JSON writes them, words without quotes


Thing = Feature | Option | Compilation


@dataclass(frozen=True)
class Exclusion:
    """Two things that a release does not do together, or only not where a third is there too."""

    feature: Feature
    other: Thing
    reason: str
    also: Thing | None = None
