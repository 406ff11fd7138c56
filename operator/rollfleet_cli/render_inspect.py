"""What plan, diagnose and verify print for a person."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from rollfleet_cli.asking import Answer
from rollfleet_cli.diagnosing import Finding
from rollfleet_cli.plain import Words
from rollfleet_cli.planning import Change, Planned
from rollfleet_cli.render import DIGEST_WIDTH, age, render_heading, table
from rollfleet_cli.snapshot import Snapshot
from rollfleet_cli.verifying import Checked, Verification
from rollfleet_cli.view import build_view
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.observed import PodView
from rollfleet_protocol.state import EngineState

MOST_EVENTS = 15  # the newest; -o json has all
MOST_TEXT = 300  # characters of one value


def render_plan(place: str, planned: Planned, now: datetime) -> RenderableType:
    """Actions first, then what would be written, then why."""
    lines = [Words(f"{place}: the operator would now", style="bold")]
    lines += _items(planned.actions, "command nobody and change no object")
    if planned.changes:
        lines += _heading("write into status")
        lines += [Words(f"  {_change(change)}") for change in planned.changes]
    for heading, texts in (("tell", planned.events), ("note", planned.notes)):
        lines += [*_heading(heading), *_items(texts)] if texts else []
    lines += _heading(f"look again {_when(planned.wake_at, now)}")
    lines += [*_heading("because"), *_items(planned.why, "it has never looked at this fleet")]
    if planned.unreachable:
        lines += [*_heading("engines that could not be asked"), *_items(planned.unreachable)]
    lines += [*_heading("assumed"), *_items(planned.assumed)]
    return Group(*lines)


def render_diagnosis(snapshot: Snapshot, findings: tuple[Finding, ...]) -> RenderableType:
    """State, engines, events; last, where the eye falls, what is wrong and what helps."""
    parts: list[RenderableType] = []
    if snapshot.fleet is not None:
        view = build_view(snapshot.fleet, list(snapshot.versions), list(snapshot.pods))
        parts += [render_heading(view, snapshot.now), Words(), _engine_rows(snapshot)]
        parts += [Words(f"{answer.pod}: {answer.error}", style="yellow") for answer in _silent(snapshot)]
    if snapshot.events:
        parts += [Words(), *_heading("events"), _event_rows(snapshot)]
    if snapshot.unknown:
        parts += [Words(), *_heading("not known"), *_items(snapshot.unknown)]
    parts += [Words(), *_heading("likely causes" if findings else "nothing is wrong, as far as can be seen from here")]
    for subjects, finding in _alike(findings):
        words = f"{', '.join(subjects)}: {finding.reason}{': ' + finding.words if finding.words else ''}"
        parts.append(Words(words))
        parts.append(Words(f"  cause:  {finding.cause}", style="yellow"))
        parts.append(Words(f"  remedy: {finding.remedy}", style="green"))
    return Group(*parts)


def _alike(findings: tuple[Finding, ...]) -> list[tuple[list[str], Finding]]:
    """What is found alike of several is told once, with their names, where the first of them stands."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, subject=""), []).append(finding.subject)
    return [(subjects, finding) for finding, subjects in groups.items()]


def diagnosis_json(snapshot: Snapshot, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The same for programs, and all of it."""
    view = snapshot.fleet and build_view(snapshot.fleet, list(snapshot.versions), list(snapshot.pods))
    guards = [
        {"pod": each.pod, "error": each.error, "state": each.said and each.said.model_dump(mode="json")}
        for each in snapshot.answers
    ]
    return {
        "state": view and view.to_json(),
        "guards": guards,
        "events": [asdict(event) for event in snapshot.events],
        "operator": asdict(snapshot.operator),
        "not_known": list(snapshot.unknown),
        "findings": [finding.to_json() for finding in findings],
    }


def _silent(snapshot: Snapshot) -> list[Answer[EngineState]]:
    """Engines with a reason of their own for saying nothing; that nobody may ask is told once."""
    return [answer for answer in snapshot.answers if answer.error and not answer.denied]


def render_verification(place: str, found: Verification) -> RenderableType:
    """A row for each engine, then the verdict."""
    rows = table("ENGINE", "GATE", "VERSION", "DIGEST", "RANKS", "RESULT")
    for each in found.engines:
        version = "-" if each.version is None else str(each.version)
        cells = (each.gate or "-", version, each.digest[:DIGEST_WIDTH] or "-", str(each.ranks or "-"))
        rows.add_row(each.engine, *cells, _result(each))
    if not found.holds:
        return rows  # what is wrong is the error that follows
    apart = f", probes within {found.max_abs_logprob_diff} of {found.allowed}" if found.max_abs_logprob_diff else ""
    held = f"all {len(found.engines)} engines hold version {found.committed}, {found.digest or 'as loaded at start'}"
    return Group(rows, Words(f"{place}: {held}{apart}", style="green"))


def _result(engine: Checked) -> Words:
    if not engine.problems:
        return Words("ok", style="green")
    return Words("differs" if engine.gate else "no answer", style="red")


def _engine_rows(snapshot: Snapshot) -> Table:
    rows = table("ENGINE", "POD", "NODE", "RESTARTS", "GATE", "WEIGHTS", "EPOCH", "IN FLIGHT", "OPERATION")
    states = snapshot.states
    for pod in snapshot.pods:
        view, state = pod_view(pod), states.get(pod["metadata"]["uid"])
        gate = "no answer" if view.leads else f"led by {view.leader}"
        said = (gate, "-", "-", "-", "-") if state is None else _said(state)
        rows.add_row(view.name, _pod_word(view), view.node or "-", str(view.restarts), *said)
    return rows


def _pod_word(pod: PodView) -> str:
    if pod.deleting:
        return "Terminating"
    return pod.phase if pod.phase != "Running" or pod.ready else f"Running, {pod.container.value}, not ready"


def _said(state: EngineState) -> tuple[str, str, str, str, str]:
    weights, operation = state.weights, state.operation
    gate = state.gate.value if not state.closed_reason else f"{state.gate.value} ({state.closed_reason})"
    held = weights.state.value if weights.version is None else f"{weights.state.value} {weights.version}"
    doing = "-" if operation is None else f"{operation.name.value} {operation.version} {operation.status.value}"
    return gate, held, str(state.epoch), str(state.in_flight), doing


def _event_rows(snapshot: Snapshot) -> Table:
    rows = table("LAST", "TYPE", "ABOUT", "REASON", "MESSAGE")
    for event in snapshot.events[-MOST_EVENTS:]:
        times = f" (x{event.count})" if event.count > 1 else ""
        message = event.message.strip().replace("\n", " ")
        rows.add_row(age(event.last, snapshot.now), event.type, event.about, event.reason, message + times)
    return rows


def _heading(text: str) -> list[Words]:
    return [Words(text, style="bold")]


def _items(texts: Iterable[str], otherwise: str = "") -> list[Words]:
    return [Words(f"  {text}") for text in (list(texts) or [otherwise])]


def _change(change: Change) -> str:
    return f"{change.object} {change.field}: {_value(change.old)} -> {_value(change.new)}"


def _value(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def _when(wake_at: datetime | None, now: datetime) -> str:
    if wake_at is None:
        return "when something changes"
    seconds = (wake_at - now).total_seconds()
    return "at once" if seconds <= 0 else f"in {seconds:.1f} s, or when something changes"
