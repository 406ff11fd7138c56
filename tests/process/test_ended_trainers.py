"""A trainer's process that ends without `close`: its Lease is given back, and nothing is complained of."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollfleet_protocol.senders import MESSAGE_ANNOTATION, OFFERS_ANNOTATION
from tests.support.http_api import HttpApi, served
from tests.support.memory_api import POLICY_PATH, conditions, fleet
from tests.support.pages import ROOT

END_S = 60.0  # a process that has nothing to do any more, on a busy machine
STEPS = {"Accepted": True, "Quiesced": False, "Transferred": False, "Verified": False}
Start = Callable[[str], "Trainer"]


class Trainer:
    """One process."""

    def __init__(self, way: str, api: HttpApi, folder: Path) -> None:
        self.api = api
        path = os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ending_trainer", way, str(api.kubeconfig(folder / "kubeconfig"))],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def fail(self) -> None:
        """The operator ends the update; the process goes on and is still the sender."""
        assert self.says() == "asked"
        assert self.api.holder.startswith("grpo/")
        holds = conditions(**STEPS, Active="BrokenOff: of the test")
        self.api.api.put_status(POLICY_PATH, phase="Failed", conditions=holds)
        assert self.says() == "failed"

    def interrupt(self) -> None:
        """As at a terminal, while it waits for the engines."""
        assert self.says() == "asked"
        assert self.api.annotations[OFFERS_ANNOTATION] == "uid-qwen-policy/1"
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> tuple[int, str]:
        """Exit status, and what it complained of."""
        _, errors = self.process.communicate(timeout=END_S)
        assert self.api.holder == "", f"the Lease is held: {errors}"
        assert "Exception ignored" not in errors, errors
        return self.process.returncode, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Trainer] = []
    with served(fleet()) as api:

        def one(way: str) -> Trainer:
            started.append(Trainer(way, api, tmp_path))
            return started[-1]

        yield one
        for each in started:
            each.process.kill()
            each.process.communicate()


@pytest.mark.parametrize(("way", "code"), [("async", 0), ("blocking", 0), ("exit", 3), ("fork", 0), ("spawn", 0)])
def test_a_process_that_ends_gives_its_lease_back(start: Start, way: str, code: int) -> None:
    trainer = start(way)
    trainer.fail()
    assert trainer.ended() == (code, "")


@pytest.mark.parametrize(
    ("way", "why"), [("async", "SenderLost: the caller of update was cancelled"), ("blocking", "KeyboardInterrupt")]
)
def test_who_is_interrupted_gives_it_back_and_says_why(start: Start, way: str, why: str) -> None:
    trainer = start(way)
    trainer.interrupt()
    code, errors = trainer.ended()
    # Not the last line always: who is interrupted between making a coroutine and running it is told that it never ran.
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in errors.splitlines()
    assert trainer.api.annotations[MESSAGE_ANNOTATION] == why
    assert OFFERS_ANNOTATION not in trainer.api.annotations


def test_an_update_that_nobody_waits_for_any_more_ends_with_the_process(start: Start) -> None:
    trainer = start("loop")
    trainer.interrupt()
    code, _ = trainer.ended()
    assert code == -signal.SIGINT
    assert "closed" in trainer.api.annotations[MESSAGE_ANNOTATION]


def test_an_update_in_another_thread_ends_with_the_main_thread(start: Start) -> None:
    trainer = start("beside")
    assert trainer.says() == "asked"
    assert trainer.says() == "NotPossible: this object was closed"
    assert trainer.ended() == (0, "")


def test_a_child_of_the_trainer_that_ends_is_not_the_trainer(start: Start) -> None:
    trainer = start("forking")
    trainer.fail()
    assert trainer.says() == "the child has ended"
    assert trainer.api.holder.startswith("grpo/")
    assert trainer.ended() == (0, "")
