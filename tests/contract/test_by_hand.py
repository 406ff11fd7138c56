"""The engine of docs/fault-injection.md that is driven by hand: it does what the plan says, and says so."""

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.process import ROOT

RULES = (
    {"call": "transfer", "fault": "refuse", "at": [1], "message": "rank 3: out of memory"},
    {"call": "engine.apply", "fault": "skip", "at": [1], "layer": "model.layers.1"},
    {"call": "engine.apply", "fault": "skip", "at": [2], "layer": "no-such-layer"},
)


def driven(plan: Path, updates: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.contract.by_hand", str(plan))
    return subprocess.run(command, cwd=ROOT, input=updates, capture_output=True, text=True, timeout=120, check=False)


def test_updates_end_as_the_plan_says(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"rules": RULES}))
    ended = driven(plan, "step-1\nstep-2\nstep-3\n")
    assert ended.returncode == 0, ended.stderr
    updates = [line for line in ended.stdout.splitlines() if line.startswith("version ")]
    for line, words in zip(
        updates, ("done; gate Open", "out of memory", "CoverageFailed", "done; gate Open"), strict=True
    ):
        assert words in line
    assert "no 'no-such-layer' among " in ended.stdout, "what was announced and could not be done is told"


def test_a_plan_that_is_wrong_is_told_before_anything_starts(tmp_path: Path) -> None:
    ended = driven(tmp_path / "nothing.json", "")
    assert (ended.returncode, "No such file" in ended.stderr) == (2, True)
    assert "Traceback" not in ended.stderr
