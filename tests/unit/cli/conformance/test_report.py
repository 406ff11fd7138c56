"""What a report says: the worst of each check, everything that it ran on, and words of engines that steer nothing."""

import io
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollfleet_cli.commands import conform
from rollfleet_cli.conformance.checks.catalogue import NOT_TRIED
from rollfleet_cli.conformance.checks.check import Fault
from rollfleet_cli.conformance.report import (
    EngineRecord,
    Report,
    asked_for,
    facts_of,
    rows_of,
    spec_digest,
    to_markdown,
)
from rollfleet_cli.conformance.running import Result, Verdict
from rollfleet_cli.errors import NotConformingError, NotTriedError
from rollfleet_cli.main import app
from rollfleet_cli.plain import PlainConsole
from rollfleet_cli.render_conformance import render_conformance
from tests.support.cli import NOW, make_fleet
from tests.support.honest_engine import CONFIG, STATE

HOSTILE = "a | pipe, <b>\x1b[31m\nand a line"
VERDICTS = [
    Verdict("state", "qwen-0", Result.PASSED, seconds=0.1),
    Verdict("state", "qwen-1", Result.FAILED, (Fault("its core is dead", HOSTILE),) * 5, seconds=0.4),
    Verdict("ranks", "qwen-0", Result.PASSED),
    Verdict("ranks", "qwen-1", Result.SKIPPED, skipped="updates interrupted it", late=True),
    Verdict("trace-replay", "qwen-0", Result.SKIPPED, skipped="Disabled"),
    Verdict("trace-replay", "qwen-1", Result.SKIPPED, skipped="Disabled"),
    Verdict("same-answers", "", Result.PASSED, of=2),
]


def make_report(**changes: Any) -> Report:
    fleet = make_fleet()
    record = EngineRecord(
        "qwen-0", "node-1", "engine:1", "sha256:i", "i", facts_of(STATE.facts), {"kernelVersion": "6"}
    )
    report = Report(
        rollfleet="0.1.0",
        started=NOW,
        ended=NOW + timedelta(seconds=9),
        complete=True,
        namespace="rl",
        fleet="qwen",
        fleet_uid="uid-qwen",
        generation=3,
        spec_sha256=spec_digest(fleet),
        committed={"version": 7, "digest": "sha256:d"},
        asked_for=asked_for(CONFIG),
        engines_present=9,
        engines_chosen="a sample of 3",
        engines=(record,),
        checks=rows_of(VERDICTS),
    )
    return replace(report, **changes)


def test_a_check_is_as_good_as_its_worst_engine() -> None:
    rows = {row.check: row for row in make_report().checks}
    assert {name: (row.result, row.engines) for name, row in rows.items()} == {
        "state": ("Failed", 2),
        "ranks": ("Passed", 1),
        "trace-replay": ("Skipped", 0),
        "same-answers": ("Passed", 2),
    }
    assert (rows["trace-replay"].skipped, rows["state"].seconds) == ("Disabled", 0.4)
    assert rows["state"].remedy
    assert not rows["ranks"].remedy


def test_the_document_has_what_evidence_needs() -> None:
    document = json.loads(json.dumps(make_report().to_json(), default=str))
    assert document["counts"] == {"Passed": 2, "Failed": 1, "Skipped": 1}
    assert document["engines"][0]["facts"]["host"] == {
        "platform": "Ascend",
        "software": {"CANN": "9.1.0"},
        "chip": "A2",
        "npus": [0, 1],
    }
    assert document["asked_for"]["rlConfig"]["enableBatchInvariant"] is True
    assert [each["what"] for each in document["not_tried"]] == [what for what, _ in NOT_TRIED]
    assert not {"tokens", "operator", "engineArgs"} & set(document["asked_for"])


def test_another_spec_has_another_digest() -> None:
    fleet = make_fleet()
    other = fleet.model_copy(update={"spec": fleet.spec.model_copy(update={"image": "engine:2"})})
    assert spec_digest(fleet) == spec_digest(make_fleet()) != spec_digest(other)


def test_markdown_shows_words_of_engines_as_words() -> None:
    page = to_markdown(make_report(unreached={"qwen-2": "<gone>"}, complete=False))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    cells = {line.replace("\\|", "").count("|") for line in rows}
    assert cells == {8}
    assert "&lt;b>" in page
    assert "<b>" not in page
    assert "**incomplete**" in page
    assert "qwen-2 could not be asked: &lt;gone>" in page
    assert "Ascend A2 NPUs 0, 1" in page
    assert page.count("its core is dead") == 6  # each in full below, the first in the table


@pytest.mark.parametrize("report", [make_report(), make_report(complete=False, unreached={"qwen-2": HOSTILE})])
def test_a_terminal_is_not_steered(report: Report) -> None:
    out = io.StringIO()
    PlainConsole(file=out, width=200).print(render_conformance(report))
    assert "\x1b" not in out.getvalue()
    assert "and 2 more" in out.getvalue()
    assert "2 passed, 1 failed, 1 skipped, on 1 of 9 engines" in out.getvalue()


def test_exit_codes_tell_failed_from_not_tried() -> None:
    with pytest.raises(NotConformingError, match="state") as failed:
        conform._end(make_report())
    assert failed.value.exit_code == 1
    good = make_report(checks=rows_of(VERDICTS[2:]))
    conform._end(good)
    for left in (
        replace(good, complete=False),
        replace(good, complete=False, unreached={"qwen-2": "no address"}),
    ):
        with pytest.raises(NotTriedError) as untried:
            conform._end(left)
        assert untried.value.exit_code == 2
    assert "no address" in str(untried.value)


@pytest.mark.parametrize(
    "arguments",
    [(), ("--report", "r.txt"), ("--report", "/no/such/folder/r.md"), ("--all", "--engine", "qwen-0")],
    ids=["no fleet", "suffix", "folder", "both"],
)
def test_wrong_usage_is_told_before_anything_is_asked(arguments: tuple[str, ...]) -> None:
    fleet = ("--fleet", "qwen") if arguments else ()
    assert CliRunner().invoke(app, ["conformance", *fleet, *arguments]).exit_code == 2


def test_no_way_to_a_cluster_is_not_a_failure(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["conformance", "--fleet", "qwen", "--kubeconfig", str(tmp_path / "none")])
    assert isinstance(ended.exception, NotTriedError)
    assert "no such file" in str(ended.exception)
