"""An interpreter that is asked: a node that is slow or full is no wrong image."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.launch import preflight
from rollfleet_engine.launch.asking import Asked, ask
from rollfleet_engine.launch.facts import Memory
from rollfleet_engine.launch.memory_needs import MIB
from rollfleet_engine.launch.plan import Refused, plan
from rollfleet_engine.launch.preflight import observe, own_paths
from rollfleet_engine.launch.termination import exit_code_of
from rollfleet_protocol.termination import EXIT_CONFIGURATION, EXIT_TEMPORARY, Problem
from tests.unit.launch.conftest import NEW_ASCEND, build_config, build_facts, on_npu

ENVIRON = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(own_paths())}


def _asked(program: str, timeout_s: float = 60) -> Asked:
    return ask([sys.executable, "-c", program], timeout_s, {})


@pytest.mark.parametrize(
    ("program", "error", "may_pass"),
    [
        ("print('yes')", "", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS", True),
        ("import os, signal; os.kill(os.getpid(), 40)", "signal 40", True),
        ("raise OSError('first\\nlast line')", "last line", False),
        ("raise SystemExit(3)", "exit status 3", False),
        ("import sys; sys.stderr.buffer.write(b'\\xff broken'); sys.exit(1)", "broken", False),
    ],
)
def test_how_it_ended(program: str, error: str, may_pass: bool):
    found = _asked(program)
    assert found.may_pass is may_pass
    assert error in found.error
    assert bool(found.error) is bool(error)
    assert program not in found.error
    assert found.output == ("" if error else "yes\n")


def test_no_answer_in_time_may_pass_and_names_no_command():
    assert _asked("while True: pass  # secret program", 0.2) == Asked(error="no answer within 0.2 s", may_pass=True)


def test_what_cannot_be_started(tmp_path: Path):
    file = tmp_path / "python"
    assert ask([str(file)], 1, {}) == Asked(error="No such file or directory")
    file.write_text("")
    assert ask([str(file)], 1, {}) == Asked(error="Permission denied")


@pytest.mark.parametrize(("number", "may_pass"), [(errno.ENOMEM, True), (errno.EAGAIN, True), (errno.ENOEXEC, False)])
def test_a_full_node_may_pass(monkeypatch: pytest.MonkeyPatch, number: int, may_pass: bool):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "run", fail)  # as the kernel answers where nothing can be forked
    assert ask(["x"], 1, {}) == Asked(error=os.strerror(number), may_pass=may_pass)


def _told(**facts: Any) -> tuple[Problem, int]:
    found = plan(build_config(), build_facts(**facts))
    assert isinstance(found, Refused)
    (problem,) = found.problems
    return problem, exit_code_of(found.problems)


def test_a_cold_node_ends_with_75_and_says_no_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "_PROBE_TIMEOUT_S", 0.0005)  # no interpreter starts within
    installation = observe(build_config(), ENVIRON).installation
    problem, code = _told(installation=installation)
    assert code == EXIT_TEMPORARY
    assert "no answer within" in problem.cause
    assert "tool_parsers" not in problem.cause  # a word of the probe's text
    assert len(problem.cause) < 200
    # /dev/shm as Kubernetes makes it: too small for some engines, and nobody knows yet which one this is.
    small = Memory(shared_total=64 * MIB, shared_free=64 * MIB)
    assert _told(installation=installation, memory=small) == (problem, code)


def test_an_interpreter_that_answers_something_else_ends_with_78(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    environ = ENVIRON | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRON['PYTHONPATH']}"}
    problem, code = _told(installation=observe(build_config(), environ).installation)
    assert code == EXIT_CONFIGURATION
    assert "printed something else" in problem.cause


def test_an_import_that_took_too_long_ends_with_75():
    late = on_npu(NEW_ASCEND, "0.27.1", flash_attention_error="no answer within 300 s", flash_attention_may_pass=True)
    problem, code = _told(installation=late)
    assert code == EXIT_TEMPORARY
    assert "flash_attn_npu_v3" in problem.cause
    assert "install" not in problem.remedy
