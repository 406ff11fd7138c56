"""An engine in memory: its adapter, its stager and its application, without files, ports or time."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollfleet_engine.guard.adapting import able
from rollfleet_engine.guard.answers import Receive, Scope, Send
from rollfleet_engine.guard.checkpoints import OnProgress
from rollfleet_engine.guard.ports import EngineError, Received
from rollfleet_engine.guard.turnstile import current_passage
from rollfleet_engine.weights.coverage import Form
from rollfleet_engine.weights.staging import StagedCheckpoint, StagedTensor
from rollfleet_protocol.commands import CheckpointSource, PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Facts, FailureReason, Transferred


def engine_error(reason: FailureReason, message: str = "told by the engine", *, touched: bool = False) -> EngineError:
    """What an adapter raises."""
    return EngineError(reason, message, touched=touched)


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
        self.judged: list[tuple[dict[str, Form], bool]] = []
        self.misfits: set[str] = set()  # tensors that the model does not know
        self.judging_s = 0.0

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """As Stager says."""
        self.started += 1
        on_progress(1, 4)
        if self.gate is not None:
            await self.gate.wait()
        if source.path in self.failures:
            raise self.failures[source.path]
        tensor = StagedTensor("w", "F32", (1,), 0, 0, 4, (1, 2))
        return MemoryCheckpoint(source.path, (), (tensor,), digest_of(source.path), self.closings)

    async def judge(self, tensors: Mapping[str, Form], *, whole: bool) -> None:
        """As Stager says."""
        self.judged.append((dict(tensors), whole))
        await asyncio.sleep(self.judging_s)
        for name in sorted(self.misfits & tensors.keys()):
            raise engine_error(FailureReason.COVERAGE_FAILED, f"tensor {name}: the model has no such tensor")


class MemoryEngine:
    """Keeps EngineAdapter. `failures` are raised, `hangs` never return, by the method's name; `calls` counts."""

    def __init__(self) -> None:
        self.is_alive = True
        self.lacking: dict[str, str] = {}  # capabilities, and why
        self.paused = False
        self.weights = "model"
        self.failures: dict[str, EngineError | Exception] = {}
        self.hangs: set[str] = set()
        self.slow_s = 0.0  # that every call takes
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.running: set[asyncio.Event] = set()  # set: ended by abort
        self.made = 3  # tokens of each request so far
        self.frozen: dict[str, asyncio.Event] = {}  # by the name that the guard was told
        self.kept: list[bool] = []  # what each reset of the caches was told
        self.group: tuple[str, dict[str, Any]] | None = None  # of a push
        self.asleep: set[Tag] = set()
        self.came: list[str] = []  # tensors of a push
        self.digest: str | None = None  # what apply reports, if not the truth

    async def look(self, deadline_s: float) -> dict[str, str]:
        """As told."""
        assert deadline_s > 0
        if "look" in self.failures:
            raise self.failures["look"]
        return self.lacking

    def facts(self) -> Facts:
        """Fixed, but for what it lacks."""
        return Facts(
            guard_version="0", engine="memory", engine_version="1", model="policy", capabilities=able(self.lacking)
        )

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
        """As many of each."""
        return dict.fromkeys(self.frozen, self.made)

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
        assert not self.asleep, "resumed in its sleep"
        self.paused = False

    async def share(self, staged: StagedCheckpoint, deadline_s: float) -> None:
        """It has one process."""
        assert deadline_s > 0
        await self._call("share")

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

    async def push_init(self, backend: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """Remember the group."""
        assert deadline_s > 0
        await self._call("push_init")
        self.group = (backend, dict(info))

    async def push_start(self, deadline_s: float) -> None:
        """Nothing has come yet."""
        assert self.paused
        await self._call("push_start")
        self.came = []

    async def push_update(self, info: Mapping[str, Any], deadline_s: float) -> None:
        """Every name is a tensor."""
        assert deadline_s > 0
        await self._call("push_update")
        self.came += info["names"]

    async def push_finish(self, digest: str | None, version: int, deadline_s: float) -> Received:
        """The digest is that of the path that is named by the tensors."""
        await self._call("push_finish")
        self.weights = "+".join(self.came)
        found = self.digest or digest_of(self.weights)
        if digest not in (None, found):
            raise engine_error(FailureReason.DIGEST_MISMATCH, f"worker 0: received {found}, sent was {digest}")
        return Received(digest=found, tensors=len(self.came), bytes=4 * len(self.came), layers=1)

    async def sleep(self, level: int, deadline_s: float) -> None:
        """Only who is awake and paused falls asleep."""
        assert self.paused
        assert not self.asleep
        await self._call("sleep")
        self.asleep = {Tag.WEIGHTS, Tag.KV_CACHE}
        self.weights = self.weights if level == 1 else "dropped"

    async def wake(self, tags: tuple[Tag, ...], deadline_s: float) -> None:
        """Only what sleeps."""
        assert set(tags) <= self.asleep
        await self._call("wake")
        self.asleep -= set(tags)

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
