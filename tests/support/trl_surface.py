"""What TRL's client takes, method by method; run by TRL's interpreter it prints that of the installed one.

python -m tests.support.trl_surface > tests/support/trl-1.16.0.json
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("trl-1.16.0.json")


def signature_of(method: Callable[..., Any]) -> str:
    """Arguments with their defaults, without types."""
    told = inspect.signature(method).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in told if each.name != "self"]
    return str(inspect.Signature(bare))


def surface_of(cls: type) -> dict[str, str]:
    """Of its public methods."""
    names = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
    return {name: signature_of(getattr(cls, name)) for name in sorted(names)}


def table() -> dict[str, Any]:
    """What is checked in, with its source."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def installed() -> dict[str, Any]:
    """The same of the TRL that is installed here, and what its sync looks for in a module."""
    theirs = import_module("trl.generation.vllm_client").VLLMClient
    user = import_module("trl.generation.vllm_generation")
    return {
        "source": f"trl/generation/vllm_client.py of trl {metadata.version('trl')} from PyPI",
        "made": signature_of(theirs),
        "methods": surface_of(theirs),
        "replaced": sorted(name for name in ("VLLMClient", "is_vllm_available") if hasattr(user, name)),
    }


if __name__ == "__main__":
    print(json.dumps(installed(), indent=1, sort_keys=True))
