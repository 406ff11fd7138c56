"""Backend gloo between processes: what it takes of memory while it streams."""

from __future__ import annotations

import os
import re
import subprocess

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path


def test_gloo_takes_two_buffers_beside_its_tensors() -> None:
    """128 MiB to two receivers; `make bench-pushes` measures the speed too."""
    interpreter = vllm_venv.ensure() / "bin" / "python"
    command = [str(interpreter), "-m", "tests.bench.pushes", "-n", "1", "--mib", "128", "--ranks", "2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{source_path()}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    found = re.search(r"receiver (\d+) MiB, sender (\d+) MiB, (\d+) allowed", ended.stdout)
    assert found is not None, ended.stderr[-2000:]
    received, sent, allowed = (int(number) for number in found.groups())
    assert max(received, sent) <= allowed
