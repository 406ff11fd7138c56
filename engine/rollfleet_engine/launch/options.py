"""How vLLM's argument parser resolves an option's spelling, so that a reserved one is found in every spelling.

Source: vllm/utils/argparse_utils.py (FlexibleArgumentParser) of 0.27.1 and CPython's argparse. Underscores before the
first dot count as dashes, `--x.key value` is the JSON option `--x`, `--x=y` is split at the first `=`, and an
unambiguous prefix of a long option stands for it. After a bare `--` everything is positional.
"""

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
