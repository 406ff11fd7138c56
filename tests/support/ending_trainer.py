"""A trainer that asks for a version and leaves without `close`: python -m tests.support.ending_trainer WAY KUBECONFIG.

It says "asked" once the version is offered. Nothing is sent: no torch is needed.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rollfleet_trainer import Progress, RolloutFleet, UpdateFailed
from rollfleet_trainer import fleet as module

module._device = lambda: None  # which accelerator is the caller's: that takes torch
KUBECONFIG = Path(sys.argv[2])


def made() -> RolloutFleet:
    """By the server of the test."""
    return RolloutFleet("rl/qwen", KUBECONFIG, service_account="grpo")


def say(progress: Progress) -> None:
    """The version is offered."""
    if progress.phase == "Pending":
        print("asked", flush=True)


def begin(fleet: RolloutFleet) -> None:
    """Until the operator says that it has failed: then the process goes on, and holds the Lease."""
    try:
        fleet.blocking.begin(on_progress=say).__enter__()
    except UpdateFailed:
        print("failed", flush=True)


async def begun(fleet: RolloutFleet) -> None:
    """The same by the other face."""
    try:
        await fleet.begin(on_progress=say).__aenter__()
    except UpdateFailed:
        print("failed", flush=True)


async def asynchronous() -> None:
    """All of a program."""
    await begun(made())


def blocking() -> None:
    """The same."""
    begin(made())


def leaving() -> None:
    """By SystemExit."""
    blocking()
    sys.exit(3)


def bare_loop() -> None:
    """Who interrupts this one leaves the thread that sends in the middle."""
    asyncio.new_event_loop().run_until_complete(asynchronous())


def beside() -> None:
    """In a thread of its own; the program ends as soon as the version is offered."""
    offered = threading.Event()

    def told(progress: Progress) -> None:
        say(progress)
        offered.set()

    fleet = made()

    def run() -> None:
        try:
            fleet.blocking.begin(on_progress=told).__enter__()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            print(f"{type(error).__name__}: {error}", flush=True)

    threading.Thread(target=run).start()
    assert offered.wait(30)


def in_a_child(method: str) -> None:
    """As torch.multiprocessing starts ranks."""
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=blocking)
    child.start()
    child.join()
    sys.exit(child.exitcode)


def forking() -> None:
    """A child that ends is not the trainer."""
    fleet = made()
    begin(fleet)
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    print("the child has ended", flush=True)
    sys.stdin.readline()


WAYS = {
    "async": lambda: asyncio.run(asynchronous()),
    "blocking": blocking,
    "exit": leaving,
    "loop": bare_loop,
    "beside": beside,
    "fork": lambda: in_a_child("fork"),
    "spawn": lambda: in_a_child("spawn"),
    "forking": forking,
}
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell has started the tests in its background
    WAYS[sys.argv[1]]()
