"""Both releases are named where there are two."""

from pathlib import Path

import pytest

from rollfleet_engine.vllm.release import told


def test_vllm_alone():
    assert told("0.27.1") == "0.27.1"


def test_c23_both_versions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "vllm_ascend-0.23.0.post1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.23.0.post1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert told("0.23.0+empty") == "0.23.0+empty with vllm-ascend 0.23.0.post1"
