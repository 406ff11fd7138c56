"""The core as a process of its own, so that it can be killed as vLLM's can. The state is the server's."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

NAME = b"VLLM::EngineCore"  # vLLM's own name for it; the kernel keeps 15 bytes
_PR_SET_NAME = 15  # linux/prctl.h


class CoreProcess:
    """A child that waits for our end. To be made before the event loop and any thread."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write)
            ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME, 0, 0, 0)
            os.read(read, 1)  # returns when the parent is gone, however it ended
            os._exit(0)
        os.close(read)
        self._alive = True

    def alive(self) -> bool:
        """Whether it was alive when we last heard; asks nobody."""
        return self._alive

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call back in the running event loop when it dies."""
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def died() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            os.waitpid(self.pid, 0)
            self._alive = False
            on_death()

        loop.add_reader(descriptor, died)

    def stop(self) -> None:
        """Let it end."""
        os.close(self._write)

    def end(self) -> None:
        """Let it end, and wait for that."""
        self.stop()
        with suppress(ChildProcessError):  # it was dead, and `watch` has seen to it
            os.waitpid(self.pid, 0)
