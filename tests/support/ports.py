"""Ports for servers under test, none twice.

They are not the kernel's own choice: what a test learns of a free port is used a moment or half a minute later, and
meanwhile any other process may be given the same one. These lie below what Linux gives by itself, below Kubernetes'
NodePorts too, and each worker of a run has its own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

LOWEST, WORKERS, EACH = 20_000, 8, 1_250  # up to 30,000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_numbers = itertools.count(random.SystemRandom().randrange(EACH))


def free_port() -> int:
    """A port of the loopback that nobody listens on now, and that is given to nobody else here."""
    for number in itertools.islice(_numbers, EACH):
        port = LOWEST + _worker * EACH + number % EACH
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"none of {EACH} ports from {LOWEST + _worker * EACH} is free")


def free_ports(count: int) -> list[int]:
    """So many."""
    return [free_port() for _ in range(count)]
