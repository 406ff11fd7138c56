"""Lays the trainer extra's packages over the environment with real vLLM, whose torch and transformers a trainer needs.

A trainer of the tests is a process of its own under that environment's interpreter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from devtools import overlays, vllm_venv

REQUIREMENTS = vllm_venv.REQUIREMENTS / "trainer.txt"


def ensure() -> Path:
    """The folder for PYTHONPATH; unpacks it where it is missing. Safe to call from several processes."""
    return overlays.ensure("trainer", REQUIREMENTS, "the Kubernetes client of trainers")


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description="unpack what rollfleet[trainer] needs over real vLLM").parse_args(argv)
    try:
        vllm_venv.say(f"packages of trainers: {ensure()}")
    except vllm_venv.VenvError as error:
        print(f"trainer-packages: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
