"""What `rollfleet conformance` prints for a person: what failed stands last, where the eye falls."""

from rich.console import Group, RenderableType

from rollfleet_cli.conformance.report import SHOWN_FAULTS, Report, Row, fault_words
from rollfleet_cli.conformance.running import Result
from rollfleet_cli.plain import Words
from rollfleet_cli.render import table

STYLES = {Result.PASSED: "green", Result.FAILED: "red", Result.SKIPPED: "dim"}


def render_conformance(report: Report) -> RenderableType:
    """A row for each check, then each failure with its cause and remedy."""
    rows = table("RESULT", "CHECK", "ENGINES", "WHAT")
    for row in report.checks:
        what = row.skipped if row.result == Result.SKIPPED else row.title
        rows.add_row(Words(row.result, style=STYLES[Result(row.result)]), row.check, str(row.engines or "-"), what)
    parts: list[RenderableType] = [rows, *(Words(note) for note in report.notes)]
    parts += [part for row in report.failed for part in _failure(row)]
    parts += [Words(f"{pod} could not be asked: {why}", style="yellow") for pod, why in report.unreached.items()]
    if not report.complete:
        parts.append(Words("not all was tried", style="yellow"))
    return Group(*parts, Words(report.words, style="bold"))


def _failure(row: Row) -> list[RenderableType]:
    lines: list[RenderableType] = [Words(f"{row.check}: {row.title}", style="red")]
    lines += [Words(f"  {words}") for words in fault_words(row, SHOWN_FAULTS)]
    return [*lines, Words(f"  remedy: {row.remedy}", style="green")]
