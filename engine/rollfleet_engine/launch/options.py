"""How vLLM's argument parser resolves an option's spelling, so that a reserved one is found in every spelling.

Source: vllm/utils/argparse_utils.py (FlexibleArgumentParser) of 0.27.1 and CPython's argparse. Underscores before the
first dot count as dashes, `--x.key value` is the JSON option `--x`, `--x=y` is split at the first `=`, and an
unambiguous prefix of a long option stands for it. After a bare `--` everything is positional.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

# argparse takes such a word for a negative number, not for an option, where no option of the parser looks like one.
_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True)
class Spelling:
    """One word of a command line that is an option, and what it may stand for."""

    word: str  # as written
    name: str  # as the parser sees it, without value or JSON path
    options: tuple[str, ...]  # what it resolves to: one, or several (ambiguous), or none (unknown)

    @property
    def exact(self) -> bool:
        """Whether the spelling stands for exactly one option."""
        return len(self.options) == 1


def spellings(arguments: Iterable[str], known: frozenset[str]) -> Iterator[Spelling]:
    """Each option of a command line with what it resolves to among the `known` ones."""
    for word in arguments:
        if word == "--":
            return
        if word.startswith("-") and word != "-" and not _NEGATIVE_NUMBER.match(word):
            name = _name(word)
            yield Spelling(word=word, name=name, options=_resolve(name, known))


def _name(word: str) -> str:
    if word.startswith("-O") and not word.startswith("--"):
        return "--optimization-level"  # -O3, -O=3, -O 3
    name = re.split(r"[=.]", word, maxsplit=1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _resolve(name: str, known: frozenset[str]) -> tuple[str, ...]:
    if name in known:
        return (name,)
    found = {option for option in known if option.startswith(name)}
    if not name.startswith("--") and name[:2] in known:
        found.add(name[:2])  # a short option with its value attached: -qawq
    return tuple(sorted(found))


# Options that the parser knows by two names (engine/arg_utils.py); tests/parsers compares with every release's own.
ALIASES: Mapping[str, str] = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-h": "--help",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
# Options that write one key of another (engine/arg_utils.py, create_speculative_config).
SHORTHANDS: Mapping[str, tuple[str, str]] = {
    "--spec-method": ("--speculative-config", "method"),
    "--spec-model": ("--speculative-config", "model"),
    "--spec-tokens": ("--speculative-config", "num_speculative_tokens"),
}


@dataclass(frozen=True)
class Given:
    """An option that a command line gives, with its value."""

    spelling: Spelling
    value: str | None  # None: none is written, so that it is a switch or the line is broken
    shorthand: str = ""  # the key of the JSON option that this one writes

    def members(self, key: str) -> Iterator[str]:
        """Values of one key, a path with dots, of an option that takes JSON: as a whole, --option.key value, or both.

        Keys may be written with dashes too, as vLLM takes them.
        """
        if self.shorthand:
            yield from [self.value] if self.shorthand == key and self.value is not None else []
            return
        parts = self.spelling.word.partition("=")[0].partition(".")[2].rstrip("+")
        if not parts:
            yield from _at(_read(self.value), key.split("."))
            return
        path, written = key.split("."), parts.replace("-", "_").split(".")
        if path == written:
            yield self.value or ""
        elif path[: len(written)] == written:  # --option.key with an object as its value
            yield from _at(_read(self.value), path[len(written) :])


def _read(value: str | None) -> JsonValue:
    try:
        found: JsonValue = json.loads(value or "")
    except (ValueError, RecursionError):
        return None  # vLLM's parser says what is wrong with it
    return found


def _at(found: JsonValue, path: Sequence[str]) -> Iterator[str]:
    for part in path:
        keys = {key.replace("-", "_"): value for key, value in found.items()} if isinstance(found, dict) else {}
        if part not in keys:
            return
        found = keys[part]
    yield found if isinstance(found, str) else json.dumps(found)


GivenOptions = Mapping[str, tuple[Given, ...]]


def given_options(arguments: Sequence[str], known: frozenset[str]) -> GivenOptions:
    """Every occurrence of each option that is spelt so that it stands for one, by its long name, in order.

    JSON may be given in parts, `--x.a 1 --x.b 2`, of which vLLM makes one object. What is written in short is listed
    under its own name and under that of the option that it writes to.
    """
    found: dict[str, list[Given]] = {}
    for index, word in enumerate(arguments):
        if word == "--":
            break
        spelling = next(spellings((word,), known), None)
        if spelling is None or not spelling.exact:
            continue
        name = ALIASES.get(spelling.options[0], spelling.options[0])
        given = Given(spelling, _value(arguments, index, known))
        found.setdefault(name, []).append(given)
        if name in SHORTHANDS:
            option, key = SHORTHANDS[name]
            found.setdefault(option, []).append(replace(given, shorthand=key))
    return {name: tuple(each) for name, each in found.items()}


def _value(arguments: Sequence[str], index: int, known: frozenset[str]) -> str | None:
    word = arguments[index]
    if "=" in word:
        return word.partition("=")[2]
    if _is_attached(word, known):
        return word[2:]
    following = arguments[index + 1] if index + 1 < len(arguments) else None
    return following if following is not None and not any(spellings((following,), known)) else None


def positional_words(arguments: Sequence[str], known: frozenset[str]) -> Iterator[str]:
    """Words that are neither an option nor the first value of one that takes values."""
    takes = False
    for index, word in enumerate(arguments):
        if word == "--":
            yield from arguments[index + 1 :]
            return
        spelling = next(spellings((word,), known), None)
        if spelling is None and not takes:
            yield word
        takes = not (spelling is None or "=" in word or _is_attached(word, known) or _is_switch(spelling, known))


def _is_attached(word: str, known: frozenset[str]) -> bool:
    """Whether a short option's value is part of the word: -O3, -qawq."""
    return not word.startswith("--") and len(word) > 2 and word.partition(".")[0] not in known


def _is_switch(spelling: Spelling, known: frozenset[str]) -> bool:
    """Whether it takes no value: a negation, what has one, or one of the few that argparse only stores true for."""
    if not spelling.exact or "." in spelling.word:
        return False
    name = ALIASES.get(spelling.options[0], spelling.options[0])
    return name in _STORE_TRUE or name.startswith("--no-") or f"--no-{name.removeprefix('--')}" in known


_STORE_TRUE = frozenset(
    {
        *("--aggregate-engine-logging", "--data-parallel-multi-port-external-lb", "--disable-log-stats"),
        *("--grpc", "--headless", "--help"),
    }
)
