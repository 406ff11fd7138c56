"""Compares what our backends rely on in vLLM-Ascend (devtools/ascend_rules.py) with a checkout, by reading its sources.

`python -m devtools.check_ascend CHECKOUT [--torch-npu CHECKOUT]` (make check-ascend VLLM_ASCEND=CHECKOUT, and
TORCH_NPU: that one with devtools/torch_npu_rules.py). Nothing is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from devtools import torch_npu_rules
from devtools.ascend_rules import RULES, Rule

_Named = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class CheckoutError(Exception):
    """The checkout is not what can be compared; the message says what is missing."""


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(_read(file))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        whose = "torch_npu" if "torch_npu" in file.parts else "vllm-ascend"
        raise CheckoutError(f"{file}: {error.strerror}: is this a checkout of {whose}?") from error


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


def check(checkout: Path, rules: Sequence[Rule] = RULES, texts: Sequence[torch_npu_rules.Text] = ()) -> int:
    """The number of rules that do not hold, each printed."""
    wrong = 0
    for rule in rules:
        wrong += _tell(f"{rule.file}: {rule.name} ({rule.why})", list(differences(checkout, rule)))
    for text in texts:
        said = "".join(text.says.split()) in "".join(_read(checkout / text.file).split())
        wrong += _tell(f"{text.file}: {text.says} ({text.why})", [] if said else ["it does not say so"])
    print(f"{len(rules) + len(texts) - wrong} of {len(rules) + len(texts)} rules hold")
    return wrong


def _tell(what: str, wrong: list[str]) -> bool:
    print(f"{'DIFFERS' if wrong else 'holds  '} {what}{': ' if wrong else ''}{'; '.join(wrong)}")
    return bool(wrong)


def main(arguments: list[str] | None = None) -> int:
    """0: all rules hold; 1: some do not; 2: there is nothing to compare with."""
    parser = argparse.ArgumentParser(description="compare vLLM-Ascend with devtools/ascend_rules.py")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--torch-npu", type=Path, help="a checkout of github:Ascend/pytorch")
    chosen = parser.parse_args(arguments)
    try:
        wrong = check(chosen.checkout)
        if chosen.torch_npu is not None:
            wrong += check(chosen.torch_npu, torch_npu_rules.RULES, torch_npu_rules.TEXTS)
    except CheckoutError as error:
        print(f"check-ascend: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
