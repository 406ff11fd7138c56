"""conformance: a live fleet checked against what is promised of it, with a report as evidence."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.commands.options import Context, Kubeconfig, Namespace, Output, Via
from rollfleet_cli.commands.output import console, print_json
from rollfleet_cli.errors import CommandError, NotConformingError, NotTriedError
from rollfleet_protocol.words import visible

if TYPE_CHECKING:
    from rollfleet_cli.conformance.report import Report

WHOLE_S = 900.0
SUFFIXES = (".json", ".md")


def conformance(
    fleet: Annotated[str, typer.Option(help="A fleet: the name of its RolloutEngine.", show_default=False)],
    report: Annotated[
        Path | None, typer.Option(help="Write what was found to this file: .json, or .md to attach to an issue.")
    ] = None,
    disruptive: Annotated[
        bool, typer.Option("--disruptive", help="Also serve the committed checkpoint again, as the next version.")
    ] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="Ask this one only: FLEET-ENGINE, or its pod. May be repeated.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Ask all engines. Default: three, spread over them.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole.", min=10)] = WHOLE_S,
    namespace: Namespace = None,
    via: Via = "auto",
    output: Output = "table",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Check a live fleet against what is promised of it. Changes nothing unless told so; exit code 1 where it fails."""
    if report is not None and report.suffix not in SUFFIXES:
        raise typer.BadParameter(f"it ends with {' or '.join(SUFFIXES)}", param_hint="--report")
    if engine and everything:
        raise typer.BadParameter("--engine names some, --all means all: give one of them")
    if report is not None and not report.resolve().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {report.resolve().parent}", param_hint="--report")
    try:
        access = Access(kubeconfig, context)
        found = _run(access, fleet, namespace, (tuple(engine or ()), everything), via, timeout, disruptive=disruptive)
        _keep(found, report)
    except (CommandError, OSError) as error:
        raise NotTriedError(str(error)) from error
    _show(found, output)
    _end(found)


def _run(
    access: Access,
    name: str,
    namespace: str | None,
    wanted: tuple[tuple[str, ...], bool],
    via: Via,
    within_s: float,
    *,
    disruptive: bool,
) -> "Report":
    from rollfleet_cli.bumping import look_at  # noqa: PLC0415 - half a second, not for --help
    from rollfleet_cli.conformance.choosing import choose  # noqa: PLC0415
    from rollfleet_cli.conformance.conducting import Order, conduct  # noqa: PLC0415
    from rollfleet_cli.conformance.updating import why_not  # noqa: PLC0415
    from rollfleet_cli.snapshot import engine_pods, leading  # noqa: PLC0415

    cluster = Cluster(access)
    where = namespace or cluster.namespace
    scene = look_at(cluster, where, name)
    names, everything = wanted
    chosen = choose(leading(engine_pods(cluster, scene.fleet)), names, everything=everything)
    _tell(f"{scene.place}: asking {len(chosen.pods)} of {chosen.present} engines ({chosen.how})")
    if disruptive and not why_not(scene) and scene.committed is not None:
        _tell(
            f"last, as --disruptive says, version {scene.committed.version + 1} of the same checkpoint "
            f"({scene.committed.checkpoint}) is asked for: the fleet answers 503 meanwhile, and stays at that version"
        )
    order = Order(access, where, name, chosen, via, within_s, disruptive)
    return asyncio.run(conduct(order, cluster, scene, _tell))


def _tell(line: str) -> None:
    """Progress, a line each; words of engines among them steer no terminal."""
    typer.echo(f"{datetime.now(UTC).strftime('%H:%M:%S')} {visible(line)}", err=True)


def _keep(found: "Report", path: Path | None) -> None:
    from rollfleet_cli.conformance.report import to_markdown  # noqa: PLC0415

    if path is None:
        return
    if path.suffix == ".json":
        text = json.dumps(found.to_json(), default=lambda value: value.isoformat(), indent=2) + "\n"
    else:
        text = visible(to_markdown(found))
    path.write_text(text, encoding="utf-8")
    _tell(f"the report is in {path}")


def _show(found: "Report", output: str) -> None:
    from rollfleet_cli.render_conformance import render_conformance  # noqa: PLC0415

    if output == "json":
        print_json(found.to_json())
    else:
        console().print(render_conformance(found))


def _end(found: "Report") -> None:
    if found.failed:
        raise NotConformingError(f"{found.words}: {', '.join(row.check for row in found.failed)}")
    if not found.complete:
        left = [row.check for row in found.checks if row.skipped and row.engines == 0]
        silent = [f"{pod} could not be asked: {why}" for pod, why in found.unreached.items()]
        raise NotTriedError(f"{found.words}; not all was tried: {'; '.join(silent) or ', '.join(left)}")
