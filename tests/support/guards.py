"""A guard around an engine in memory, and what else the guard's tests share."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.keys import IdentityError
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.guard.serving import Serving
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_engine.guard.waiting import WaitingRoom
from rollfleet_protocol.commands import (
    Arm,
    Cancel,
    CheckpointRoot,
    CheckpointSource,
    Close,
    Open,
    Prepare,
    Transfer,
    Verify,
)
from rollfleet_protocol.engine_config import EngineConfig, FleetIdentity, Hold, ModelConfig, OperatorIdentity
from rollfleet_protocol.state import EngineState, FailureReason, OperationStatus
from tests.support.memory_engine import MemoryApp, MemoryEngine, MemoryStager, digest_of

OPERATOR = OperatorIdentity(subject="system:serviceaccount:rollfleet:rollfleet-operator", uid="operator-uid")
FLEET = FleetIdentity(namespace="rl", name="qwen", uid="fleet-uid")
TOKENS = (1, 2, 3)
SILENCE_S = 30.0
DEADLINE_S = 20.0


def make_config(**changes: Any) -> EngineConfig:
    """An engine of the fleet rl/qwen."""
    model = ModelConfig(path="/model", served_name="policy")
    return EngineConfig(**({"fleet": FLEET, "operator": OPERATOR, "model": model} | changes))


class MemoryVerifier:
    """The token is the caller: "subject uid"."""

    async def verify(self, token: str) -> Caller:
        """As Verifier says."""
        subject, _, uid = token.partition("/")
        if not uid:
            raise IdentityError("not a token")
        return Caller(subject, uid)

    async def close(self) -> None:
        """Nothing to end."""


OPERATOR_TOKEN = f"{OPERATOR.subject}/{OPERATOR.uid}"


class Guarded:
    """A guard with an engine in memory, and short ways to drive it."""

    def __init__(
        self,
        hold: Hold | None = None,
        engine: "MemoryEngine | None" = None,
        backend: str = "gloo",
        unpickles: bool = False,
    ) -> None:
        self.engine = engine or MemoryEngine()
        self.app = MemoryApp(self.engine)
        self.stager = MemoryStager()
        self.turnstile = Turnstile()
        self.stream = io.StringIO()
        self.log = GuardLog({}, self.stream)
        self.waiting = WaitingRoom(self.turnstile, hold)
        self.service = GuardService(
            self.engine, self.stager, self.turnstile, self.log, self.waiting, backend=backend, unpickles=unpickles
        )
        self.serving = Serving(self.app, self.turnstile, self.service, self.waiting)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What was logged of this kind."""
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    @property
    def state(self) -> EngineState:
        """As told."""
        return self.service.state()

    async def ended(self) -> EngineState:
        """The state once the operation that runs has ended."""
        return await until(self.service, lambda state: state.operation is None or not _runs(state))

    async def prepare(self, epoch: int, version: int, path: str = "", digest: str | None = None) -> EngineState:
        """Stage step-<version>."""
        source = CheckpointSource(path=path or f"step-{version}")
        await self.service.command(
            Prepare(
                incarnation=self.service.incarnation,
                epoch=epoch,
                version=version,
                source=source,
                digest=digest,
                deadline_seconds=DEADLINE_S,
            )
        )
        return await self.ended()

    def close_command(self, epoch: int, version: int, deadline_s: float = DEADLINE_S, **changes: Any) -> Close:
        """Close, to go to this version."""
        return Close(
            incarnation=self.service.incarnation,
            epoch=epoch,
            version=version,
            deadline_seconds=deadline_s,
            operator_silence_seconds=SILENCE_S,
            **changes,
        )

    async def close(self, epoch: int, version: int, deadline_s: float = DEADLINE_S, **changes: Any) -> EngineState:
        """Close and wait for the end of it."""
        await self.service.command(self.close_command(epoch, version, deadline_s, **changes))
        return await self.ended()

    async def arm(self, epoch: int) -> EngineState:
        """Arm."""
        return await self.service.command(Arm(incarnation=self.service.incarnation, epoch=epoch))

    async def transfer(self, epoch: int, version: int, path: str = "", deadline_s: float = DEADLINE_S) -> EngineState:
        """Transfer what was staged."""
        digest = digest_of(path or f"step-{version}")
        await self.service.command(
            Transfer(
                incarnation=self.service.incarnation,
                epoch=epoch,
                version=version,
                digest=digest,
                deadline_seconds=deadline_s,
            )
        )
        return await self.ended()

    async def verify(self, epoch: int, version: int, digest: str | None = None) -> EngineState:
        """Verify; version 0 without a digest."""
        await self.service.command(
            Verify(
                incarnation=self.service.incarnation,
                epoch=epoch,
                version=version,
                digest=digest or (digest_of(f"step-{version}") if version else None),
                probe_tokens=TOKENS,
                deadline_seconds=DEADLINE_S,
            )
        )
        return await self.ended()

    async def open(self, epoch: int, version: int) -> EngineState:
        """Open."""
        digest = digest_of(f"step-{version}") if version else None
        return await self.service.command(
            Open(incarnation=self.service.incarnation, epoch=epoch, version=version, digest=digest)
        )

    async def cancel(self, epoch: int) -> EngineState:
        """Cancel."""
        return await self.service.command(Cancel(incarnation=self.service.incarnation, epoch=epoch))

    async def serve_initial(self) -> EngineState:
        """Version 0, open, under epoch 1. Starts the guard's timer here: fixtures run by another clock."""
        self.service.start()
        await self.verify(1, 0)
        return await self.open(1, 0)

    async def update(self, epoch: int, version: int) -> EngineState:
        """A whole update, up to open."""
        await self.prepare(epoch, version)
        await self.close(epoch, version)
        await self.arm(epoch)
        await self.transfer(epoch, version)
        await self.verify(epoch, version)
        return await self.open(epoch, version)


def _runs(state: EngineState) -> bool:
    return state.operation is not None and state.operation.status is OperationStatus.RUNNING


async def until(service: GuardService, wanted: Callable[[EngineState], bool], timeout_s: float = 60.0) -> EngineState:
    """Follow the guard, as the operator does, until its state is as wanted; fails after so long."""
    async with asyncio.timeout(timeout_s):
        state = service.state()
        while not wanted(state):
            state = await service.follow(state.sequence, 1.0)
        return state


async def eventually(
    wanted: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, every_s: float = 0.005
) -> None:
    """Look until it is so; fails after so long (of the loop's time)."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = wanted()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(every_s)


MODEL_SOURCE = CheckpointSource(root=CheckpointRoot.MODEL, path=".")


async def request(guarded: Guarded, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Through the serving port; (0, ...) where the answer was cut off."""
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": ""}
    await guarded.serving(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)  # type: ignore[misc]
    complete = sent and sent[-1]["type"] == "http.response.body" and not sent[-1].get("more_body")
    return (sent[0]["status"] if complete else 0), body  # type: ignore[return-value]


def failure_of(state: EngineState) -> FailureReason:
    """Of the newest operation, which failed."""
    operation = state.operation
    assert operation is not None
    assert operation.status is OperationStatus.FAILED
    assert operation.failure is not None
    return operation.failure.reason
