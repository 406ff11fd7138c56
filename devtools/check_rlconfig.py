"""Runs vLLM-Ascend's own rl_config, of a checkout, and compares it with devtools/rl_rules.py.

`python -m devtools.check_rlconfig CHECKOUT` (make check-rlconfig VLLM_ASCEND=CHECKOUT). Nothing of torch, vLLM or CANN
is needed: the class RlConfig, the part of AscendConfig.__init__ that refuses the key of before, and platform.py's
function are taken out of the sources by their names and run with everything else stubbed. Sources without these names
are told, not passed over. Earlier builds (to 0.26) have no rl_config: of them, what the launcher says instead is looked
up, and their own code is run on it (before_rlconfig.py).
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from devtools.before_rlconfig import Before, MissingError, rules
from devtools.rl_rules import CASES, Case

CONFIG, PLATFORM, WORKER = "vllm_ascend/ascend_config.py", "vllm_ascend/platform.py", "vllm_ascend/worker/worker.py"
# What the launcher says to a build without (engine/rollfleet_engine/launch/dialects.py), and where that reads it.
BEFORE_RL_CONFIG = (
    (CONFIG, "weight_nz_mode"),
    (CONFIG, "enable_sleep_mode_extra_cleanup"),
    (WORKER, "VLLM_ASCEND_ENABLE_NZ"),
    (WORKER, "weight_nz_mode"),
    (PLATFORM, "use_batch_invariant"),
    (PLATFORM, "AttentionBackendEnum.FLASH_ATTN"),
    ("vllm_ascend/batch_invariant.py", "HCCL_DETERMINISTIC"),
    ("vllm_ascend/batch_invariant.py", "LCCL_DETERMINISTIC"),
)


class CheckoutError(Exception):
    """The checkout is not what can be compared; the message says what is missing."""


class Upstream:
    """vLLM-Ascend's rl_config, runnable."""

    def __init__(self, checkout: Path) -> None:
        config = _parsed(checkout / CONFIG)
        self._rl_config = _node(config, ast.ClassDef, "RlConfig", CONFIG)
        self._removed = _guard_of_removed_key(_node(config, ast.ClassDef, "AscendConfig", CONFIG))
        self._allocator = _node(_parsed(checkout / PLATFORM), ast.FunctionDef, "_disable_expandable_segments", PLATFORM)

    def apply(self, case: Case) -> tuple[Any, int]:
        """The object that it makes and the NZ mode in effect. Variables are those of this process."""
        silent = SimpleNamespace(warning=_ignore, info=_ignore, debug=_ignore)
        scope: dict[str, Any] = {"os": os, "Any": Any, "logger": silent}
        platform = ModuleType("vllm_ascend.platform")
        exec(_compiled(self._allocator), scope)  # noqa: S102 - of a checkout that the caller names
        platform.__dict__.update(scope)
        modules = {"vllm_ascend": ModuleType("vllm_ascend"), "vllm_ascend.platform": platform}
        with patch.dict(sys.modules, modules):
            exec(_compiled(self._removed), {"additional_config": dict(case.additional)})  # noqa: S102 - of a checkout that the caller names
            exec(_compiled(self._rl_config), scope)  # noqa: S102 - of a checkout that the caller names
            # AscendConfig._get_config_value: the setting, else the variable, else 1 (envs.py).
            nz = case.additional.get("weight_nz_mode", int(os.environ.get("VLLM_ASCEND_ENABLE_NZ", "1")))
            ascend_config = SimpleNamespace(weight_nz_mode=nz)
            made = scope["RlConfig"](case.additional.get("rl_config", {}))
            made.apply(ascend_config)
        return made, ascend_config.weight_nz_mode


def _ignore(*_: object) -> None:
    """Upstream's log."""


def _parsed(file: Path) -> ast.Module:
    return ast.parse(_text(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckoutError(f"{file}: {error.strerror}: is this a checkout of vllm-ascend?") from error


def _node(tree: ast.Module, kind: type[ast.ClassDef | ast.FunctionDef], name: str, file: str) -> ast.stmt:
    for node in tree.body:
        if isinstance(node, kind) and node.name == name:
            return node
    raise CheckoutError(f"{file} has no {name}")


def _guard_of_removed_key(config: ast.stmt) -> ast.stmt:
    """The statement of AscendConfig.__init__ that refuses the key of before."""
    for node in ast.walk(config):
        if isinstance(node, ast.If) and "'enable_sleep_mode_extra_cleanup' in" in ast.unparse(node.test):
            return node
    raise CheckoutError(f"{CONFIG}: AscendConfig no longer refuses enable_sleep_mode_extra_cleanup")


def _compiled(node: ast.stmt) -> Any:
    module = ast.Module(body=[ast.ImportFrom("__future__", [ast.alias("annotations")], 0), node], type_ignores=[])
    return compile(ast.fix_missing_locations(module), "vllm-ascend", "exec")


def differences(upstream: Upstream, case: Case) -> Iterator[str]:
    """What the checkout does otherwise than the rule says."""
    with patch.dict(os.environ, dict(case.environ), clear=True):
        try:
            made, nz = upstream.apply(case)
        except ValueError as error:
            if not case.error or case.error not in str(error):
                yield f"it refuses: {error}"
            return
        if case.error:
            yield f"it does not refuse; expected: ... {case.error} ..."
            return
        yield from _compared(case, made, nz, dict(os.environ))


def _compared(case: Case, made: Any, nz: int, environ: Mapping[str, str]) -> Iterator[str]:
    if case.nz is not None and nz != case.nz:
        yield f"weight_nz_mode is {nz}, not {case.nz}"
    for name, value in case.after.items():
        if environ.get(name) != value:
            yield f"{name} is {environ.get(name)!r}, not {value!r}"
    for name, flag in case.flags.items():
        if getattr(made, name) is not flag:
            yield f"{name} is {getattr(made, name)!r}, not {flag!r}"


def _before_rl_config(checkout: Path) -> Iterator[str]:
    for file, word in BEFORE_RL_CONFIG:
        if word not in _text(checkout / file):
            yield f"{file} does not read {word}"


def _check_before(checkout: Path) -> int:
    print(f"{checkout}: no rl_config; what the launcher says instead is looked for, and run")
    unread = list(_before_rl_config(checkout))
    for text in unread:
        print(f"DIFFERS {text}")
    print(f"{len(BEFORE_RL_CONFIG) - len(unread)} of {len(BEFORE_RL_CONFIG)} settings are read")
    try:
        found = list(rules(Before(checkout)))
    except MissingError as error:
        raise CheckoutError(str(error)) from error
    wrong = 0
    for rule, does, should in found:
        wrong += does != should
        print(f"holds   {rule}" if does == should else f"DIFFERS {rule}: it is {does!r}, not {should!r}")
    print(f"{len(found) - wrong} of {len(found)} rules hold")
    return len(unread) + wrong


def check(checkout: Path) -> int:
    """The number of rules that do not hold, each printed."""
    source = checkout / CONFIG
    if source.is_file() and "class RlConfig" not in source.read_text(encoding="utf-8"):
        return _check_before(checkout)
    upstream = Upstream(checkout)
    wrong = 0
    for case in CASES:
        found = list(differences(upstream, case))
        wrong += bool(found)
        print(f"{'DIFFERS' if found else 'holds  '} {case.rule}{': ' if found else ''}{'; '.join(found)}")
    print(f"{len(CASES) - wrong} of {len(CASES)} rules hold")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """0: all rules hold; 1: some do not; 2: there is nothing to compare with."""
    parser = argparse.ArgumentParser(description="compare vLLM-Ascend's rl_config with devtools/rl_rules.py")
    parser.add_argument("checkout", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        return 1 if check(chosen.checkout) else 0
    except CheckoutError as error:
        print(f"check-rlconfig: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
