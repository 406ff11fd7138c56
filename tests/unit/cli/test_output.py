"""Where words go: as they are, whoever wrote them."""

import json

import pytest

from rollfleet_cli.commands.output import console, print_json
from rollfleet_cli.render import render_history
from rollfleet_cli.view import build_view
from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import HistoryEntry
from tests.support.cli import NOW, make_fleet, make_version

STEPS = {
    "no markup at all": ("[/red]", "[/red]"),
    "a style": ("[bold]2100", "[bold]2100"),
    "an emoji": (":rocket:", ":rocket:"),
    "a terminal's command": ("\x1b]0;owned\x07\x9b2J", "\\x1b]0;owned\\x07\\x9b2J"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_label_of_somebody_else_is_shown_as_it_is(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    step, shown = STEPS[case]
    entry = HistoryEntry(version=3, step=step, checkpoint="step-3[v2]", outcome=Outcome.ACTIVE, time=NOW)
    view = build_view(make_fleet(), [make_version(3, history=(entry,))], [])
    console().print(render_history(view, NOW))
    printed = capsys.readouterr().out
    assert f"{shown} " in printed
    assert "step-3[v2]" in printed
    assert "\x1b" not in printed


def test_a_document_steers_no_terminal_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"message": "\x1b[2J\x9b2J\u202e für 权重", "at": NOW}
    print_json(data)
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == data | {"at": NOW.isoformat()}
