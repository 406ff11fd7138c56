"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Fleet = Annotated[str, typer.Argument(help="A fleet: the name of its RolloutEngine.", show_default=False)]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's namespace.")]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", help="Default: $KUBECONFIG, ~/.kube/config, or the pod's own account.")
]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="json: data for programs.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow it to its end; the exit code tells how it ended.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds after which to give up waiting.", min=0)]
Within = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the engines' answers.", min=1)]
Via = Annotated[
    Literal["auto", "direct", "port-forward"],
    typer.Option(help="The way to the engines. auto: direct within the cluster, else the API server's port-forward."),
]
