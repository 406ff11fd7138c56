"""The guard's port over the simulated core: the same four phases, digests and failure texts as with vLLM."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rollfleet_engine.guard.adapting import able, guard_version, timed
from rollfleet_engine.guard.checkpoints import OnProgress, Stager
from rollfleet_engine.guard.ports import EngineError, Received
from rollfleet_engine.simulator.core import Core, CoreDeadError
from rollfleet_engine.simulator.model import following_logprobs
from rollfleet_engine.simulator.weights import HeldWeights, elements_by_layer, read_again
from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.coverage import Form, ModelTensors, read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_engine.weights.transfer import CheckpointReader, CheckpointUpdate
from rollfleet_kernels.digest import TensorDigest, lanes_reference
from rollfleet_protocol.commands import CheckpointSource, PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Facts, FailureReason, Transferred

RELEASE = "0.27.1"


class SimulatorAdapter:
    """Keeps rollfleet_engine.guard.ports.EngineAdapter."""

    def __init__(self, core: Core, model: str, step_s: float = 0.0, lacks: frozenset[str] = frozenset()) -> None:
        self._core = core
        self._model = model
        self._step_s = step_s  # that pausing, updating and probing each take, as they do with large models
        self._lacks = lacks  # capabilities that this engine was made without
        self._layers = elements_by_layer(core.weights.tensors)
        seats = (Seat(worker, core.ranks) for worker in range(core.ranks))
        self._workers = [Receiving(lambda: self._model_tensors, seat, lanes_reference) for seat in seats]

    async def look(self, deadline_s: float) -> dict[str, str]:
        """As it was made."""
        return dict.fromkeys(sorted(self._lacks), "the simulator was started without it")

    def _require(self, capability: str, reason: FailureReason) -> None:
        if capability in self._lacks:
            raise EngineError(reason, f"the simulator was started without {capability}")

    def facts(self) -> Facts:
        """Version, topology, model."""
        return Facts(
            guard_version=guard_version(),
            engine="simulator",
            engine_version=RELEASE,
            model=self._model,
            world_size=self._core.workers,
            data_parallel_size=self._core.ranks,
            capabilities=able(dict.fromkeys(self._lacks, "")),
        )

    def alive(self) -> bool:
        """Whether the core's process lives."""
        return self._core.alive()

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Stop scheduling; what runs ends with what it has, or is frozen."""
        self._require(f"pause/{mode.value}", FailureReason.PAUSE_FAILED)
        with _calling("pause", FailureReason.PAUSE_FAILED):
            self._core.pause(mode.value)
            await self._take_time("pause", deadline_s)

    async def abort_all(self, deadline_s: float) -> None:
        """Abort what reached the core since."""
        with _calling("pause", FailureReason.PAUSE_FAILED):
            self._core.abort_all()

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        """Abort these."""
        with _calling("abort", FailureReason.PAUSE_FAILED):
            self._core.abort(requests)

    def tokens(self) -> dict[str, int]:
        """Output so far."""
        return self._core.tokens()

    async def resume(self, deadline_s: float) -> None:
        """Schedule again."""
        with _calling("resume", FailureReason.PAUSE_FAILED):
            self._core.resume()

    async def share(self, staged: StagedCheckpoint, deadline_s: float) -> None:
        """One process holds the whole engine, however many pods it has."""

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """Read every tensor again, digest it, count layers, and only then hold the new weights."""
        self._require("source/Checkpoint", FailureReason.TRANSFER_FAILED)
        seconds: dict[str, float] = {}
        started = time.monotonic()
        with _calling("weight transfer", FailureReason.TRANSFER_FAILED, touched=True):
            with timed(seconds, "init"):
                self._core.require_alive()
            with timed(seconds, "start"):
                self._core.lose_weights()
            with timed(seconds, "update"):
                received = await self._update(staged, deadline_s)
            with timed(seconds, "finish"):
                self._finish(received, staged)
        return Transferred(
            epoch=epoch,
            version=version,
            digest=self._core.weights.digest,
            tensors=len(received),
            bytes=staged.nbytes,
            layers=len(self._layers),
            seconds=time.monotonic() - started,
            phase_seconds=seconds,
        )

    @cached_property
    def _model_tensors(self) -> ModelTensors:
        return read_model_tensors(Path(self._model))

    async def push_init(self, backend: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """Every rank joins the trainer's group."""
        self._require("source/Trainer", FailureReason.TRANSFER_FAILED)
        await self._on_workers("init_weight_transfer_engine", lambda each: each.init(backend, info, deadline_s))

    async def push_start(self, deadline_s: float) -> None:
        """What is held stays until the first tensors come, as in vLLM's layers."""
        await self._on_workers("start_weight_update", Receiving.start)

    async def push_update(self, info: Mapping[str, Any], deadline_s: float) -> None:
        """Every rank receives and digests."""

        def receive(worker: Receiving) -> None:
            with closing(worker.receive(info, deadline_s)) as incoming:
                for _ in incoming:
                    pass

        await self._take_time("update_weights", deadline_s)
        self._core.lose_weights()
        await self._on_workers("update_weights", receive)

    async def push_finish(self, digest: str | None, version: int, deadline_s: float) -> Received:
        """All ranks have the same, and all of it."""
        found: dict[int, str] = {}

        def finish(worker: Receiving) -> None:
            found[self._workers.index(worker)] = worker.finish()

        await self._on_workers("finish_weight_update", finish)
        wanted = digest or found[0]
        for worker, each in sorted(found.items()):
            if each != wanted:
                message = f"worker {worker}: received digest {each}, {'sent' if digest else 'worker 0 has'} {wanted}"
                raise EngineError(FailureReason.DIGEST_MISMATCH, message)
        first = self._workers[0]
        self._core.weights = HeldWeights.of(first.received)
        return Received(
            digest=wanted,
            tensors=len(first.received),
            bytes=first.bytes,
            layers=len(self._layers) * self._core.ranks,
        )

    async def _on_workers(self, what: str, call: Callable[[Receiving], None]) -> None:
        """In a thread for each: some wait for the others. All have ended when this returns or raises."""
        with _calling(what, FailureReason.TRANSFER_FAILED):
            self._core.require_alive()
            calls = [asyncio.to_thread(_or_leave, call, worker) for worker in self._workers]
            failed = [each for each in await asyncio.gather(*calls, return_exceptions=True) if each is not None]
            self._core.require_alive()
            if failed:
                raise failed[0]

    async def _update(self, staged: StagedCheckpoint, deadline_s: float) -> list[TensorDigest]:
        received: list[TensorDigest] = []
        await self._take_time("weight transfer", deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                with CheckpointReader(CheckpointUpdate.of(staged)) as reader:
                    for tensor in read_again(reader, staged):
                        received.append(tensor)
                        await asyncio.sleep(0)  # the server goes on answering, as vLLM's does beside its core
        except TimeoutError as error:
            raise _too_late("weight transfer", deadline_s) from error
        return received

    def _finish(self, received: list[TensorDigest], staged: StagedCheckpoint) -> None:
        loaded = elements_by_layer(received)
        problems = [
            f"layer {layer}: {loaded.get(layer, 0)} of {wanted} elements loaded"
            for layer, wanted in sorted(self._layers.items())
            if loaded.get(layer, 0) != wanted
        ]
        if problems:
            raise EngineError(FailureReason.COVERAGE_FAILED, "; ".join(problems))
        weights = HeldWeights.of(received)
        if weights.digest != staged.digest:
            message = f"received digest {weights.digest}, staged was {staged.digest}"
            raise EngineError(FailureReason.DIGEST_MISMATCH, message)
        self._core.require_alive()
        self._core.weights = weights

    async def sleep(self, level: int, deadline_s: float) -> None:
        """All ranks at once."""
        self._require(f"sleep/{level}", FailureReason.SLEEP_FAILED)
        with _calling("sleep", FailureReason.SLEEP_FAILED, touched=True):
            self._core.sleep(level)
            await self._take_time("sleep", deadline_s)

    async def wake(self, tags: tuple[Tag, ...], deadline_s: float) -> None:
        """Paused again at once, as with vLLM."""
        with _calling("wake_up", FailureReason.SLEEP_FAILED, touched=True):
            self._core.wake_up(tuple(tag.value for tag in tags))
            self._core.pause()
            await self._take_time("wake_up", deadline_s)

    async def recover(self, deadline_s: float) -> None:
        """Nothing of a failed apply stays: the next one starts anew anyway. Ranks leave the group of a failed push."""
        with _calling("worker reset", FailureReason.TRANSFER_FAILED):
            self._core.require_alive()
            for worker in self._workers:
                worker.close()

    async def reset_caches(self, deadline_s: float, *, kept: bool = False) -> None:
        """The prefix cache is the only one."""
        with _calling("cache reset", FailureReason.CACHE_RESET_FAILED):
            if not self._core.reset_prefix_cache(preempt=kept):
                message = "vLLM did not reset the prefix cache: blocks are still held by requests"
                raise EngineError(FailureReason.CACHE_RESET_FAILED, message)

    async def probe(self, tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        """Log-probabilities of the prompt itself."""
        self._require("verify/Logprobs", FailureReason.PROBE_FAILED)
        with _calling("probe", FailureReason.PROBE_FAILED):
            self._core.require_alive()
            if self._core.paused:
                raise EngineError(FailureReason.PROBE_FAILED, "probe: the scheduler is paused")
            await self._take_time("probe", deadline_s)
            return (following_logprobs(self._core.weights.digest, tokens),) * self._core.ranks

    async def _take_time(self, what: str, deadline_s: float) -> None:
        await asyncio.sleep(min(self._step_s, deadline_s))
        if self._step_s > deadline_s:
            raise _too_late(what, deadline_s)


def _or_leave(call: Callable[[Receiving], None], worker: Receiving) -> None:
    """Who fails leaves the trainer's group at once, as vLLM's workers do: nobody must wait for its rank."""
    try:
        call(worker)
    except BaseException:
        worker.close()
        raise


class PacedStager:
    """Staging that takes a step's time at least."""

    def __init__(self, stager: Stager, step_s: float) -> None:
        self._stager = stager
        self._step_s = step_s

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """As rollfleet_engine.guard.checkpoints.Stager says."""
        await asyncio.sleep(self._step_s)
        return await self._stager.stage(source, on_progress)

    async def judge(self, tensors: Mapping[str, Form], *, whole: bool) -> None:
        """As rollfleet_engine.guard.checkpoints.Stager says."""
        await self._stager.judge(tensors, whole=whole)


def _too_late(what: str, deadline_s: float) -> EngineError:
    message = f"{what}: the simulator has not answered within {deadline_s:g} s"
    return EngineError(FailureReason.DEADLINE_EXCEEDED, message)


@contextmanager
def _calling(what: str, reason: FailureReason, *, touched: bool = False) -> Iterator[None]:
    """Whatever fails in the core comes out as EngineError with its own text."""
    try:
        yield
    except (CheckpointError, PushError) as error:
        raise EngineError(error.reason, error.message, touched=touched) from error
    except CoreDeadError as error:
        message = f"{what}: the engine core is dead"
        raise EngineError(FailureReason.ENGINE_DEAD, message, touched=touched) from error
    except OSError as error:
        raise EngineError(reason, f"{what}: {error}", touched=touched) from error
    except EngineError as error:
        error.touched = error.touched or touched
        raise
