"""Waiting: looks again and again, tells what changed, and knows when to end."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from rollfleet_cli.cluster import Reader
from rollfleet_cli.errors import (
    NotFoundError,
    SupersededError,
    TimedOutError,
    UnreachableError,
    UpdateFailedError,
)
from rollfleet_cli.view import MOVING, FleetView, UpdateView, build_view
from rollfleet_operator.core.moves import STEPS
from rollfleet_operator.core.weight_status import REASON_OF

ORDINARY = {reason.sentence for phase, reason in REASON_OF.items() if phase in MOVING}  # no more than the phase says
INTERVAL_S = 0.25
GIVE_UP_S = 30.0  # without any answer from the API server


@dataclass(frozen=True)
class Clock:
    """Time as the loop sees it."""

    now: Callable[[], datetime]
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def look(reader: Reader, namespace: str, name: str) -> FleetView:
    """A fleet as it is now."""
    fleet = reader.fleet(namespace, name)
    return build_view(fleet, reader.versions(namespace), reader.pods(namespace, name))


def follow(reader: Reader, namespace: str, name: str, clock: Clock, timeout_s: float | None) -> Iterator[FleetView]:
    """A view every INTERVAL_S, until TimedOutError or NotFoundError; UnreachableError only after GIVE_UP_S of it."""
    started = answered = clock.monotonic()
    doing = ""
    while True:
        try:
            view = look(reader, namespace, name)
        except UnreachableError as error:
            if clock.monotonic() - answered > GIVE_UP_S:
                raise
            doing = str(error)
        else:
            answered = clock.monotonic()
            doing = _update_words(view)
            yield view
        if timeout_s is not None and clock.monotonic() - started > timeout_s:
            raise TimedOutError(f"{namespace}/{name}: not there within {timeout_s:g} s{doing and f': {doing}'}")
        clock.sleep(INTERVAL_S)


def has_reached(view: FleetView, wanted: int, *, exactly: bool = False) -> bool:
    """Whether the fleet serves the wanted version, or a higher one; UpdateFailedError where it will not.

    `exactly`: a higher one does not do, so SupersededError where it came first.
    """
    update, place = view.update, f"{view.namespace}/{view.name}"
    if exactly and update is not None and update.version > wanted:
        return _was_reached(view, update, wanted)
    held = view.committed is not None and view.committed >= wanted
    if held and update is None:
        return view.serving > 0 or view.desired == 0  # as loaded at start it is committed before anybody opens
    if held and update is not None and (update.version > wanted or update.refused):
        return True  # whatever becomes of the next one
    if update is None and wanted > 0:
        raise NotFoundError(f"{place}: no WeightVersion names this fleet")
    if update is None or update.version < wanted:
        return False  # the fleet's own first version; or it may still be raised
    if update.refused:
        raise UpdateFailedError(f"{place}: version {update.version} is not accepted: {update.refused}")
    if update.is_current and update.phase == "Failed" and not update.retry_pending:
        why = view.last_failure or f"version {update.version}: {update.message or 'see `rollfleet status`'}"
        raise UpdateFailedError(f"{place}: the update failed: {why}")
    lost = bool(update.message)  # its condition Active is False: nobody knows what the fleet served (CommitUnknown)
    return update.is_current and update.phase == "Active" and not lost


def _was_reached(view: FleetView, update: UpdateView, wanted: int) -> bool:
    """What became of a version that is no longer asked for."""
    place = f"{view.namespace}/{view.name}"
    ended = next((entry for entry in reversed(update.history) if entry.version == wanted), None)
    if view.committed == wanted or (ended is not None and ended.outcome == "Active"):
        return True
    if ended is not None and ended.outcome == "Failed":
        raise UpdateFailedError(f"{place}: the update failed: version {wanted}: {ended.message}")
    if ended is None and not update.is_current:
        return False  # the operator may be opening it at this moment
    raise SupersededError(f"{place}: version {wanted} was superseded: {update.name} asks for {update.version} now")


def changes(old: FleetView | None, new: FleetView) -> list[str]:
    """What to tell of a new view, one line each."""
    lines = []
    if old is None or (old.state, old.message) != (new.state, new.message):
        lines.append(f"fleet {new.state}: {new.message}")
    if old is None or old.committed != new.committed:
        lines.append(f"committed version {'none' if new.committed is None else new.committed}")
    if old is None or old.serving != new.serving or old.desired != new.desired:
        lines.append(f"{new.serving}/{new.desired} engines serving")
    lines += _update_changes(old, new) + _engine_changes(old, new)
    lines += [problem for problem in new.problems if old is None or problem not in old.problems]
    if new.last_failure and (old is None or old.last_failure != new.last_failure):
        lines.append(f"last failure: {new.last_failure}")
    return lines


def _update_changes(old: FleetView | None, new: FleetView) -> list[str]:
    words = _update_words(new)
    return [words] if words and words != _update_words(old) else []


def _update_words(view: FleetView | None) -> str:
    update = view.update if view else None
    if update is None:
        return ""
    if not update.is_current:
        return f"version {update.version} is asked for"  # the rest speaks of what was asked for before
    progress = f" {update.done}/{update.total} engines" if update.total else ""
    paused = f", paused {update.paused_seconds} s" if update.paused_seconds else ""
    because = f": {update.message}" if update.message and update.message not in ORDINARY else ""
    return f"version {update.version} {update.phase}{progress}{paused}{because}"


def _engine_changes(old: FleetView | None, new: FleetView) -> list[str]:
    """Engines that do something of their own. Those that go along with the update are told of by its counts."""
    before, after = _apart(old), _apart(new)
    lines = [f"engine {name} {words}" for name, words in after.items() if before.get(name) != words]
    if old is None:
        return lines
    known, names = {engine.name for engine in old.engines}, {engine.name for engine in new.engines}
    back = [each for each in new.engines if each.name not in after and (each.name in before or each.name not in known)]
    lines += [f"engine {each.name} {each.state}" for each in back]
    return lines + [f"engine {each.name} is gone" for each in old.engines if each.name not in names]


def _apart(view: FleetView | None) -> dict[str, str]:
    """Name -> what is said of an engine that does not just go along."""
    if view is None:
        return {}
    update = view.update
    ordinary, held_up = {"Serving", update.phase if update else ""}, update.held_up if update else ()
    told = update.message if update else ""
    failing = {name for name, reason, text in held_up if reason not in STEPS and text not in told}
    return {
        engine.name: f"{engine.state}{': ' + engine.message if engine.message else ''}"
        for engine in view.engines
        if engine.state not in ordinary or engine.name in failing
    }
