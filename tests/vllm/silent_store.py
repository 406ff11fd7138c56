"""A trainer's store that says nothing: `python -m tests.vllm.silent_store SCENE`, with torch.

Prints the seconds that the worker took to give up, and what it says.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.gloo import GlooBackend
from rollfleet_engine.weights.backends.hanging import MOST_HANGING
from rollfleet_engine.weights.errors import PushError

HOST = "127.0.0.1"
DEADLINE_S = 3.0
SEAT = Seat(0, 1)
UPDATE = {"names": ["a"], "dtype_names": ["uint8"], "shapes": [[1 << 20]]}


def info(port: int) -> dict[str, Any]:
    """Init's words."""
    return {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2}


def listener() -> socket.socket:
    """Its backlog accepts for it."""
    return socket.create_server((HOST, 0))


class Way:
    """Leads to a port, until it is blocked: then connections stay, and nothing passes."""

    def __init__(self, port: int) -> None:
        self.blocked = False
        self._to = port
        self._listener = listener()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near = self._listener.accept()[0]
            far = socket.create_connection((HOST, self._to))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        while data := one.recv(65536):
            if not self.blocked:
                other.sendall(data)


def tell(call: Callable[[], object]) -> None:
    """How long it took to fail, and how."""
    began = time.monotonic()
    try:
        call()
    except PushError as error:
        print(f"{time.monotonic() - began:.2f} {error.message}")
    else:
        sys.exit("it did not fail")


def at_init() -> None:
    """It accepts, and stays silent."""
    with listener() as silent:
        tell(lambda: GlooBackend().init(info(silent.getsockname()[1]), SEAT, DEADLINE_S))


def again_and_again() -> None:
    """A trainer that lets every init hang."""
    with listener() as silent:
        for _ in range(MOST_HANGING + 1):
            tell(lambda: GlooBackend().init(info(silent.getsockname()[1]), SEAT, 0.2))


def after_joining() -> None:
    """It stops answering in mid-update."""
    within = timedelta(seconds=20)
    store = dist.TCPStore(HOST, 0, 2, True, within, wait_for_workers=False)
    way, backend, groups = Way(store.port), GlooBackend(), []
    trainer = threading.Thread(target=lambda: groups.append(dist.ProcessGroupGloo(store, 0, 2, within)), daemon=True)
    trainer.start()
    backend.init(info(way.port), SEAT, 20)
    trainer.join()
    way.blocked = True
    tell(lambda: list(backend.receive(UPDATE, DEADLINE_S)))


if __name__ == "__main__":
    {"at-init": at_init, "again": again_and_again, "after-joining": after_joining}[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # a thread in torch that wakes up while Python ends would abort the process
