"""Packages laid over the environment with real vLLM: a folder for PYTHONPATH, made once, outside the work tree.

Wheels are unpacked alone, without their dependencies: what they import besides, the environment of the first release
has. Another content or another environment is another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

from devtools import vllm_venv

DOWNLOAD_TIMEOUT_S = 900  # some 130 MB


def overlay_path(name: str, requirements: Path) -> Path:
    """Where it is unpacked, or would be."""
    decides = requirements.read_bytes() + vllm_venv.venv_path(vllm_venv.RELEASES[0]).name.encode()
    return vllm_venv.cache_root() / f"{name}-{hashlib.sha256(decides).hexdigest()[:12]}"


def ensure(name: str, requirements: Path, what: str, *, within: str = "") -> Path:
    """The folder, or the one `within` it, for PYTHONPATH; unpacks it where it is missing.

    Safe to call from several processes. Raises VenvError.
    """
    folder = overlay_path(name, requirements)
    if vllm_venv.is_complete(folder):
        return folder / within
    venv = vllm_venv.ensure(vllm_venv.RELEASES[0])
    with (folder.parent / f"{folder.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not vllm_venv.is_complete(folder):
            _unpack(venv, requirements, folder, what, within)
    return folder / within


def _unpack(venv: Path, requirements: Path, folder: Path, what: str, within: str) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    command += ["--require-hashes", "--no-compile", "--progress-bar", "off", "--target", str(folder / within)]
    vllm_venv.run(what, [*command, "-r", str(requirements)], DOWNLOAD_TIMEOUT_S)
    (folder / vllm_venv.MARKER).write_text(folder.name + "\n", encoding="utf-8")
