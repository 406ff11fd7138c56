"""bump, rollback, retry: ask for another version, or for the same one again, and follow it to its end."""

from datetime import UTC, datetime
from secrets import token_hex
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from rollfleet_cli.bumping import Asked, Wish, ask_again, ask_for, choose_earlier, look_at
from rollfleet_cli.cluster import Access, Cluster, Reader
from rollfleet_cli.commands.options import Context, Fleet, Kubeconfig, Namespace, Output, Timeout, Wait
from rollfleet_cli.commands.output import console, print_json, tell_until
from rollfleet_cli.errors import CommandError, SupersededError, TimedOutError, UpdateFailedError
from rollfleet_cli.following import Clock, follow, has_reached
from rollfleet_cli.view import FleetView
from rollfleet_operator.api.weightversion import Checkpoint
from rollfleet_operator.core.accept import path_fault

OUTCOMES = {UpdateFailedError: "Failed", SupersededError: "Superseded", TimedOutError: "TimedOut"}


def bump(
    name: Fleet,
    checkpoint: Annotated[str, typer.Option(help="The checkpoint's folder below volumes.checkpoints of the fleet.")],
    version: Annotated[
        int | None, typer.Option(help="Default: one above what is asked for and what is committed.", min=1)
    ] = None,
    step: Annotated[str, typer.Option(help="Free label, such as the training step.")] = "",
    wait: Wait = False,
    timeout: Timeout = None,
    namespace: Namespace = None,
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Ask for new weights: raise the fleet's WeightVersion, or create it."""
    _check_path(checkpoint)
    _check_timeout(wait=wait, timeout=timeout)
    cluster = Cluster(Access(kubeconfig, context))
    asked = ask_for(cluster, namespace or cluster.namespace, name, Wish(checkpoint, step, version))
    _finish(cluster, asked, output, wait=wait, timeout=timeout)


def rollback(
    name: Fleet,
    to: Annotated[
        int | None, typer.Option(help="A version of the history. Default: the last Active one before the committed.")
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    namespace: Namespace = None,
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Ask for older weights again: a higher version whose source is a checkpoint from the history."""
    _check_timeout(wait=wait, timeout=timeout)
    cluster = Cluster(Access(kubeconfig, context))
    where = namespace or cluster.namespace
    entry = choose_earlier(look_at(cluster, where, name), to)
    asked = ask_for(cluster, where, name, Wish(entry.checkpoint, entry.step))
    typer.echo(f"going back to version {entry.version} ({entry.checkpoint})", err=True)
    _finish(cluster, asked, output, wait=wait, timeout=timeout)


def retry(
    name: Fleet,
    wait: Wait = False,
    timeout: Timeout = None,
    namespace: Namespace = None,
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Try a version again that failed, under the same number."""
    _check_timeout(wait=wait, timeout=timeout)
    cluster = Cluster(Access(kubeconfig, context))
    request = f"{datetime.now(UTC).isoformat(timespec='seconds')} {token_hex(4)}"
    asked = ask_again(cluster, namespace or cluster.namespace, name, request)
    _finish(cluster, asked, output, wait=wait, timeout=timeout)


def _check_timeout(*, wait: bool, timeout: float | None) -> None:
    if timeout is not None and not wait:
        raise typer.BadParameter("there is nothing to time without --wait", param_hint="--timeout")


def _check_path(path: str) -> None:
    fault = path_fault(path)
    if fault:
        raise typer.BadParameter(fault, param_hint="--checkpoint")
    try:
        Checkpoint(path=path)
    except ValidationError as error:
        raise typer.BadParameter(f"{path!r}: {error.errors()[0]['msg']}", param_hint="--checkpoint") from error


def _finish(reader: Reader, asked: Asked, output: str, *, wait: bool, timeout: float | None) -> None:
    """Say what was asked; with --wait, how it ended. The progress goes to standard error."""
    told: dict[str, Any] = asked.to_json()
    if output == "table":
        console().print(asked.words(), markup=False, highlight=False, soft_wrap=True)
    if not wait:
        if output == "json":
            print_json(told)
        return
    try:
        view = follow_to_end(reader, asked, timeout)
    except CommandError as error:
        outcome = OUTCOMES.get(type(error))
        if output == "json" and outcome is not None:
            print_json(told | {"outcome": outcome, "message": str(error)})
        raise
    if output == "json":
        print_json(told | {"outcome": "Active", "message": ""})
    else:
        console().print(_served(view, asked), markup=False, highlight=False, soft_wrap=True)


def follow_to_end(reader: Reader, asked: Asked, timeout: float | None) -> FleetView:
    """Until the fleet serves exactly this version, or it is certain that it will not."""
    clock = Clock(now=lambda: datetime.now(UTC))
    views = follow(reader, asked.namespace, asked.fleet, clock, timeout)
    progress = console(stderr=True)
    return tell_until(progress, views, clock, lambda view: has_reached(view, asked.version, exactly=True))


def _served(view: FleetView, asked: Asked) -> str:
    paused = "" if view.update is None else view.update.paused_seconds
    after = f", paused {paused} s" if paused and view.update and view.update.version == asked.version else ""
    return f"{asked.namespace}/{asked.fleet} serves version {asked.version}{after}"
