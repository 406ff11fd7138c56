"""Python that the pages show: it compiles, what it imports of ours is there, and our functions take what it gives them.

What it does is run elsewhere (tests/contract/test_trainer_page.py, examples/training): many names in it are a reader's.
"""

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rollfleet_trainer
from rollfleet_trainer import ProgressLine, RolloutFleet, errors, rollout_errors
from rollfleet_trainer.adopting import adopt
from rollfleet_trainer.publishing import publish
from rollfleet_trainer.retention import paths_in_use, retain
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.trl import FleetClient, vllm_client_replaced
from tests.support.pages import PAGES, ROOT, blocks, name_of, prose


def rollouts(_: RolloutFleet, **options: Any) -> None:
    """fleet.rollouts hands its options on."""
    inspect.signature(Rollouts).bind("http://qwen:8000", **{"model": "policy"} | options)


OURS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (publish, adopt, retain, paths_in_use, Rollouts, RolloutFleet, FleetClient, vllm_client_replaced)
} | {"ProgressLine": ProgressLine}
METHODS: dict[str, Callable[..., Any]] = {
    "fleet.update": RolloutFleet.update,
    "fleet.publish": RolloutFleet.publish,
    "fleet.begin": RolloutFleet.begin,
    "fleet.rollouts": rollouts,
    "r.complete": Rollouts.complete,
    "r.note_version": Rollouts.note_version,
}
NEEDS_TORCH = tuple(f"rollfleet_trainer.{name}" for name in ("gloo", "shm", "hccl"))
BLOCKS = [
    pytest.param(text, id=f"{name_of(page)} {place}")
    for page in PAGES
    for place, text in enumerate(blocks(page, "python"))
]


def parsed(text: str) -> ast.Module:
    """With `await` outside of functions, as in a notebook."""
    found = compile(text, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(found, ast.Module)
    return found


def wrong(text: str) -> Iterator[str]:
    """What of ours is not there, or would not take its arguments."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rollfleet_"):
            if node.module not in NEEDS_TORCH:
                module = importlib.import_module(str(node.module))
                yield from (each.name for each in node.names if not hasattr(module, each.name))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            positional = [None] * (len(node.args) + (called in METHODS))
            named = {each.arg: None for each in node.keywords if each.arg is not None}
            try:
                if called in OURS or called in METHODS:
                    inspect.signature((OURS | METHODS)[called]).bind(*positional, **named)
                if called == "fleet.rollouts":
                    rollouts(None, **named)  # type: ignore[arg-type]
            except TypeError as error:
                yield f"{called}: {error}"


@pytest.mark.parametrize("text", BLOCKS)
def test_code_of_the_pages_fits_ours(text: str) -> None:
    assert list(wrong(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "await fleet.update(policy, steps=3)",
        "fleet.rollouts(max_stale=1)",
        "adopt('/checkpoints', wait_s=600)",
        "from rollfleet_trainer import RolloutFleets",
    ],
)
def test_the_check_sees_what_does_not_fit(text: str) -> None:
    assert len(list(wrong(text))) == 1


def test_trainers_of_the_examples_are_run_by_tests_that_ci_runs() -> None:
    """`make test` is all that CI runs; these are layers of it."""
    layers = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("LAYERS")).split()
    assert {"contract", "e2e"} <= set(layers)
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    tests = "".join(file.read_text() for layer in ("contract", "e2e") for file in (ROOT / "tests" / layer).glob("*.py"))
    programs = [
        file
        for file in (ROOT / "examples").rglob("*.py")
        if file.name != "__main__.py" and 'if __name__ == "__main__"' in file.read_text()
    ]
    assert {file.parent.name for file in programs} >= {"push", "training"}
    for file in programs:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        ways = (f"{package}.{file.stem}", f"from {package} import {file.stem}")
        assert any(way in tests for way in ways), f"{ways[0]} is run by no test"


TRAINERS_PAGES = [
    ROOT / "docs" / name
    for name in ("trainer.md", "rollouts.md", "checkpoints.md", "trl.md", "grpo.md", "training-loop.md")
]


def rows(page: Path) -> set[str]:
    """Names in code in the first column of the table below "## Errors"."""
    [text] = re.findall(r"(?ms)^## Errors$(.*?)^## ", page.read_text())
    return {name for row in re.findall(r"(?m)^\|([^|]*)\|", text) for name in re.findall(r"`(\w+)`", row)}


def test_errors_of_the_pages_are_imported_from_where_they_say() -> None:
    """From rollfleet_trainer, by the names that stand there."""
    told = {name for page in TRAINERS_PAGES for name in re.findall(r"\b[A-Z]\w*Error\b", prose(page))}
    tables = rows(ROOT / "docs" / "trainer.md") | rows(ROOT / "docs" / "rollouts.md")
    assert {"ApiServerError", "PublishError", "RefusedError", "Superseded"} <= tables
    for name in sorted(told | tables):
        assert hasattr(builtins, name) or issubclass(getattr(rollfleet_trainer, name), Exception), name


def test_every_error_of_a_trainer_is_exported_under_a_name_of_its_own() -> None:
    classes = [
        each
        for module in (errors, rollout_errors)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Exception) and each.__module__ == module.__name__
    ]
    assert len(classes) > 20
    for each in classes:
        assert getattr(rollfleet_trainer, each.__name__) is each
    assert sorted(rollfleet_trainer.__all__) == rollfleet_trainer.__all__
    assert all(hasattr(rollfleet_trainer, name) for name in rollfleet_trainer.__all__)
