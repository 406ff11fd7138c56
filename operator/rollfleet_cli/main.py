"""The commands. `rollfleet --help` tells them; docs/cli.md tells the exit codes."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live

from rollfleet_cli.cluster import Access, Cluster, Reader
from rollfleet_cli.errors import CommandError
from rollfleet_cli.following import Clock, changes, follow, has_reached, look
from rollfleet_cli.render import render_fleet, render_fleets
from rollfleet_cli.view import FleetView, build_view

INTERRUPTED = 130
PIPE_WIDTH = 100_000  # columns where no terminal says how many: nothing that a script reads is cut or broken
REFRESH_PER_S = 4

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's namespace.")]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="Default: $KUBECONFIG, ~/.kube/config, or the pod's own account.")
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollfleet {version('rollfleet')}")
        raise typer.Exit


@app.callback()
def describe(
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """What fleets of rollout engines and their weight updates are doing. Also `kubectl rollfleet`."""


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="A fleet, with its engines. Default: all, one line each.")] = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A")] = False,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o")] = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show fleets, their version, their engines, and the last failure in the engine's own words."""
    reader = Cluster(Access(kubeconfig, context))
    if name is not None and all_namespaces:
        raise typer.BadParameter("a NAME lies in one namespace: give --namespace")
    if name is not None:
        view = look(reader, namespace or reader.namespace, name)
        _print(output, [view], one=True)
        return
    views = _all_views(reader, None if all_namespaces else namespace or reader.namespace)
    if not views and output == "table":
        where = "any namespace" if all_namespaces else f"namespace {namespace or reader.namespace}; -A looks in all"
        typer.echo(f"no RolloutEngine in {where}", err=True)
        return
    _print(output, views, one=False)


@app.command()
def watch(
    name: Annotated[str, typer.Argument(help="A fleet.")],
    namespace: Namespace = None,
    until_active: Annotated[
        int | None, typer.Option(help="End once the fleet serves this version or a higher one; fail if it will not.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which to give up.", min=0)] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Follow a fleet through its updates: a table on a terminal, else a line for each change."""
    reader = Cluster(Access(kubeconfig, context))
    clock = Clock(now=lambda: datetime.now(UTC))
    views = follow(reader, namespace or reader.namespace, name, clock, timeout)
    console = _console()
    if not console.is_terminal:
        _tell(console, views, clock, until_active)
        return
    with Live(console=console, refresh_per_second=REFRESH_PER_S) as live:
        for view in views:
            live.update(render_fleet(view, clock.now()))
            if until_active is not None and has_reached(view, until_active):
                return


def _tell(console: Console, views: Iterator[FleetView], clock: Clock, until_active: int | None) -> None:
    old: FleetView | None = None
    for view in views:
        for line in changes(old, view):
            stamp = clock.now().strftime("%H:%M:%S.%f")[:-3]
            console.print(f"{stamp} {view.namespace}/{view.name} {line}", markup=False, highlight=False, soft_wrap=True)
        old = view
        if until_active is not None and has_reached(view, until_active):
            return


def _all_views(reader: Reader, namespace: str | None) -> list[FleetView]:
    fleets = reader.fleets(namespace)
    if not fleets:
        return []
    versions, pods = reader.versions(namespace), reader.pods(namespace, None)
    return [build_view(fleet, versions, pods) for fleet in fleets]


def _console() -> Console:
    """Colours and the terminal's width on a terminal only."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _print(output: str, views: list[FleetView], *, one: bool) -> None:
    console = _console()
    if output == "json":
        document = [view.to_json() for view in views]
        console.print_json(data=document[0] if one else document, default=lambda value: value.isoformat())
        return
    console.print(render_fleet(views[0], datetime.now(UTC)) if one else render_fleets(views))


def main() -> None:
    """Run a command; what goes wrong is one message and an exit code."""
    try:
        app()
    except CommandError as error:
        typer.echo(f"rollfleet: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
