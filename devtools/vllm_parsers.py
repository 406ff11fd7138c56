"""Lays other releases of vLLM over the environment with real vLLM, so that their own argument parsers can be asked.

A wheel alone is unpacked, without its dependencies: what a parser imports, the environment of the first release has.
That is enough to parse a command line, and not to start an engine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import sys
from pathlib import Path

from devtools import vllm_venv

RELEASES = ("0.29.0", "0.32.0")
REFUSED = "0.23.0"  # laid nowhere, and asked for nothing: what its files lack is why it is not started (tests/ascend)
DOWNLOAD_TIMEOUT_S = 900  # a wheel has 110 to 130 MB


def requirement_file(release: str) -> Path:
    return vllm_venv.REQUIREMENTS / f"vllm-{release}-parser.txt"


def overlay_path(release: str) -> Path:
    """Where the release is unpacked; another content or another environment is another folder."""
    decides = requirement_file(release).read_bytes() + vllm_venv.venv_path(vllm_venv.RELEASES[0]).name.encode()
    return vllm_venv.cache_root() / f"vllm-parser-{release}-{hashlib.sha256(decides).hexdigest()[:12]}"


def ensure(release: str) -> Path:
    """The folder for PYTHONPATH; unpacks it where it is missing. Safe to call from several processes."""
    folder = overlay_path(release)
    if vllm_venv.is_complete(folder):
        return folder
    venv = vllm_venv.ensure(vllm_venv.RELEASES[0])
    with (folder.parent / f"{folder.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not vllm_venv.is_complete(folder):
            _unpack(venv, release, folder)
    return folder


def _unpack(venv: Path, release: str, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    command += ["--require-hashes", "--no-compile", "--progress-bar", "off", "--target", str(folder)]
    vllm_venv.run(
        f"vLLM {release} for its parser", [*command, "-r", str(requirement_file(release))], DOWNLOAD_TIMEOUT_S
    )
    (folder / vllm_venv.MARKER).write_text(folder.name + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="unpack the releases of vLLM whose argument parsers are asked")
    parser.parse_args(argv)
    try:
        for release in RELEASES:
            vllm_venv.say(f"parser of {release}: {ensure(release)}")
    except vllm_venv.VenvError as error:
        print(f"vllm-parsers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
