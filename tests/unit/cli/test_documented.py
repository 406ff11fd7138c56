"""docs/cli.md and the command line agree: each command has its part there, and each option is told of, both ways."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from rollfleet_cli.main import app
from tests.support.pages import PAGES, blocks, name_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "cli.md").read_text()
COMMANDS: dict[str, click.Command] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
OF_ALL = {"--namespace", "--kubeconfig", "--context", "--help"}  # told of once, above
OF_GROUPS = {"--output", "--timeout", "--via"}  # told of where they belong to several commands
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def section_of(command: str) -> str:
    """What stands under a command's own heading."""
    return re.split(r"\n## ", PAGE.split(f"\n## rollfleet {command} ", 1)[1], maxsplit=1)[0]


def options_of(command: click.Command) -> set[str]:
    """Long names."""
    return {name for option in command.params for name in option.opts if name.startswith("--")} | {"--help"}


def test_every_command_has_its_part() -> None:
    assert set(re.findall(r"\n## rollfleet ([a-z]+) ", PAGE)) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_part_names_exists(command: str) -> None:
    text = re.sub(r"kubectl [^`\n]*|pip [^`\n]*", "", section_of(command))
    assert set(OPTION.findall(text)) <= options_of(COMMANDS[command])


@pytest.mark.parametrize("command", COMMANDS)
def test_what_exists_is_told_of(command: str) -> None:
    own = options_of(COMMANDS[command]) - OF_ALL - OF_GROUPS
    alike = {"rollback": "bump"}.get(command, command)  # "options as for bump"
    told = set(OPTION.findall(section_of(command) + section_of(alike)))
    assert {name for name in own if name not in told and f"-{name[2].upper()}" not in section_of(command)} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_pages_show_can_be_given(page: Path) -> None:
    shown = re.findall(r"(?m)(?:^|`|\$ |bin/)rollfleet ([a-z]+)((?: [^\n`#|]*)?)", page.read_text())
    for command, rest in shown:
        assert command in COMMANDS, f"rollfleet {command}"
        assert set(OPTION.findall(rest)) <= options_of(COMMANDS[command]), f"rollfleet {command}{rest}"


def parsed(words: list[str]) -> bool:
    """Whether the command line takes these words after `rollfleet`; click's own error where it does not."""
    command, *rest = words
    with COMMANDS[command].make_context(command, rest) as context:
        return bool(context.params)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_whole_command_lines_are_taken(page: Path) -> None:
    for block in (*blocks(page, "sh"), *blocks(page, "")):
        for line in re.findall(r"(?m)(?:^(?:\$ |\.venv/bin/)?|; )rollfleet ([^;\n]*)", block):
            assert parsed(shlex.split(line, comments=True)), line


def test_what_a_training_loop_runs_is_taken() -> None:
    [script] = blocks(DOCS / "training-loop.md", "python")
    command = next(node.value for node in ast.parse(script).body if isinstance(node, ast.Assign))
    assert isinstance(command, ast.List)
    words = [str(word.value) if isinstance(word, ast.Constant) else "7" for word in command.elts]
    assert words[0] == "rollfleet"
    assert parsed(words[1:])
