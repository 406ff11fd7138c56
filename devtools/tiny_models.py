"""Makes the tiny models of tests, demo and benchmark, each once, and keeps them outside the work tree.

A folder's name carries a hash of the tool's sources and of its options; it appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from devtools import vllm_venv

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "engine" / "rollfleet_engine" / "tools"
MAKE_TIMEOUT_S = 300


def source_path() -> str:
    """PYTHONPATH under which another interpreter finds our packages."""
    return os.pathsep.join(str(ROOT / part) for part in ("engine", "kernels"))


def tiny_model(python: Path, *options: str) -> Path:
    """Folder with base, step-1, step-2 ..., made by this interpreter where it is not there yet.

    Raises subprocess.CalledProcessError with the tool's own words on standard error.
    """
    sources = b"".join(path.read_bytes() for path in sorted(TOOLS.glob("*.py")))
    key = hashlib.sha256(sources + " ".join(options).encode()).hexdigest()[:12]
    folder = vllm_venv.cache_root() / f"tiny-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [str(python), "-m", "rollfleet_engine.tools.tiny_model", str(unfinished), *options]
        environment = os.environ | {"PYTHONPATH": source_path(), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=MAKE_TIMEOUT_S, env=environment, stdout=subprocess.DEVNULL)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder
