"""The tiny real model of the tests, with what it must answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devtools import tiny_models, vllm_venv
from devtools.tiny_models import source_path

__all__ = ["expected", "source_path", "tiny_model"]


def tiny_model(*options: str) -> Path:
    """Folder with base, step-1, step-2, step-3."""
    return tiny_models.tiny_model(vllm_venv.ensure() / "bin" / "python", *options)


def expected(folder: Path) -> Any:
    """What greedy decoding of this checkpoint gives."""
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))
