"""Calls that end in time, whatever the other side does.

httpx bounds each read and each write: one byte a minute is no timeout to it. So its sockets are ours, and know when the
call ends that is running in their thread. And they can be ended from another thread.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet


class _Call(threading.local):
    ends_s = math.inf  # by the monotonic clock


_call = _Call()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is read and written inside, by this thread through a socket of ours, ends by then: TimeoutError."""
    before, _call.ends_s = _call.ends_s, time.monotonic() + seconds
    try:
        yield
    finally:
        _call.ends_s = before


class _Socket(ssl.SSLSocket):
    """httpx sets the timeout of each read and write just before it: nobody gets more than what is left of the call."""

    kept_by: Sockets

    def settimeout(self, value: float | None) -> None:
        left_s = _call.ends_s - time.monotonic()
        if not self.kept_by.keep(self) or left_s <= 0:
            self.close()  # nobody else does so where it is only being made
            raise TimeoutError("the call has taken too long") if left_s <= 0 else OSError("the call was ended")
        if left_s < math.inf:
            value = left_s if value is None else min(value, left_s)
        super().settimeout(value)


class Sockets:
    """Those of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakSet[ssl.SSLSocket] = WeakSet()
        self._is_cut = False

    def context(self, ca: str) -> ssl.SSLContext:
        """That trusts this CA alone (PEM), and makes sockets of ours."""
        context = ssl.create_default_context(cadata=ca)
        context.sslsocket_class = type("_Kept", (_Socket,), {"kept_by": self})
        return context

    def keep(self, one: ssl.SSLSocket) -> bool:
        """It is about to be used. False where all were cut."""
        with self._lock:
            self._open.add(one)
            return not self._is_cut

    def cut(self) -> None:
        """Whoever reads or writes by one of them gets an error at once, and whoever wants to later."""
        with self._lock:
            self._is_cut = True
            found = list(self._open)
        for one in found:
            with suppress(OSError):  # it is closed already
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # the TLS below it is its reader's own
