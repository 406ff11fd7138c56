"""A process for each release, which imports vLLM once and then parses whatever it is given."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_parsers, vllm_venv

INSTALLED = vllm_venv.RELEASES[0]
RELEASES = (INSTALLED, *vllm_parsers.RELEASES)
ASK = Path(__file__).with_name("ask.py")
MARK = "ROLLFLEET "


@dataclass(frozen=True)
class Release:
    """A release's own parser."""

    name: str
    folder: Path  # of its packages
    known: dict[str, list[Any]]
    process: subprocess.Popen[str]

    def parse(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        """Option by option, or its words under `error`."""
        assert self.process.stdin is not None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        return _answer(self.process)


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise AssertionError(f"the parser ended with {process.wait()}")


def folder_of(name: str) -> Path:
    """The packages of a release; skips where it is not there."""
    venv = vllm_venv.venv_path(INSTALLED)
    folder = (
        next(venv.glob("lib/python*/site-packages"), venv) if name == INSTALLED else vllm_parsers.overlay_path(name)
    )
    if not vllm_venv.is_complete(venv) or not (folder / "vllm").is_dir():
        pytest.skip(f"no vLLM {name} at {folder}: `make vllm-venv` makes it")
    return folder


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    """Each release, after the other."""
    name = request.param
    venv, folder = vllm_venv.venv_path(INSTALLED), folder_of(name)
    environ = {
        "PATH": os.environ["PATH"],
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HOME": "/nonexistent",
    }
    if name != INSTALLED:
        environ["PYTHONPATH"] = str(folder)
    process = subprocess.Popen(
        [str(venv / "bin" / "python"), str(ASK)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Release(name, folder, _answer(process), process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
