"""The commands together. `rollfleet --help` tells them; docs/cli.md tells the exit codes."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from rollfleet_cli.commands import conform, inspect, move, show
from rollfleet_cli.errors import CommandError
from rollfleet_protocol.words import visible

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Fleets of rollout engines: what they do, and which weights they shall hold. Also `kubectl rollfleet`."""


COMMANDS = (
    *(show.status, show.watch, show.history),
    *(move.bump, move.rollback, move.retry),
    *(inspect.plan, inspect.diagnose, inspect.verify),
    conform.conformance,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run a command; what goes wrong is one message and an exit code."""
    try:
        app()
    except CommandError as error:
        typer.echo(f"rollfleet: {visible(str(error))}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
