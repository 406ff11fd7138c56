"""status, watch, history: what the objects' status tells."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from rollfleet_cli.cluster import Access, Cluster, Reader
from rollfleet_cli.commands.options import Context, Fleet, Kubeconfig, Namespace, Output, Timeout
from rollfleet_cli.commands.output import console, print_json, tell_until
from rollfleet_cli.errors import NotFoundError
from rollfleet_cli.following import Clock, follow, has_reached, look
from rollfleet_cli.render import render_fleet, render_fleets, render_history
from rollfleet_cli.view import FleetView, build_view


def status(
    name: Annotated[str | None, typer.Argument(help="A fleet, with its engines. Default: all, one line each.")] = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Fleets of all namespaces.")] = False,
    output: Output = "table",
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


def watch(
    name: Fleet,
    namespace: Namespace = None,
    until_active: Annotated[
        int | None, typer.Option(help="End once the fleet serves this version or a higher one; fail if it will not.")
    ] = None,
    timeout: Timeout = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Follow a fleet through its updates: a table on a terminal, else a line for each change."""
    reader = Cluster(Access(kubeconfig, context))
    clock = Clock(now=lambda: datetime.now(UTC))
    views = follow(reader, namespace or reader.namespace, name, clock, timeout)
    tell_until(console(), views, clock, lambda view: until_active is not None and has_reached(view, until_active))


def history(
    name: Fleet,
    namespace: Namespace = None,
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show the updates of a fleet that have ended, the last ten, newest last."""
    reader = Cluster(Access(kubeconfig, context))
    view = look(reader, namespace or reader.namespace, name)
    if view.update is None:
        raise NotFoundError(f"{view.namespace}/{view.name}: no WeightVersion names this fleet, so nothing has ended")
    if output == "json":
        print_json(view.to_json()["update"]["history"])
        return
    console().print(render_history(view, datetime.now(UTC)))


def _all_views(reader: Reader, namespace: str | None) -> list[FleetView]:
    fleets = reader.fleets(namespace)
    if not fleets:
        return []
    versions, pods = reader.versions(namespace), reader.pods(namespace, None)
    return [build_view(fleet, versions, pods) for fleet in fleets]


def _print(output: str, views: list[FleetView], *, one: bool) -> None:
    if output == "json":
        document = [view.to_json() for view in views]
        print_json(document[0] if one else document)
        return
    console().print(render_fleet(views[0], datetime.now(UTC)) if one else render_fleets(views))
