"""What is wrong on the command line is told before anything is asked of a cluster."""

import pytest
from typer.testing import CliRunner

from rollfleet_cli.main import app

WRONG = {
    "bump without a checkpoint": (["bump", "qwen"], "--checkpoint"),
    "bump out of the volume": (["bump", "qwen", "--checkpoint", "../secrets"], 'must not hold a ".." segment'),
    "bump to an absolute path": (["bump", "qwen", "--checkpoint", "/etc"], "must be relative to the volume"),
    "bump to no path": (["bump", "qwen", "--checkpoint", ""], "segments"),
    "bump to version 0": (["bump", "qwen", "--checkpoint", "a", "--version", "0"], "--version"),
    "bump with a timeout and no wait": (["bump", "qwen", "--checkpoint", "a", "--timeout", "3"], "without --wait"),
    "rollback with a timeout and no wait": (["rollback", "qwen", "--timeout", "3"], "without --wait"),
    "retry with a timeout and no wait": (["retry", "qwen", "--timeout", "3"], "without --wait"),
    "a plan without patience": (["plan", "qwen", "--timeout", "0"], "--timeout"),
    "diagnose by another way": (["diagnose", "qwen", "--via", "ssh"], "--via"),
    "rollback to a word": (["rollback", "qwen", "--to", "yesterday"], "--to"),
    "history of nothing": (["history"], "name"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage(case: str) -> None:
    arguments, words = WRONG[case]
    ended = CliRunner(env={"TERM": "dumb", "COLUMNS": "200"}).invoke(app, arguments)
    assert ended.exit_code == 2
    assert words in ended.stderr


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["bump", "-h"], ["status", "--help"]], ids=" ".join)
def test_help(arguments: list[str]) -> None:
    told = CliRunner(env={"TERM": "dumb", "COLUMNS": "200"}).invoke(app, arguments)
    assert told.exit_code == 0
    assert "Usage:" in told.stdout
