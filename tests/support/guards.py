"""An engine in memory behind the guard's port, and what else the guard's tests share."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rollfleet_engine.guard.answers import Receive, Scope, Send
from rollfleet_engine.guard.checkpoints import OnProgress
from rollfleet_engine.guard.identity import Caller, IdentityError
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.guard.serving import Serving
from rollfleet_engine.guard.turnstile import Turnstile, current_passage
from rollfleet_engine.guard.waiting import WaitingRoom
from rollfleet_engine.weights.staging import StagedCheckpoint, StagedTensor
from rollfleet_protocol.commands import (
    Arm,
    Cancel,
    CheckpointRoot,
    CheckpointSource,
    Close,
    Open,
    PauseMode,
    Prepare,
    Transfer,
    Verify,
)
from rollfleet_protocol.engine_config import EngineConfig, FleetIdentity, Hold, ModelConfig, OperatorIdentity
from rollfleet_protocol.state import EngineState, Facts, FailureReason, OperationStatus, Transferred

OPERATOR = OperatorIdentity(subject="system:serviceaccount:rollfleet:rollfleet-operator", uid="operator-uid")
FLEET = FleetIdentity(namespace="rl", name="qwen", uid="fleet-uid")
TOKENS = (1, 2, 3)
SILENCE_S = 30.0
DEADLINE_S = 20.0


def make_config(**changes: Any) -> EngineConfig:
    """An engine of the fleet rl/qwen."""
    model = ModelConfig(path="/model", served_name="policy")
    return EngineConfig(**({"fleet": FLEET, "operator": OPERATOR, "model": model} | changes))


def digest_of(path: str) -> str:
    """The digest that a checkpoint of this path has in memory."""
    return f"sha256:{path}"


@dataclass(frozen=True)
class MemoryCheckpoint(StagedCheckpoint):
    """A staged checkpoint without files."""

    closings: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Remember that it was let go."""
        self.closings.append(self.path)


class MemoryStager:
    """Stages anything at once, but what is in `failures`; waits for `gate` where there is one."""

    def __init__(self) -> None:
        self.failures: dict[str, EngineError] = {}
        self.gate: asyncio.Event | None = None
        self.closings: list[str] = []
        self.started = 0

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """As Stager says."""
        self.started += 1
        on_progress(1, 4)
        if self.gate is not None:
            await self.gate.wait()
        if source.path in self.failures:
            raise self.failures[source.path]
        tensor = StagedTensor("w", "F32", (1,), 0, 0, 4, (1, 2, 3, 4))
        return MemoryCheckpoint(source.path, (), (tensor,), digest_of(source.path), self.closings)


class MemoryEngine:
    """Keeps EngineAdapter. `failures` are raised, `hangs` never return, by the method's name; `calls` counts."""

    def __init__(self) -> None:
        self.is_alive = True
        self.paused = False
        self.weights = "model"
        self.failures: dict[str, EngineError | Exception] = {}
        self.hangs: set[str] = set()
        self.slow_s = 0.0  # that every call takes
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.running: set[asyncio.Event] = set()  # set: ended by abort
        self.frozen: dict[str, asyncio.Event] = {}  # by the name that the guard was told
        self.kept: list[bool] = []  # what each reset of the caches was told
        self.digest: str | None = None  # what apply reports, if not the truth

    def facts(self) -> Facts:
        """Fixed."""
        return Facts(guard_version="0", engine="memory", engine_version="1", model="policy")

    def alive(self) -> bool:
        """As told."""
        return self.is_alive

    async def _call(self, name: str) -> None:
        self.calls[name] += 1
        self.order.append(name)
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if name in self.hangs:
            await asyncio.Event().wait()
        if name in self.failures:
            raise self.failures[name]

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """What runs ends, or is frozen."""
        assert mode is not PauseMode.WAIT, "the guard waits by itself"
        assert deadline_s > 0
        await self._call("pause")
        self.paused = True
        if mode is PauseMode.ABORT:
            self._abort()

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        """These end."""
        assert deadline_s > 0
        await self._call("abort")
        for name in requests:
            if name in self.frozen:
                self.frozen.pop(name).set()

    def tokens(self) -> dict[str, int]:
        """Three of each."""
        return dict.fromkeys(self.frozen, 3)

    def _abort(self) -> None:
        for ended in self.running:
            ended.set()

    async def abort_all(self, deadline_s: float) -> None:
        """What runs ends."""
        assert deadline_s > 0
        await self._call("abort_all")
        self._abort()

    async def resume(self, deadline_s: float) -> None:
        """Only what is paused may be resumed."""
        assert deadline_s > 0
        await self._call("resume")
        assert self.paused, "resumed twice"
        self.paused = False

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """The weights are those of the staged path now."""
        assert deadline_s > 0
        assert self.paused
        await self._call("apply")
        self.weights = staged.path
        return Transferred(
            epoch=epoch,
            version=version,
            digest=self.digest or staged.digest,
            tensors=1,
            bytes=4,
            layers=1,
            seconds=0.0,
            phase_seconds={},
        )

    async def recover(self, deadline_s: float) -> None:
        """Nothing to put back."""
        assert deadline_s > 0
        await self._call("recover")

    async def reset_caches(self, deadline_s: float, *, kept: bool = False) -> None:
        """There are none."""
        assert deadline_s > 0
        self.kept.append(kept)
        await self._call("reset_caches")

    async def probe(self, tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        """The same for the same tokens."""
        assert deadline_s > 0
        await self._call("probe")
        return (tuple(-float(token) for token in tokens[1:]),)


class MemoryApp:
    """The engine's own application: answers with the weights it holds, after `hold` where there is one."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.seen: list[str] = []
        self.hold = False
        self.deaf = False  # not ended by aborts: a client that does not read
        self.stream = False
        self.generates = False
        self.swallows = False  # answers a cancellation by an error of its own, as some routes of vLLM do

    async def _generate(self, scope: Scope, send: Send) -> None:
        """An answer that `engine.frozen[<path>]` ends."""
        name, stream = scope["path"], self.stream
        passage = current_passage.get()
        assert passage is not None
        passage.requests.append(name)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8" if stream else b"application/json")]
        head = {"type": "http.response.start", "status": 200, "headers": headers}
        ended = self.engine.frozen[name] = asyncio.Event()
        if stream:
            await send(head)
            await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})
        try:
            await ended.wait()
        except asyncio.CancelledError:
            if not self.swallows:
                raise
        text = self.engine.weights
        if not stream:
            await send(head)
        body = f"data: {text}\n\ndata: [DONE]\n\n" if stream else text
        await send({"type": "http.response.body", "body": body.encode()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope["path"])
        if self.generates:
            await self._generate(scope, send)
            return
        headers, stream = [(b"content-type", b"text/plain")], self.stream
        if stream:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        weights = self.engine.weights.encode()
        if self.hold:
            ended = asyncio.Event()
            self.engine.running |= set() if self.deaf else {ended}
            await ended.wait()
        if not stream:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": weights})


class MemoryVerifier:
    """The token is the caller: "subject uid"."""

    async def verify(self, token: str) -> Caller:
        """As Verifier says."""
        subject, _, uid = token.partition("/")
        if not uid:
            raise IdentityError("not a token")
        return Caller(subject, uid)


OPERATOR_TOKEN = f"{OPERATOR.subject}/{OPERATOR.uid}"


class Guarded:
    """A guard with an engine in memory, and short ways to drive it."""

    def __init__(self, hold: Hold | None = None, engine: "MemoryEngine | None" = None) -> None:
        self.engine = engine or MemoryEngine()
        self.app = MemoryApp(self.engine)
        self.stager = MemoryStager()
        self.turnstile = Turnstile()
        self.stream = io.StringIO()
        self.log = GuardLog({}, self.stream)
        self.waiting = WaitingRoom(self.turnstile, hold)
        self.service = GuardService(self.engine, self.stager, self.turnstile, self.log, self.waiting)
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


def engine_error(reason: FailureReason, message: str = "told by the engine", *, touched: bool = False) -> EngineError:
    """What an adapter raises."""
    return EngineError(reason, message, touched=touched)


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
