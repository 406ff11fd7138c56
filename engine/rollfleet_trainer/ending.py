"""Closes what a process leaves open when it ends, so that the next trainer need not wait for a Lease to run out.

A child of multiprocessing calls no handlers of atexit. So a thread waits for the main thread to end, and the
interpreter, in children too, waits for this thread. By then concurrent.futures takes no more work, and from Python 3.12
on no thread can be started: what is called here does without both, and has a deadline.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from rollfleet_trainer.errors import TrainerError

logger = logging.getLogger("rollfleet.trainer")
Close = Callable[[], None]


class Endings:
    """What is to be closed when the main thread has ended. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.forget_all()
        os.register_at_fork(after_in_child=self.forget_all)  # a child closes nothing of its parent's

    def forget_all(self) -> None:
        """Nothing is open here."""
        self._lock = threading.Lock()
        self._closes: list[Close] = []
        self._thread: threading.Thread | None = None

    def add(self, close: Close) -> None:
        """Call it at the end."""
        with self._lock:
            self._closes.append(close)
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait, name="rollfleet-ending", daemon=False)
                self._thread.start()

    def remove(self, close: Close) -> None:
        """It was called already."""
        with self._lock:
            if close in self._closes:
                self._closes.remove(close)

    def _wait(self) -> None:
        threading.main_thread().join()
        with self._lock:
            left = list(self._closes)
        for close in left:
            try:
                close()
            except (TrainerError, RuntimeError, OSError) as error:  # RuntimeError: a thread or process at the very end
                logger.warning("what this process leaves open was not closed: %s: %s", type(error).__name__, error)


ENDINGS = Endings()
