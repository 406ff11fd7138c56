"""Where words go: results to standard output, progress of waits to standard error; colours on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from rollfleet_cli.following import Clock, changes
from rollfleet_cli.plain import PlainConsole
from rollfleet_cli.render import render_fleet
from rollfleet_cli.view import FleetView

PIPE_WIDTH = 100_000  # columns where no terminal says how many: nothing that a script reads is cut or broken
REFRESH_PER_S = 4


def console(*, stderr: bool = False) -> Console:
    """Colours and the terminal's width on a terminal only."""
    stream = sys.stderr if stderr else sys.stdout
    return PlainConsole(width=None if stream.isatty() else PIPE_WIDTH, stderr=stderr)


def print_json(data: Any) -> None:
    """A document on standard output; in ASCII, so that it steers no terminal and is the same in every locale."""
    console().print_json(data=data, default=lambda value: value.isoformat(), ensure_ascii=True)


def tell_until(out: Console, views: Iterator[FleetView], clock: Clock, done: Callable[[FleetView], bool]) -> FleetView:
    """A table that follows the fleet on a terminal, else a line for each change; the view that ended it."""
    if out.is_terminal:
        with Live(console=out, refresh_per_second=REFRESH_PER_S) as live:
            for view in views:
                live.update(render_fleet(view, clock.now()))
                if done(view):
                    return view
    old: FleetView | None = None
    for view in views:
        for line in changes(old, view):
            stamp = clock.now().strftime("%H:%M:%S.%f")[:-3]
            out.print(f"{stamp} {view.namespace}/{view.name} {line}", markup=False, highlight=False, soft_wrap=True)
        old = view
        if done(view):
            return view
    raise AssertionError("a fleet is followed until an error ends it")
