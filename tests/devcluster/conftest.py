"""These tests take the machine's cluster down and up: they run only when asked for by name (see docs/devcluster.md)."""

import os
import platform
from pathlib import Path

import pytest

ASKED = "DEVCLUSTER_TEST"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    why = None
    if platform.system() != "Linux" or os.geteuid() != 0:
        why = "a cluster needs root on Linux"
    elif os.environ.get(ASKED) != "1":
        why = f"takes this machine's cluster down: set {ASKED}=1"
    for item in items:
        if why is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(300))
