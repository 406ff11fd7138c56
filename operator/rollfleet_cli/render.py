"""Views as tables for a terminal. rich drops colours by itself where there is none."""

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table

from rollfleet_cli.plain import Words
from rollfleet_cli.view import EngineView, FleetView, UpdateView

GOOD = {"Serving", "Active"}
BAD = {"Failed", "Broken", "CommitUnknown", "Unschedulable", "Quarantined", "Uncertain"}
DIGEST_WIDTH = len("sha256:") + 12  # enough to tell versions apart; JSON has all of it
MINUTE, HOUR, DAY = 60, 3600, 86400  # seconds


def render_fleets(views: Iterable[FleetView]) -> RenderableType:
    """A table of fleets, then whatever is wrong, in full."""
    views = list(views)
    rows = table("NAMESPACE", "FLEET", "SERVING", "VERSION", "STATE", "ASKED FOR", "UPDATE", "ENGINES")
    for view in views:
        rows.add_row(view.namespace, view.name, *_fleet_cells(view))
    return Group(rows, *(part for view in views for part in _words(view)))


def render_fleet(view: FleetView, now: datetime) -> RenderableType:
    """One fleet with its engines."""
    return Group(render_heading(view, now), Words(), _engine_table(view, now), *_words(view))


def render_heading(view: FleetView, now: datetime) -> RenderableType:
    """The fleet in a line, and its update in another."""
    return Group(_heading(view), *_update_line(view, now))


def render_history(view: FleetView, now: datetime) -> RenderableType:
    """Ended updates, newest last; then why those failed that did."""
    rows = table("VERSION", "STEP", "CHECKPOINT", "OUTCOME", "DIGEST", "PAUSED", "ENDED")
    entries = () if view.update is None else view.update.history
    for entry in entries:
        paused = f"{entry.paused_seconds} s" if entry.paused_seconds else "-"
        digest = entry.digest[:DIGEST_WIDTH] or "-"
        ended = f"{age(entry.time, now)} ago"
        rows.add_row(
            str(entry.version), entry.step or "-", entry.checkpoint, _state(entry.outcome), digest, paused, ended
        )
    reasons = [Words(f"version {entry.version}: {entry.message}", style="yellow") for entry in entries if entry.message]
    return Group(rows, *reasons, Words(f"{view.namespace}/{view.name}: committed version {_number(view.committed)}"))


def _fleet_cells(view: FleetView) -> list[RenderableType]:
    update = view.update
    asked = str(update.version) if update else "-"
    phase = _state(update.phase) if update else Words("-")
    progress = f"{update.done}/{update.total}" if update and update.total else "-"
    serving = f"{view.serving}/{view.desired}"
    return [serving, _number(view.committed), _state(view.state), asked, phase, progress]


def _heading(view: FleetView) -> Words:
    text = Words(f"{view.namespace}/{view.name}", style="bold")
    text.append(f"  version {_number(view.committed)}  {view.serving}/{view.desired} serving  ", style="not bold")
    text.append_text(_state(view.state))
    if view.endpoint:
        text.append(f"  {view.endpoint}", style="not bold")
    return text


def _update_line(view: FleetView, now: datetime) -> list[Words]:
    update = view.update
    if update is None:
        return [Words("no WeightVersion names this fleet")]
    text = Words(f"{update.name}: version {update.version}")
    if update.step:
        text.append(f" (step {update.step})")
    text.append("  ").append_text(_state(update.phase))
    if update.total:
        text.append(f"  {update.done}/{update.total} engines")
    if update.phase_started and update.phase not in {"Active", "Failed"}:
        text.append(f"  for {age(update.phase_started, now)}")
    if update.paused_seconds:
        text.append(f"  paused {update.paused_seconds} s")
    if not update.is_current:
        text.append("  (the operator has not seen the newest spec yet)")
    return [text]


def _engine_table(view: FleetView, now: datetime) -> Table:
    rows = table("ENGINE", "STATE", "FOR", "NODE", "RESTARTS")
    for engine in view.engines:
        rows.add_row(*_engine_cells(engine, now))
    return rows


def _engine_cells(engine: EngineView, now: datetime) -> list[RenderableType]:
    since = age(engine.since, now) if engine.since else ""
    return [engine.name, _state(engine.state), since, engine.node, str(engine.restarts)]


def _words(view: FleetView) -> list[Words]:
    """What a person must read, each on a line of its own and never cut."""
    where = f"{view.namespace}/{view.name}"
    lines = [Words(f"{where}: {problem}", style="red") for problem in view.problems]
    alike: dict[str, list[str]] = {}
    for each in view.engines:
        if _is_news(each.message, view.problems):
            alike.setdefault(f"{each.state}: {each.message}", []).append(each.name)
    lines += [Words(f"{', '.join(names)}: {words}", style="yellow") for words, names in alike.items()]
    told_by_engine = any(each.message and each.message in view.message for each in view.engines)
    if view.state not in GOOD and not told_by_engine and _is_news(view.message, view.problems):
        lines.append(Words(f"{where}: {view.state}: {view.message}", style="yellow"))
    if (
        view.update
        and view.update.phase not in GOOD
        and _is_news(view.update.message, (*view.problems, view.last_failure))
    ):
        lines.append(Words(f"{where}: {_named(view.update)}: {view.update.message}", style="yellow"))
    if view.last_failure:
        lines.append(Words(f"{where}: last failure: {view.last_failure}", style="red"))
    if not view.engines_known:
        lines.append(Words(f"{where}: you may not list pods, so only engines that are not well are shown"))
    return lines


def _is_news(words: str, told: tuple[str, ...]) -> bool:
    return bool(words) and not any(words in line for line in told)


def _named(update: UpdateView) -> str:
    return f"{update.name} version {update.version} {update.phase}"


def table(*columns: str) -> Table:
    """Columns as kubectl prints them: no frame, and nothing is cut."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        rows.add_column(column, no_wrap=True, overflow="fold")  # names are there to be copied
    return rows


def _state(word: str) -> Words:
    return Words(word, style="green" if word in GOOD else "red" if word in BAD else "yellow")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def age(since: datetime, now: datetime) -> str:
    """As kubectl writes ages."""
    seconds = max(0, int((now - since).total_seconds()))
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
