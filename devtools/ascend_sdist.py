"""Fetches the source archive of vLLM-Ascend 0.23.0.post1 and unpacks it outside the work tree, once.

Nothing of it is built or installed. pip asks even an archive that it only downloads for its name, which runs the
archive's setup.py; what that imports is laid beside it, and it is told its version, which it would ask git for.

python -m devtools.ascend_sdist  prints the folder
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from devtools import vllm_venv

RELEASE = "0.23.0.post1"
ARCHIVE = vllm_venv.REQUIREMENTS / f"vllm-ascend-{RELEASE}.txt"
BUILD = vllm_venv.REQUIREMENTS / "vllm-ascend-build.txt"
TIMEOUT_S = 600
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class SdistError(Exception):
    """It could not be fetched; the message ends with pip's own words."""


def folder() -> Path:
    """Where it is unpacked; other requirements are another folder."""
    decides = hashlib.sha256(ARCHIVE.read_bytes() + BUILD.read_bytes()).hexdigest()[:12]
    return vllm_venv.cache_root() / f"vllm-ascend-{RELEASE}-{decides}"


def ensure() -> Path:
    """The checkout that devtools.check_rlconfig reads. Raises SdistError."""
    complete = folder()
    if not vllm_venv.is_complete(complete):
        shutil.rmtree(complete, ignore_errors=True)
        complete.mkdir(parents=True)
        _fetch(complete)
        (complete / vllm_venv.MARKER).write_text(complete.name + "\n", encoding="utf-8")
    return complete / f"vllm_ascend-{RELEASE}"


def _fetch(target: Path) -> None:
    beside = target / "build"
    _pip("install", "-q", "--no-deps", "--require-hashes", "--target", str(beside), "-r", str(BUILD))
    environ = {"PYTHONPATH": str(beside), "SETUPTOOLS_SCM_PRETEND_VERSION": RELEASE, "COMPILE_CUSTOM_KERNELS": "0"}
    # Chips are asked of npu-smi where they are not named; any of them will do.
    environ["SOC_VERSION"] = "ascend910b1"
    options = ("--no-deps", "--require-hashes", "--no-build-isolation", "--no-binary", ":all:")
    _pip("download", "-q", *options, "-d", str(target), "-r", str(ARCHIVE), **environ)
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    archive.unlink()
    shutil.rmtree(beside)


def _pip(*arguments: str, **environ: str) -> None:
    try:
        done = subprocess.run(
            [*PIP, *arguments], check=False, timeout=TIMEOUT_S, capture_output=True, text=True, env=os.environ | environ
        )
    except subprocess.TimeoutExpired as error:
        raise SdistError(f"pip {arguments[0]}: not done after {TIMEOUT_S} s; run it again") from error
    if done.returncode != 0:
        raise SdistError(f"pip {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def main() -> int:
    """Entry point."""
    try:
        print(ensure())
    except SdistError as error:
        print(f"ascend-sdist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
