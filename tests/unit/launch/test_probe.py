"""What the engine's interpreter is asked, of files as vLLM and vLLM-Ascend have them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rollfleet_engine.launch import probe
from rollfleet_engine.launch.look_model import look_at_model


def _vllm(folder: Path, parsers: str) -> Path:
    package = folder / "vllm" / "tool_parsers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(parsers)
    return folder / "vllm"


def test_tool_parsers_are_read_without_running_anything(tmp_path):
    text = '_TOOL_PARSERS_TO_REGISTER: dict = {  # name -> file\n "hermes": ("h", "H"),\n "a": ("b", "C")}\nboom()\n'
    assert probe.tool_parsers(_vllm(tmp_path, text)) == ["a", "hermes"]


def test_a_list_that_looks_otherwise_is_no_list(tmp_path):
    assert probe.tool_parsers(None) == []
    assert probe.tool_parsers(tmp_path / "none") == []
    assert probe.tool_parsers(_vllm(tmp_path / "a", "def broken(")) == []
    assert probe.tool_parsers(_vllm(tmp_path / "b", "_TOOL_PARSERS_TO_REGISTER = load()")) == []


def test_vllm_ascend_is_told_by_its_files(tmp_path):
    (tmp_path / "ascend_config.py").write_text("class AscendConfig:\n    pass\n")
    old = probe.plugin(tmp_path)
    assert (old["has_rl_config"], old["device"], old["custom_kernels"]) == (False, "", False)
    (tmp_path / "ascend_config.py").write_text("class RlConfig:\n    pass\n")
    (tmp_path / "_build_info.py").write_text("# Auto-generated file\n__device_type__ = 'A3'\n")
    (tmp_path / "vllm_ascend_C.cpython-312-aarch64-linux-gnu.so").write_bytes(b"")
    new = probe.plugin(tmp_path)
    assert (new["has_rl_config"], new["device"], new["custom_kernels"]) == (True, "A3", True)
    assert probe.plugin(None) == {}


def test_an_interpreter_with_vllm_ascend_answers(tmp_path):
    """A package and its metadata as pip would leave them."""
    _vllm(tmp_path, '_TOOL_PARSERS_TO_REGISTER = {"hermes": ("h", "H")}')
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "vllm_ascend" / "ascend_config.py").write_text("class RlConfig:\n    pass\n")
    for name, version in (("vllm", "0.27.1+empty"), ("vllm_ascend", "0.19.1rc2.dev9")):
        metadata = tmp_path / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    points = tmp_path / "vllm_ascend-0.19.1rc2.dev9.dist-info" / "entry_points.txt"
    points.write_text("[vllm.platform_plugins]\nascend = vllm_ascend:register\n")
    text = Path(probe.__file__).read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", text, "json,nowhere", "vllm-ascend,torch-npu"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["distribution"] == "vllm"
    assert answer["release"] == "0.27.1+empty"
    assert answer["platforms"] == ["vllm_ascend"]
    assert answer["plugin"]["has_rl_config"] is True
    assert answer["tool_parsers"] == ["hermes"]
    assert answer["missing"] == ["nowhere"]
    assert answer["versions"] == {"vllm-ascend": "0.19.1rc2.dev9"}


def test_experts_are_counted_by_the_keys_that_vllm_knows(tmp_path):
    for config, experts in (
        ({}, 0),
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"text_config": {"num_local_experts": 8}}, 8),
        ({"text_config": {}, "moe_num_experts": [64, 64]}, 64),
        ({"num_experts": None}, 0),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert look_at_model(tmp_path).experts == experts
    (tmp_path / "config.json").write_text("[")
    assert look_at_model(tmp_path).experts is None
