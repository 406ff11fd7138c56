"""Where the environment with vLLM lies, and when it counts as made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from devtools import vllm_venv


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert vllm_venv.venv_path().parent == cache
    monkeypatch.delenv("ROLLFLEET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert vllm_venv.venv_path().parent == Path("/somewhere/rollfleet")


def test_other_requirements_are_another_environment(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vllm_venv.venv_path()
    changed = vllm_venv.requirement_file("0.27.1").read_text(encoding="utf-8") + "# more\n"
    (tmp_path / "vllm-0.27.1.txt").write_text(changed, encoding="utf-8")
    monkeypatch.setattr(vllm_venv, "REQUIREMENTS", tmp_path)
    assert vllm_venv.venv_path() != before


def test_what_an_interrupted_run_left_does_not_count(cache: Path) -> None:
    venv = vllm_venv.venv_path()
    assert not vllm_venv.is_complete(venv)
    (venv / "bin").mkdir(parents=True)
    assert not vllm_venv.is_complete(venv)
    (venv / vllm_venv.MARKER).write_text("", encoding="utf-8")
    assert not vllm_venv.is_complete(venv)
    (venv / vllm_venv.MARKER).write_text(venv.name + "\n", encoding="utf-8")
    assert vllm_venv.is_complete(venv)
    assert vllm_venv.ensure() == venv


def test_the_release_of_a_run_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_venv.RELEASE_VARIABLE, "0.32.0")
    assert vllm_venv.venv_path() == vllm_venv.venv_path("0.32.0") != vllm_venv.venv_path("0.27.1")
    monkeypatch.setenv(vllm_venv.RELEASE_VARIABLE, "0.31.0")
    with pytest.raises(vllm_venv.VenvError, match=r"0\.31\.0"):
        vllm_venv.venv_path()
    monkeypatch.setenv(vllm_venv.RELEASE_VARIABLE, "")
    assert vllm_venv.venv_path() == vllm_venv.venv_path("0.27.1")


@pytest.mark.parametrize("release", vllm_venv.RELEASES)
def test_every_requirement_is_pinned_with_its_hash(release: str) -> None:
    lines = vllm_venv.requirement_file(release).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert len(wanted) > 100
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in wanted)
