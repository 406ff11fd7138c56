"""How vLLM's argument parser resolves an option's spelling, so that a reserved one is found in every spelling.

Source: vllm/utils/argparse_utils.py (FlexibleArgumentParser) of 0.27.1 and CPython's argparse. Underscores before the
first dot count as dashes, `--x.key value` is the JSON option `--x`, `--x=y` is split at the first `=`, and an
unambiguous prefix of a long option stands for it. After a bare `--` everything is positional.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Given:
    """An option that a command line gives, with its value."""

    spelling: Spelling
    value: str | None  # None: none is written, so that it is a switch or the line is broken

    def member(self, key: str) -> str | None:
        """The value of one key of an option that takes JSON, written as a whole or as --option.key value."""
        path, _, attached = self.spelling.word.partition("=")
        if "." in path:
            return (attached or self.value) if path.partition(".")[2] == key else None
        try:
            found = json.loads(self.value or "")
        except ValueError:
            return None  # vLLM's parser says what is wrong with it
        return str(found[key]) if isinstance(found, dict) and key in found else None


def given_options(arguments: tuple[str, ...], known: frozenset[str]) -> Iterator[tuple[str, Given]]:
    """Each option that is spelt so that it stands for one, by its name in full."""
    for index, word in enumerate(arguments):
        if word == "--":
            return
        spelling = next(spellings((word,), known), None)
        if spelling is None or not spelling.exact:
            continue
        following = arguments[index + 1] if index + 1 < len(arguments) else None
        if "=" in word:
            value: str | None = word.partition("=")[2]
        elif following is not None and not any(spellings((following,), known)):
            value = following
        else:
            value = None
        yield spelling.options[0], Given(spelling, value)
