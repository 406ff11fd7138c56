"""An event loop in a thread of its own, so that Leases are renewed whatever the trainer's own thread does."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollfleet_trainer.errors import NotPossible

T = TypeVar("T")
CLOSE_S = 5.0


class Background:
    """Runs coroutines for callers of any thread, also of one that runs a loop itself. A daemon: it keeps no process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._closed = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """For callbacks from other threads."""
        return self._loop

    @property
    def is_closed(self) -> bool:
        """Nothing runs here any more."""
        return self._closed

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """To its end. Where the caller is interrupted the coroutine is cancelled."""
        if os.getpid() != self._pid:
            call.close()
            raise NotPossible("this object was made before the process forked: make a new one in the child")
        with self._ending:  # what is begun before the end is cancelled by it
            if self._closed:
                call.close()
                raise NotPossible("this object was closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread. What still runs in the loop is cancelled."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ending = asyncio.gather(*tasks, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())
