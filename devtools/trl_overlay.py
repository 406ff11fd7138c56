"""Lays TRL over the environment with real vLLM, so that its client can be read and its trainers run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from devtools import overlays, vllm_venv

RELEASE = "1.16.0"


def requirement_file() -> Path:
    return vllm_venv.REQUIREMENTS / f"trl-{RELEASE}.txt"


def ensure() -> Path:
    """The folder for PYTHONPATH; unpacks it where it is missing. Safe to call from several processes.

    dill takes modules below a folder of that name for installed ones, and would pickle others whole.
    """
    what = f"TRL {RELEASE}, about 80 MB to download"
    return overlays.ensure(f"trl-{RELEASE}", requirement_file(), what, within="site-packages")


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description="unpack TRL over the environment with real vLLM").parse_args(argv)
    try:
        vllm_venv.say(f"trl: {ensure()}")
    except vllm_venv.VenvError as error:
        print(f"trl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
