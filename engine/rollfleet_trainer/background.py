"""Threads beside the trainer's own: an event loop, so that Leases are renewed whatever it does, and one that sends."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from rollfleet_trainer.errors import NotPossible

P = ParamSpec("P")
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


class Worker(Executor):
    """Runs calls one after the other. A daemon: a process that ends does not wait for it, as it does for a pool's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """In its turn. Raises RuntimeError after `shutdown`."""
        if os.getpid() != self._pid:
            self._begin()  # a child has none of its parent's threads, and perhaps a lock that one of them held
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._ended:
                raise RuntimeError("what sends was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """After what was given so far."""
        if os.getpid() != self._pid:
            self._begin()
        with self._lock:
            self._ended = True
            self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
