"""The engine behind the proxy as a child: all of it is killed, stopped and started anew."""

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollfleet_engine.faults.child import Child, members
from rollfleet_engine.faults.injector import LOGGER
from rollfleet_engine.guard.log import GuardLog
from tests.support.guards import eventually
from tests.support.ports import free_port

# As an engine: a launcher, below it a server of many threads in a group of its own, which holds a port.
ENGINE = """
import os, signal, socket, sys, threading
port, ups = int(sys.argv[1]), sys.argv[2]
if os.fork():
    os.wait()
    sys.exit(5)
os.setpgid(0, 0)
listener = socket.create_server(("127.0.0.1", port))
ballast = b"x" * (400 << 20)  # what is given back before files are closed
for _ in range(100):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
with open(ups, "a") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""


class Engines:
    """One child after the other."""

    def __init__(self, folder: Path) -> None:
        self.ups = folder / "ups"
        self.ups.touch()
        command = (sys.executable, "-c", ENGINE, str(free_port()), str(self.ups))
        self.child = Child(command, os.environ, GuardLog({}, io.StringIO(), LOGGER))

    def pids(self) -> list[int]:
        """Of the servers that came up."""
        return [int(line) for line in self.ups.read_text().split()]

    async def up(self, count: int) -> int:
        """Once so many came up; the newest one's pid."""
        await eventually(lambda: len(self.pids()) == count or self.child.ended.done(), 20)
        assert not self.child.ended.done(), "it ended by itself: its port was taken"
        return self.pids()[-1]


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    made = Engines(tmp_path)
    await made.child.start()
    yield made
    await made.child.die()


def states(session: int) -> set[str]:
    """Of all its processes, as /proc says them."""
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in members(session)}


async def test_a_restarted_engine_finds_its_ports_free(engines: Engines) -> None:
    for count in range(1, 5):
        await engines.up(count)
        await engines.child.restart()
    await engines.up(5)


async def test_death_takes_every_process(engines: Engines) -> None:
    pid = await engines.up(1)
    session = os.getsid(pid)
    assert len(members(session)) == 2
    await engines.child.die()
    assert members(session) == []
    await asyncio.sleep(0)
    assert not engines.child.ended.done()  # it was our doing


async def test_an_engine_that_hangs_goes_on_after_its_time(engines: Engines) -> None:
    session = os.getsid(await engines.up(1))
    await engines.child.hang(3)
    await eventually(lambda: states(session) == {"T"})
    await eventually(lambda: states(session) == {"S"})


async def test_its_own_end_is_told(engines: Engines) -> None:
    os.kill(await engines.up(1), 9)
    async with asyncio.timeout(20):
        assert await engines.child.ended == 5
