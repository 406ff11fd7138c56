"""Compares what our backends rely on in vLLM-Ascend (devtools/ascend_rules.py) with a checkout, by reading its sources.

`python -m devtools.check_ascend CHECKOUT` (make check-ascend VLLM_ASCEND=CHECKOUT). Nothing is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from devtools.ascend_rules import RULES, Rule

_Named = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class CheckoutError(Exception):
    """The checkout is not what can be compared; the message says what is missing."""


@cache
def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckoutError(f"{file}: {error.strerror}: is this a checkout of vllm-ascend?") from error


def _find(body: Sequence[ast.stmt], name: str) -> _Named | None:
    """What this name is bound to, at the top of a module or class; with dots, within a class."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return _find(node.body, rest) if rest else node
        if rest:
            continue
        if isinstance(node, ast.FunctionDef) and node.name == first:
            return node
        if isinstance(node, ast.Assign) and any(_is(target, first) for target in node.targets):
            return node
        if isinstance(node, ast.AnnAssign) and _is(node.target, first):
            return node
    return None


def _is(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _arguments(node: ast.FunctionDef) -> tuple[str, ...]:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return tuple(name for name in names if name != "self")


def differences(checkout: Path, rule: Rule, *, bodies: bool = True) -> Iterator[str]:
    """What the checkout has otherwise than the rule says; without bodies, only names, arguments and values."""
    node = _find(_parsed(checkout / rule.file).body, rule.name)
    if node is None:
        yield "it is not there"
        return
    if rule.arguments is not None:
        if not isinstance(node, ast.FunctionDef):
            yield "it is no function"
        elif _arguments(node) != rule.arguments:
            yield f"its arguments are {_arguments(node)}, not {rule.arguments}"
    if rule.value:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is None or ast.unparse(value) != rule.value:
            yield f"it is {'' if value is None else ast.unparse(value)!r}, not {rule.value!r}"
    if bodies:
        text = ast.unparse(node)
        yield from (f"it has no {each!r}" for each in rule.holds if each not in text)


def check(checkout: Path) -> int:
    """The number of rules that do not hold, each printed."""
    wrong = 0
    for rule in RULES:
        found = list(differences(checkout, rule))
        wrong += bool(found)
        state = "DIFFERS" if found else "holds  "
        print(f"{state} {rule.file}: {rule.name} ({rule.why}){': ' if found else ''}{'; '.join(found)}")
    print(f"{len(RULES) - wrong} of {len(RULES)} rules hold")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """0: all rules hold; 1: some do not; 2: there is nothing to compare with."""
    parser = argparse.ArgumentParser(description="compare vLLM-Ascend with devtools/ascend_rules.py")
    parser.add_argument("checkout", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        return 1 if check(chosen.checkout) else 0
    except CheckoutError as error:
        print(f"check-ascend: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
