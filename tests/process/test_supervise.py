"""The supervisor with real child processes, itself a process of its own as in a container."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfleet_engine.launch.supervise import read_lines

# Stands in for __main__, whose plan comes from a real configuration: argv is the engine, the rest is the real thing.
_LAUNCHER = """
import json, os, sys
from pathlib import Path
from rollfleet_engine.launch.__main__ import report_outcome
from rollfleet_engine.launch.causes import CauseFinder
from rollfleet_engine.launch.facts import EngineKind
from rollfleet_engine.launch.plan import Plan
from rollfleet_engine.launch.supervise import Supervisor
grace_s, log, *argv = sys.argv[1:]
finder = CauseFinder()
plan = Plan(argv=tuple(argv), env={"ADDED": "1"}, unset=("TAKEN_AWAY",), kind=EngineKind.VLLM, release="0.27.1")
environ = dict(os.environ) | {"TAKEN_AWAY": "x", "ADDED": "0", "KEPT": "2"}
sys.exit(report_outcome(Supervisor(plan, environ, finder, float(grace_s)).run(), finder, Path(log)))
"""


class Launched:
    """A supervisor with the engine that it looks after."""

    def __init__(self, engine: str, folder: Path, grace_s: float) -> None:
        self.log = folder / "termination-log"
        self.output = folder / "output"
        command = [sys.executable, "-c", _LAUNCHER, str(grace_s), str(self.log), sys.executable, "-uc", engine]
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)

    def until(self, text: str) -> str:
        self.wait_for(lambda: text in self.output.read_text(errors="replace"))
        return self.output.read_text(errors="replace")

    def wait_for(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not claim():
            assert time.monotonic() < deadline, self.output.read_text(errors="replace")
            time.sleep(0.02)

    def ended(self) -> int:
        return self.process.wait(20)

    def message(self) -> dict:
        return json.loads(self.log.read_text())


@pytest.fixture
def launched(tmp_path: Path):
    running: list[Launched] = []

    def start(engine: str, grace_s: float = 20.0) -> Launched:
        running.append(Launched(engine, tmp_path, grace_s))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait(20)


def test_exit_code_and_first_cause_are_passed_on(launched):
    one = launched("print('loading'); raise ValueError('no memory')")
    assert one.ended() == 1
    assert one.message()["error"] == "ValueError: no memory"
    assert one.message()["exitCode"] == 1
    # Standard output and standard error are two pipes: their order among each other is not kept.
    assert any("loading" in line for line in one.message()["logTail"])
    assert "ValueError: no memory" in one.output.read_text()


def test_a_refused_command_line_is_no_case_for_a_retry(launched):
    one = launched("import argparse; argparse.ArgumentParser().error('unrecognized arguments: --x')")
    assert one.ended() == 78
    assert one.message()["error"] == "unrecognized arguments: --x"


def test_an_engine_killed_by_a_signal(launched):
    one = launched("import os; os.kill(os.getpid(), 9)")
    assert one.ended() == 128 + 9
    assert one.message()["error"] == "the engine was ended by SIGKILL and logged no error"


def test_sigterm_is_forwarded_and_a_clean_stop_is_no_failure(launched):
    one = launched(
        "import signal,sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('draining'), sys.exit(0)))\n"
        "print('ready')\nwhile True: signal.sigtimedwait([], 0.05)"
    )
    one.until("ready")
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 0
    assert "draining" in one.output.read_text()
    assert not one.log.exists()


def test_other_signals_are_forwarded(launched):
    one = launched(
        "import signal,sys\nsignal.signal(signal.SIGUSR1, lambda *_: (print('usr1'), sys.exit(0)))\n"
        "print('ready')\nwhile True: signal.sigtimedwait([], 0.05)"
    )
    one.until("ready")
    one.process.send_signal(signal.SIGUSR1)
    assert one.ended() == 1  # it ended without being asked to stop
    assert "usr1" in one.output.read_text()


def test_a_supervisor_that_was_stopped_for_a_while_goes_on(launched):
    """As when somebody freezes the container; a second is what it waits for at most between two looks."""
    one = launched(
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('usr1'))\n"
        "print('ready')\nwhile True: signal.pause()"
    )
    one.until("ready")
    one.process.send_signal(signal.SIGSTOP)
    stopped = Path(f"/proc/{one.process.pid}/stat")
    one.wait_for(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T")
    until = time.monotonic() + 1.2
    one.wait_for(lambda: time.monotonic() > until)
    one.process.send_signal(signal.SIGCONT)
    one.process.send_signal(signal.SIGUSR1)
    one.until("usr1")
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 128 + signal.SIGTERM
    assert "Traceback" not in one.output.read_text()


def test_what_does_not_end_in_its_grace_is_killed_with_its_workers(launched):
    one = launched(
        "import os,signal,subprocess,sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('worker', child.pid, flush=True)\n"
        "signal.pause()",
        grace_s=0.3,
    )
    worker = int(one.until("worker").split("worker ")[1].split()[0])
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 128 + 9
    assert '"killedAfterGrace": true' in one.output.read_text()
    assert not Path(f"/proc/{worker}").exists()


def test_workers_do_not_outlive_an_engine_that_crashed(launched):
    one = launched(
        "import subprocess,sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('worker', child.pid, flush=True)\n"
        "raise SystemExit(3)"
    )
    assert one.ended() == 3
    worker = int(one.output.read_text().split("worker ")[1].split()[0])
    one.wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_orphans_are_reaped(launched):
    one = launched(
        "import os,signal\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); print('orphan', os.getpid(), flush=True); os._exit(0)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "signal.pause()"
    )
    orphan = int(one.until("orphan").split("orphan ")[1].split()[0])
    one.wait_for(lambda: not Path(f"/proc/{orphan}").exists())
    one.process.send_signal(signal.SIGTERM)
    assert one.ended() == 128 + 15


def test_the_engine_gets_the_plans_environment_and_no_blocked_signals(launched):
    shown = "[os.environ.get(name) for name in ('ADDED', 'KEPT', 'TAKEN_AWAY')]"
    one = launched(f"import os,signal; print({shown}, signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    assert one.ended() == 1
    assert "['1', '2', None] set()" in one.output.read_text()


def test_an_engine_outlives_a_reader_of_its_log_that_went_away(tmp_path: Path):
    engine = "import sys,time\nfor i in range(20000): print('x' * 100)\nopen(sys.argv[1], 'w').write('done')"
    done = tmp_path / "done"
    command = [sys.executable, "-c", _LAUNCHER, "20", str(tmp_path / "log"), sys.executable, "-uc", engine, str(done)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pipesize=4096)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    process.wait(20)
    assert done.read_text() == "done"


def test_long_lines_come_in_pieces_of_bounded_size():
    chunks = iter([b"a\nb", b"c\n", b"x" * 100_000, b"y" * 100_000, b"\nend", b""])
    lines = list(read_lines(lambda: next(chunks)))
    assert lines[:2] == [b"a\n", b"bc\n"]
    assert b"".join(lines).endswith(b"y\nend")
    assert max(map(len, lines)) <= 200_001
    assert sum(map(len, lines)) == 4 + 1 + 200_000 + 4


def test_an_interpreter_that_is_not_there(tmp_path: Path):
    command = [sys.executable, "-c", _LAUNCHER, "20", str(tmp_path / "log"), "/none/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=dict(os.environ))
    assert done.returncode != 0
    assert "/none/python" in done.stderr
