"""Why no engine of vLLM 0.23 is started: what the launcher says of that release is so, read in its own files.

Beside 0.27.1, with which our transfer engine and our adapter run.
"""

import ast
from pathlib import Path

import pytest

from devtools import vllm_parsers, vllm_venv
from devtools.tiny_models import ROOT
from rollfleet_engine.launch.dialects import Unspoken, range_of

OURS = ROOT / "engine" / "rollfleet_engine" / "vllm" / "transfer_engine.py"
BASE = "distributed/weight_transfer/base.py"
CLIENT = "v1/engine/async_llm.py"


@pytest.fixture(scope="module")
def refused() -> Path:
    return vllm_parsers.ensure(vllm_parsers.REFUSED) / "vllm"


@pytest.fixture(scope="module")
def spoken() -> Path:
    return next(vllm_venv.ensure(vllm_venv.RELEASES[0]).glob("lib/python*/site-packages/vllm"))


def methods(file: Path, owner: str) -> dict[str, list[str]]:
    """Of a class, with their arguments."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    functions = (node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: [argument.arg for argument in node.args.args] for node in functions}


def test_it_makes_transfer_engines_with_other_arguments(refused: Path, spoken: Path) -> None:
    ours = methods(OURS, "RollfleetWeightTransferEngine")["__init__"]
    assert methods(spoken / BASE, "WeightTransferEngine")["__init__"] == ours
    assert methods(refused / BASE, "WeightTransferEngine")["__init__"] == ["self", "config", "parallel_config", "model"]
    assert len(ours) == 5


def test_it_cannot_be_told_which_version_it_holds(refused: Path, spoken: Path) -> None:
    assert "update_weight_version" in methods(spoken / CLIENT, "AsyncLLM")
    before = methods(refused / CLIENT, "AsyncLLM")
    assert "finish_weight_update" in before
    assert "update_weight_version" not in before


def test_both_are_told_to_whoever_has_such_an_image() -> None:
    found = range_of(vllm_parsers.REFUSED)
    assert isinstance(found, Unspoken)
    assert "weight transfer engines other arguments" in found.reason
    assert "AsyncLLM.update_weight_version" in found.reason
