"""What a vLLM-Ascend without rl_config does with what the launcher says to it instead, run by its own code.

Statements are taken out of its sources by what they assign or ask, and run with everything else stubbed, as
devtools/check_rlconfig.py does it with rl_config. Read in 0.23.0.post1, the release on PyPI: vllm_ascend/envs.py,
ascend_config.py, platform.py, batch_invariant.py and distributed/weight_transfer/__init__.py.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

ALLOCATOR, NZ = "PYTORCH_NPU_ALLOC_CONF", "VLLM_ASCEND_ENABLE_NZ"


class MissingError(Exception):
    """A statement is not in the sources any more; the message says which."""


class Before:
    """The parts of one unpacked release, runnable. Raises MissingError where one is not found."""

    def __init__(self, checkout: Path) -> None:
        package = checkout / "vllm_ascend"
        config, platform = _parsed(package / "ascend_config.py"), _parsed(package / "platform.py")
        self._value = _function(config, "_get_config_value")
        self._value.decorator_list = []
        self._nz = _assignment(config, "self.weight_nz_mode")
        self._cleanup = _assignment(config, "self.enable_sleep_mode_extra_cleanup")
        self._allocator = _found(platform, ast.If, "enable_sleep_mode", ALLOCATOR)
        self._default = _found(_parsed(package / "envs.py"), ast.Lambda, NZ, "getenv")
        self._invariant = _function(_parsed(package / "batch_invariant.py"), "override_envs_for_invariance")
        transfer = package / "distributed" / "weight_transfer" / "__init__.py"
        self._register = _function(_parsed(transfer), "register_engine")

    def nz(self, additional: Mapping[str, Any], environ: Mapping[str, str]) -> int:
        """weight_nz_mode in effect."""
        with patch.dict(os.environ, environ, clear=True):
            scope = self._scope(additional)
            scope["ascend_envs"] = SimpleNamespace(**{NZ: eval(_expression(self._default), {"os": os})()})  # noqa: S307 - of a release that the caller names
            return int(_run(self._nz, scope)["self"].weight_nz_mode)

    def cleanup(self, additional: Mapping[str, Any]) -> bool:
        """Whether sleeping gives groups and workspaces back too."""
        return bool(_run(self._cleanup, self._scope(additional))["self"].enable_sleep_mode_extra_cleanup)

    def allocator(self, environ: Mapping[str, str], *, sleep: bool) -> str | None:
        """The allocator's settings once the platform has seen the configuration; None: there are none."""
        with patch.dict(os.environ, environ, clear=True):
            _run(self._allocator, self._scope({}) | {"model_config": SimpleNamespace(enable_sleep_mode=sleep)})
            return os.environ.get(ALLOCATOR)

    def invariant(self) -> tuple[int, Mapping[str, str]]:
        """weight_nz_mode and the variables that batch invariance sets."""
        settings = SimpleNamespace(weight_nz_mode=1)
        module = ModuleType("vllm_ascend.ascend_config")
        module.__dict__["get_ascend_config"] = lambda: settings
        torch = SimpleNamespace(use_deterministic_algorithms=_ignore)
        names = {"vllm_ascend": ModuleType("vllm_ascend"), "vllm_ascend.ascend_config": module}
        with patch.dict(os.environ, {}, clear=True), patch.dict(sys.modules, names):
            _run(self._invariant, self._scope({}) | {"torch": torch})["override_envs_for_invariance"]()
            return settings.weight_nz_mode, dict(os.environ)

    def engines(self) -> tuple[str, ...]:
        """Names of its weight transfer engines."""
        found: list[str] = []
        factory = SimpleNamespace(register_engine=lambda name, *_: found.append(name))
        _run(self._register, {"WeightTransferEngineFactory": factory})["register_engine"]()
        return tuple(found)

    def _scope(self, additional: Mapping[str, Any]) -> dict[str, Any]:
        logger = SimpleNamespace(info=_ignore, info_once=_ignore, warning=_ignore, warning_once=_ignore, debug=_ignore)
        scope: dict[str, Any] = {"os": os, "Any": Any, "logger": logger}
        value = _run(self._value, scope)["_get_config_value"]
        return scope | {"additional_config": dict(additional), "self": SimpleNamespace(_get_config_value=value)}


def _ignore(*_: object, **__: object) -> None:
    """Upstream's log."""


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingError(f"{file}: {error.strerror}") from error


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    found: ast.FunctionDef = _found(tree, ast.FunctionDef, f"def {name}(")
    return found


def _assignment(tree: ast.Module, target: str) -> ast.Assign:
    found: ast.Assign = _found(tree, ast.Assign, f"{target} = ")
    return found


def _found(tree: ast.Module, kind: type[ast.AST], *words: str) -> Any:
    """The first node of this kind whose text holds these words; of nested ones the outer comes first."""
    for node in ast.walk(tree):
        if isinstance(node, kind) and all(word in ast.unparse(node) for word in words):
            return node
    raise MissingError(f"there is no {kind.__name__} with {' and '.join(words)}")


def _expression(node: ast.expr) -> Any:
    return compile(ast.fix_missing_locations(ast.Expression(node)), "vllm-ascend", "eval")


def _run(node: ast.stmt, scope: dict[str, Any]) -> dict[str, Any]:
    module = ast.Module(body=[ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), "vllm-ascend", "exec"), scope)  # noqa: S102 - of a release that the caller names
    return scope


def rules(before: Before) -> Iterator[tuple[str, object, object]]:
    """(rule, what it does, what it should do): on these the launcher relies where there is no rl_config."""
    yield "FRACTAL_NZ of quantised weights is on by default", before.nz({}, {}), 1
    yield "weight_nz_mode 0 switches FRACTAL_NZ off", before.nz({"weight_nz_mode": 0}, {}), 0
    yield "weight_nz_mode 0 is stronger than the variable", before.nz({"weight_nz_mode": 0}, {NZ: "2"}), 0
    yield "the variable alone switches FRACTAL_NZ off", before.nz({}, {NZ: "0"}), 0
    yield "sleeping gives no more back by default", before.cleanup({}), False
    yield "the key of before gives more back", before.cleanup({"enable_sleep_mode_extra_cleanup": True}), True
    rest, expandable = "page_size:1g", "expandable_segments:True"
    yield "without sleep mode expandable segments come by default", before.allocator({}, sleep=False), expandable
    added = before.allocator({ALLOCATOR: rest}, sleep=False)
    yield "without sleep mode they are added to the rest", added, f"{rest},{expandable}"
    kept = before.allocator({ALLOCATOR: "max_split_size_mb:512"}, sleep=False)
    yield "without sleep mode they are not added to what excludes them", kept, "max_split_size_mb:512"
    yield "with sleep mode nothing is added", before.allocator({ALLOCATOR: rest}, sleep=True), rest
    yield "with sleep mode nothing is set", before.allocator({}, sleep=True), None
    variables = {"HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
    yield "batch invariance switches FRACTAL_NZ off and sets two variables", before.invariant(), (0, variables)
    yield "its transfer engines are hccl and npu_ipc", before.engines(), ("hccl", "npu_ipc")
