"""Helm as a function: the chart rendered into objects."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts/rollfleet"
TIMEOUT_S = 60.0
OLDEST_KUBERNETES = "1.33.0"  # that the chart takes


class HelmError(AssertionError):
    """helm failed; the message is what it said."""


def find_helm() -> str | None:
    """helm on PATH, else the one that devcluster built."""
    from devcluster import paths  # noqa: PLC0415 - a tool of its own; only its folder is of interest

    return shutil.which("helm") or shutil.which(
        "helm", path=str(paths.from_environment(os.environ).cache / "bin/current")
    )


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> str:
    """What helm printed. `values` goes to standard input."""
    program = find_helm()
    if program is None:
        raise HelmError("no helm: `python3 -m devcluster build` makes one")
    given = None if values is None else yaml.safe_dump(dict(values))
    done = subprocess.run(
        [program, *arguments], input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise HelmError(done.stderr.strip() + done.stdout.strip())
    return done.stdout


def render(values: Mapping[str, Any], *, release: str = "rollfleet", namespace: str = "system") -> list[dict[str, Any]]:
    """The objects that an installation would make."""
    place = ("--namespace", namespace, "--kube-version", OLDEST_KUBERNETES)
    text = helm("template", release, str(CHART), *place, "--values", "-", values=values)
    return [document for document in yaml.safe_load_all(text) if document]
