"""Lays other releases of vLLM over the environment with real vLLM, so that their own argument parsers can be asked.

A wheel alone is enough to parse a command line, and not to start an engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from devtools import overlays, vllm_venv

RELEASES = ("0.23.0", "0.29.0", "0.32.0")


def requirement_file(release: str) -> Path:
    return vllm_venv.REQUIREMENTS / f"vllm-{release}-parser.txt"


def overlay_path(release: str) -> Path:
    """Where the release is unpacked."""
    return overlays.overlay_path(f"vllm-parser-{release}", requirement_file(release))


def ensure(release: str) -> Path:
    """The folder for PYTHONPATH; unpacks it where it is missing. Safe to call from several processes."""
    return overlays.ensure(f"vllm-parser-{release}", requirement_file(release), f"vLLM {release} for its parser")


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
