"""Staging as the guard calls it: a thread of its own, cancelled by flag, with files that nobody forgets to close."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.weights.coverage import Form, ModelTensors, read_model_tensors, require_fits
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from rollfleet_protocol.commands import CheckpointRoot, CheckpointSource
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import FailureReason

MOST_HANGING = 4  # tries that were given up, and whose file system has not answered yet

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; called in the event loop
T = TypeVar("T")


def _forget(_: object) -> None:
    """Nothing is held."""


class Stager(Protocol):
    """Opens, checks and hashes a checkpoint while the engine serves."""

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """Raises EngineError. Cancelled, it lets go of everything it opened."""
        ...

    async def judge(self, tensors: Mapping[str, Form], *, whole: bool) -> None:
        """Compare what a trainer is about to send with the model; `whole`: no others come.

        Raises EngineError with COVERAGE_FAILED, or that the model's own files cannot be read.
        """
        ...


class CheckpointStager:
    """Stages from the engine's two folders."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = Path(config.model.path)
        self._checkpoints = None if config.checkpoints_path is None else Path(config.checkpoints_path)
        self._threads: dict[Path, list[threading.Thread]] = {}  # by the folder that they read
        self._tensors: ModelTensors | None = None  # read once: the model that runs does not change

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """As Stager says."""
        root = self._root(source)
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(on_progress, done, total)

        def work() -> StagedCheckpoint:
            return stage_checkpoint(
                root,
                source.path,
                self._model_tensors(),
                confined=source.root is CheckpointRoot.CHECKPOINTS,
                progress=progress,
                cancelled=cancelled,
            )

        try:
            return await self._in_thread(root, work, let_go=StagedCheckpoint.close)
        finally:
            cancelled.set()

    async def judge(self, tensors: Mapping[str, Form], *, whole: bool) -> None:
        """As Stager says."""
        await self._in_thread(
            None if self._tensors is not None else self._model,
            lambda: require_fits(tensors, self._model_tensors(), whole=whole),
        )

    async def _in_thread(self, reads: Path | None, work: Callable[[], T], let_go: Callable[[T], None] = _forget) -> T:
        """What it returns, or EngineError. `let_go` of what is ready when nobody waits any more.

        reads: the folder whose file system may hang; None: it reads nothing.
        """
        threads = [] if reads is None else self._answering(reads)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def deliver(found: T) -> None:
            if outcome.done():  # nobody waits any more
                let_go(found)
            else:
                outcome.set_result(found)

        def run() -> None:
            try:
                found = work()
            except BaseException as error:  # noqa: BLE001 - carried over to the event loop, which raises it again
                with suppress(RuntimeError):  # the loop has ended, and the process ends
                    loop.call_soon_threadsafe(_fail, outcome, error)
                return
            try:
                loop.call_soon_threadsafe(deliver, found)
            except RuntimeError:
                let_go(found)

        # Not an executor: a file system that hangs must not hold up the end of the process.
        thread = threading.Thread(target=run, name="rollfleet-staging", daemon=True)
        threads.append(thread)
        thread.start()
        try:
            return await outcome
        except CheckpointError as error:
            raise EngineError(error.reason, error.message) from error
        except asyncio.CancelledError:
            if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                let_go(outcome.result())  # it was ready, and the wait for it was cancelled in the same turn of the loop
            raise

    def _answering(self, folder: Path) -> list[threading.Thread]:
        """Threads that read it. Who is given up while its file system hangs can't be ended: each would stay behind."""
        threads = self._threads[folder] = [each for each in self._threads.get(folder, ()) if each.is_alive()]
        if len(threads) >= MOST_HANGING:
            message = f"{len(threads)} earlier tries still wait for the file system: does its server answer?"
            raise EngineError(FailureReason.DEADLINE_EXCEEDED, message)
        return threads

    def _root(self, source: CheckpointSource) -> Path:
        if source.root is CheckpointRoot.MODEL:
            if source.path != ".":
                message = f'{source.path!r}: of model.path only "." itself is a checkpoint'
                raise EngineError(FailureReason.CHECKPOINT_INVALID, message)
            return self._model
        if self._checkpoints is None:
            message = "this engine has no checkpoints volume: set spec.volumes.checkpoints of the RolloutEngine"
            raise EngineError(FailureReason.CHECKPOINT_NOT_FOUND, message)
        return self._checkpoints

    def _model_tensors(self) -> ModelTensors:
        if self._tensors is None:
            self._tensors = read_model_tensors(self._model)
        return self._tensors


def _fail(outcome: "asyncio.Future[Any]", error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)
