"""The tiny real model, made once per content of the tool that makes it and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from devtools import vllm_venv

ROOT = Path(__file__).resolve().parents[2]
MAKE_TIMEOUT_S = 300


def source_path() -> str:
    """PYTHONPATH under which vLLM's interpreter finds our packages."""
    return os.pathsep.join(str(ROOT / part) for part in ("engine", "kernels"))


def tiny_model(*options: str) -> Path:
    """Folder with base, step-1, step-2, step-3."""
    tools = ROOT / "engine" / "rollfleet_engine" / "tools"
    sources = b"".join(path.read_bytes() for path in sorted(tools.glob("*.py")))
    key = hashlib.sha256(sources + " ".join(options).encode()).hexdigest()[:12]
    folder = vllm_venv.cache_root() / f"tiny-{key}"
    if not folder.exists():
        interpreter = vllm_venv.ensure() / "bin" / "python"
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [str(interpreter), "-m", "rollfleet_engine.tools.tiny_model", str(unfinished), *options]
        environment = os.environ | {"PYTHONPATH": source_path()}
        subprocess.run(command, check=True, timeout=MAKE_TIMEOUT_S, env=environment)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder


def expected(folder: Path) -> Any:
    """What greedy decoding of this checkpoint gives."""
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))
