"""What shares a core with the engine must get its share of it."""

from __future__ import annotations

import os
import subprocess

from devtools import vllm_venv
from tests.support.tiny import source_path

# As vLLM does in each of its processes. The wait between two looks at its queue must not be sched_yield any more.
PROGRAM = """
import os
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
os.sched_yield = lambda: print("sched_yield")
shm_broadcast.sched_yield()
print("waited")
"""


def test_vllm_waits_without_starving_its_neighbours() -> None:
    python = vllm_venv.ensure() / "bin" / "python"
    environment = os.environ | {"PYTHONPATH": source_path()}
    done = subprocess.run(
        [str(python), "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == ["waited"], done.stderr
    assert "sched_yield" not in done.stdout
