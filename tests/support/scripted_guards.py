"""Guards that answer what a test tells them to, and followers of them."""

import asyncio
from datetime import UTC, datetime

from rollfleet_operator.clients.follower import Follower
from rollfleet_operator.clients.guards import Endpoint
from rollfleet_operator.core.observed import GuardView
from rollfleet_protocol.commands import Arm, Command
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.state import EngineState

FLEET = FleetIdentity(namespace="rl", name="qwen", uid="f-1")
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
Answer = EngineState | Exception


class ScriptedGuards:
    """Answers polls from a queue, and commands from another."""

    def __init__(self) -> None:
        self.polls: asyncio.Queue[Answer] = asyncio.Queue()
        self.answers: asyncio.Queue[Answer] = asyncio.Queue()
        self.asked: list[int | None] = []
        self.commands: list[Command] = []
        self.looks = 0
        self.canaries = 0
        self.unguarded: Exception | None = None

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        self.asked.append(after)
        return given(await self.polls.get())

    async def canary(self, endpoint: Endpoint) -> None:
        self.canaries += 1
        if self.unguarded:
            raise self.unguarded

    async def look(self, endpoint: Endpoint) -> EngineState:
        self.looks += 1
        return given(await self.polls.get())

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        self.commands.append(command)
        return given(await self.answers.get())


def given(answer: Answer) -> EngineState:
    if isinstance(answer, Exception):
        raise answer
    return answer


class Watched:
    """A follower and the news it made."""

    def __init__(self, unguarded: Exception | None = None) -> None:
        self.guards = ScriptedGuards()
        self.guards.unguarded = unguarded
        self.news = 0
        endpoint = Endpoint(FLEET, "qwen-0-0-abcde", "p-1", "198.18.64.7")
        self.follower = Follower(endpoint, self.guards, self._on_change, lambda: NOW)
        self.running = asyncio.create_task(self.follower.run())

    def _on_change(self) -> None:
        self.news += 1

    @property
    def view(self) -> GuardView:
        return self.follower.view

    async def hear(self, answer: Answer) -> None:
        self.guards.polls.put_nowait(answer)
        await settle()

    async def command(self, command: Command, answer: Answer) -> str:
        self.guards.answers.put_nowait(answer)
        return await self.follower.give(command)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def arm(epoch: int = 1, incarnation: str = "i-1") -> Arm:
    return Arm(incarnation=incarnation, epoch=epoch)
