"""kubectl for tests that speak as a user does; what it says on failure is what a user reads."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
TIMEOUT_S = 60.0


class KubectlError(AssertionError):
    """kubectl failed; the message is what it said."""


def kubectl(*arguments: str, manifest: Mapping[str, Any] | None = None) -> str:
    """What kubectl printed. `manifest` goes to standard input."""
    given = None if manifest is None else json.dumps(manifest)
    done = subprocess.run(
        ["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise KubectlError(done.stderr.strip())
    return done.stdout


def get(kind: str, name: str, namespace: str) -> Object:
    """One object."""
    read: Object = json.loads(kubectl("get", kind, name, "--namespace", namespace, "--output", "json"))
    return read
