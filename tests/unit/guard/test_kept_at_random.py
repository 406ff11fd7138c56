"""Requests and updates at random: whatever is kept, nobody hears of weights that were not opened, and nobody hangs.

Each seed is one schedule; a failing one names it.
"""

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollfleet_engine.guard.service import RejectedError
from rollfleet_engine.guard.turnstile import current_passage
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.refusals import SPANS_HEADER
from rollfleet_protocol.state import FailureReason, Gate, Transferred, WeightsState
from tests.support.guards import Guarded
from tests.support.memory_engine import MemoryEngine, engine_error

pytestmark = pytest.mark.looptime
GROUPS = 4
SEEDS = 5  # of each group
STEPS = 12
_SPANS = SPANS_HEADER.lower().encode()


@dataclass
class Session:
    """One generation: under which weights each token came."""

    tokens: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class TokenEngine(MemoryEngine):
    """Generates a token per step and request while its scheduler runs."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Session] = {}

    def step(self) -> None:
        """A token for everybody."""
        if not self.paused:
            for session in self.sessions.values():
                if not session.ended.is_set():
                    session.tokens.append(self.weights)

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Aborting ends everybody."""
        await super().pause(mode, deadline_s)
        if mode is PauseMode.ABORT:
            await self.abort_all(deadline_s)

    async def abort_all(self, deadline_s: float) -> None:
        await self.abort(tuple(self.sessions), deadline_s)

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        for name in requests:
            if name in self.sessions:
                self.sessions[name].ended.set()

    def tokens(self) -> dict[str, int]:
        return {name: len(session.tokens) for name, session in self.sessions.items() if not session.ended.is_set()}

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """A failure that touched leaves garbage."""
        failure = self.failures.get("apply")
        if getattr(failure, "touched", False):
            self.weights = "garbage"
        return await super().apply(staged, epoch, version, deadline_s)


class Client:
    """A request, what came of it, and what had been opened when it came."""

    def __init__(self, run: "Run", *, pinned: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self._run = run
        headers = [(b"x-weight-version-required", str(run.served).encode())] if pinned else []
        self._scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "root_path": ""}
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self._run.guarded.serving(self._scope, receive, self._send)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and self.status == 200:
            self.judge(json.loads(message["body"]))

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def spans(self) -> int:
        """How many versions it says that it spans, beyond one."""
        headers = dict(self.sent[0]["headers"]) if self.sent else {}
        return max(0, len(json.loads(headers.get(_SPANS, b"[]"))) - 1)

    def judge(self, tokens: list[str]) -> None:
        """Every token is of a version that was opened, and of the one that the answer names for its place."""
        assert set(tokens) <= self._run.opened, f"{tokens}, opened were {self._run.opened}"
        headers = dict(self.sent[0]["headers"])
        version = int(headers[b"x-weight-version"])
        spans = json.loads(headers.get(SPANS_HEADER.lower().encode(), b"[]")) or [
            {"version": version, "fromToken": [0]}
        ]
        for place, token in enumerate(tokens):
            told = [span["version"] for span in spans if span["fromToken"][0] <= place][-1]
            assert token == f"step-{told}", f"token {place} of {tokens}: {spans}"
        assert spans[0]["version"] == version
        if self._scope["headers"]:
            assert len(spans) == 1


class Run:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.guarded = Guarded(engine=TokenEngine())
        self.engine: TokenEngine = self.guarded.engine  # type: ignore[assignment]
        self.guarded.serving._app = self._app
        self.clients: list[Client] = []
        self.opened: set[str] = set()
        self.served = 0
        self.epoch, self.version = 1, 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        passage = current_passage.get()
        assert passage is not None
        await asyncio.sleep(self.random.choice([0, 0, 0.02]))  # on its way to the engine
        name = f"request-{len(self.engine.sessions)}"
        passage.requests.append(name)
        session = self.engine.sessions[name] = Session()
        await session.ended.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(session.tokens).encode()})

    async def begin(self) -> None:
        await self.guarded.serve_initial()
        await self.update(PauseMode.ABORT)

    async def close(self, mode: PauseMode) -> None:
        self.epoch += 1
        self.version += 1
        await self.guarded.prepare(self.epoch, self.version)
        await self.guarded.close(self.epoch, self.version, mode=mode, drain_timeout_seconds=1, keep_seconds=300)

    async def change(self) -> None:
        await self.guarded.arm(self.epoch)
        await self.guarded.transfer(self.epoch, self.version)

    async def open(self) -> None:
        self.opened.add(f"step-{self.version}")
        await self.guarded.open(self.epoch, self.version)
        self.served = self.version

    async def update(self, mode: PauseMode) -> None:
        await self.close(mode)
        await self.change()
        await self.guarded.verify(self.epoch, self.version)
        await self.open()

    async def act(self) -> None:
        """An update with clients in between, or something out of its order."""
        self.engine.failures.clear()
        if self.random.random() < 0.7:
            await self._update_among_clients()
            return
        match self.random.choice(["close", "change", "verify", "cancel"]):
            case "close":
                await self.close(self._mode())
            case "change":
                await self.change()
            case "verify":
                await self.guarded.verify(self.epoch, self.version)
            case _:
                await self.guarded.cancel(self.epoch)

    async def _update_among_clients(self) -> None:
        await self._clients()
        await self.close(self._mode())
        await self._clients()
        if self.random.random() < 0.15:
            await self.guarded.cancel(self.epoch)
            return
        self._perhaps_fail("apply")
        await self.change()
        await self._clients()
        self._perhaps_fail("probe")
        await self.guarded.verify(self.epoch, self.version)
        await self._clients()
        state = self.guarded.state
        if state.weights.version == self.version and state.weights.state is WeightsState.VERIFIED:
            await self.open()

    def _mode(self) -> PauseMode:
        return self.random.choice([PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP, PauseMode.KEEP, PauseMode.KEEP])

    async def _clients(self) -> None:
        for _ in range(self.random.randrange(8)):
            sessions = [each for each in self.engine.sessions.values() if not each.ended.is_set()]
            match self.random.choice(["ask"] * 3 + ["step"] * 3 + ["end"] * 2 + ["leave"]):
                case "ask":
                    self.clients.append(Client(self, pinned=self.random.random() < 0.2))
                case "step":
                    self.engine.step()
                case "end" if sessions and not self.engine.paused:
                    self.random.choice(sessions).ended.set()
                case "leave" if self.clients and self.random.random() < 0.3:
                    self.random.choice(self.clients).task.cancel()
            await asyncio.sleep(self.random.choice([0, 0, 0.01, 0.5]))

    def _perhaps_fail(self, what: str) -> None:
        if self.random.random() < 0.12:
            touched = self.random.random() < 0.5
            self.engine.failures[what] = engine_error(FailureReason.TRANSFER_FAILED, touched=touched)

    async def finish(self) -> None:
        """A last update that goes well; then everybody has an end."""
        self.engine.failures.clear()
        await self.update(PauseMode.ABORT)
        self.engine.step()
        for session in self.engine.sessions.values():
            session.ended.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*(client.task for client in self.clients), return_exceptions=True)


async def run_schedule(seed: int) -> Run:
    run = Run(seed)
    await run.begin()
    for _ in range(STEPS):
        with suppress(RejectedError):  # out of order, as drawn
            await run.act()
    await run.finish()
    state = run.guarded.state
    assert (state.in_flight, state.kept, state.gate) == (0, 0, Gate.OPEN)
    for client in run.clients:
        error = None if client.task.cancelled() else client.task.exception()
        assert error is None, error
    await run.guarded.service.stop()
    return run


@pytest.mark.parametrize("group", range(GROUPS))
async def test_schedules(group: int) -> None:
    spans = whole = 0
    for seed in range(group * SEEDS, (group + 1) * SEEDS):
        try:
            run = await run_schedule(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        spans += sum(client.spans for client in run.clients)
        whole += sum(client.status == 200 for client in run.clients if client.sent)
    # Else the schedules would prove nothing.
    assert spans >= 1
    assert whole >= 10
