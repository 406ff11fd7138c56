"""The first causal error of a log, and the termination message."""

import json

import pytest

from rollfleet_engine.launch.causes import CauseFinder
from rollfleet_engine.launch.termination import encode, exit_code_of, write
from rollfleet_protocol.termination import Problem, TerminationMessage, summary

_VLLM_FAILURE = """\
(APIServer pid=7) INFO 11-29 16:56:18 [api_server.py:12] vLLM API server version 0.27.1
(EngineCore pid=9) ERROR 11-29 16:56:20 [core.py:901] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-29 16:56:20 [core.py:901] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-29 16:56:20 [core.py:901]   File "core.py", line 891, in run_engine_core
(EngineCore pid=9) ERROR 11-29 16:56:20 [core.py:901]     raise ValueError(
(EngineCore pid=9) ERROR 11-29 16:56:20 [core.py:901] ValueError: No available memory for the cache blocks.
(EngineCore pid=9) Process EngineCore:
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "runpy.py", line 198, in _run_module_as_main
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""


def _fed(text: str, now_s: float = 0.0) -> CauseFinder:
    finder = CauseFinder()
    for line in text.splitlines():
        finder.feed(line, now_s)
    return finder


def test_root_cause_before_its_consequence():
    assert _fed(_VLLM_FAILURE).cause(1.0) == "ValueError: No available memory for the cache blocks."


def test_first_exception_of_a_chain():
    text = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'lm_head.weight'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
RuntimeError: load failed
"""
    assert _fed(text).cause(1.0) == "KeyError: 'lm_head.weight'"


def test_usage_error_of_the_parser():
    text = "usage: api_server.py [-h]\napi_server.py: error: argument --seed: invalid int value: 'x'"
    assert _fed(text).cause(1.0) == "argument --seed: invalid int value: 'x'"


def test_an_error_line_counts_where_there_is_no_traceback():
    assert _fed("ERROR 11-29 16:56:20 [core.py:901] device lost").cause(1.0) == "device lost"


def test_an_old_error_is_not_the_cause_of_todays_end():
    finder = _fed("Traceback (most recent call last):\n  x\nValueError: harmless", now_s=0.0)
    finder.feed("Traceback (most recent call last):", 900.0)
    finder.feed("OSError: disk", 900.0)
    assert finder.cause(901.0) == "OSError: disk"
    assert _fed("ERROR 11-29 16:56:20 [a.py:1] harmless").cause(1000.0) == ""


def test_tracebacks_of_two_processes_may_interleave():
    finder = CauseFinder()
    for line in (
        "(A pid=1) Traceback (most recent call last):",
        "(B pid=2) Traceback (most recent call last):",
        "(B pid=2) IndexError: second",
        "(A pid=1)   frame",
        "(A pid=1) ValueError: first to start, last to end",
    ):
        finder.feed(line, 0.0)
    assert finder.cause(0.0) == "IndexError: second"


def test_memory_is_bounded():
    finder = CauseFinder()
    finder.feed("Traceback (most recent call last):", 0.0)
    finder.feed("ValueError: the first", 0.0)
    for number in range(10_000):
        finder.feed(f"ERROR 11-29 16:56:20 [a.py:1] {number} " + "x" * 5000, 1.0)
    assert finder.cause(1.0) == "ValueError: the first"
    assert sum(map(len, finder.tail())) < 40_000


@pytest.mark.parametrize("text", ["é" * 5000, "x" * 5000, '"' * 5000])
def test_termination_message_fits_the_kubelet(text):
    message = TerminationMessage(
        exit_code=78,
        error=text,
        problems=tuple(Problem(cause=text, remedy=text) for _ in range(40)),
        log_tail=(text,) * 20,
    )
    encoded = encode(message)
    assert len(encoded) <= 4096
    shown = TerminationMessage.model_validate(json.loads(encoded))
    assert shown.exit_code == 78
    assert shown.error.startswith(text[:40])
    assert shown.problems


def test_short_messages_are_kept_whole():
    message = TerminationMessage(exit_code=1, error="ValueError: x", log_tail=("a", "b"))
    assert TerminationMessage.model_validate_json(encode(message)) == message


def test_exit_code_asks_for_a_retry_only_where_it_may_cure():
    waiting = Problem(cause="a", remedy="b", retry_may_cure=True)
    wrong = Problem(cause="a", remedy="b")
    assert exit_code_of((waiting,)) == 75
    assert exit_code_of((waiting, wrong)) == 78


def test_summary_reads_any_message():
    assert summary("OOMKilled \n") == "OOMKilled"
    assert summary(encode(TerminationMessage(exit_code=1, error="ValueError: x")).decode()) == "ValueError: x"
    problem = Problem(cause="model path /m does not exist", remedy="correct it")
    assert "/m does not exist: correct it" in summary(
        encode(TerminationMessage(exit_code=78, problems=(problem,))).decode()
    )
    assert summary(encode(TerminationMessage(exit_code=3)).decode()) == "exit code 3"


def test_unwritable_log_is_told(tmp_path):
    assert "none/x" in write(TerminationMessage(exit_code=1), tmp_path / "none" / "x")
    assert write(TerminationMessage(exit_code=1), tmp_path / "x") == ""
