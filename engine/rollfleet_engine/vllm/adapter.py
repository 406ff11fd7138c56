"""The guard's port over a running AsyncLLM, in the API server's process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

from rollfleet_engine.guard.adapting import BY_WORKERS, CAPABILITIES, SLEEPS, able, guard_version, timed
from rollfleet_engine.guard.ports import EngineError, Received
from rollfleet_engine.guard.turnstile import current_passage
from rollfleet_engine.vllm import phases
from rollfleet_engine.vllm.abilities import missing
from rollfleet_engine.vllm.release import told
from rollfleet_engine.vllm.sharing import until_shared
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_engine.weights.transfer import PUSH_TYPE, SOURCE_TYPE, CheckpointUpdate
from rollfleet_kernels.digest import warm_up
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Facts, FailureReason, Transferred

NO_SLEEP = "the engine was started without sleep mode: set spec.sleepMode of the RolloutEngine to Enabled"
WORKERS_LEAD_S = 2.0
Reports = list[dict[str, Any]]  # of every worker
OUTPUTS_LOOK_S = 0.002
OUTPUTS_SETTLE_S = 0.02  # vLLM's own measure, in AsyncLLM.pause_generation


class VllmAdapter:
    """Keeps rollfleet_engine.guard.ports.EngineAdapter with real vLLM: of 0.23, and of 0.27.1 to 0.32.

    vLLM raises plain Exceptions with the core's text for whatever failed there, so each call to it goes through
    `_calling`, which gives the failure the reason that the call stands for.
    """

    def __init__(self, engine_client: Any) -> None:
        self._engine = engine_client
        warm_up()  # for staging: later, compiling would take the interpreter away from requests
        self._initialised = False
        self._lacking: Mapping[str, str] = dict.fromkeys(CAPABILITIES, "not looked at")
        self._probes = itertools.count(1)
        self._note_requests()

    def _note_requests(self) -> None:
        """Let the guard know what vLLM calls the requests that it admitted: vLLM makes ids from what clients send."""
        hand_over = self._engine.engine_core.add_request_async

        async def add_request_async(request: Any) -> None:
            passage = current_passage.get()
            if passage is not None and request.request_id not in passage.requests:
                passage.requests.append(request.request_id)
            await hand_over(request)

        self._engine.engine_core.add_request_async = add_request_async

    async def look(self, deadline_s: float) -> Mapping[str, str]:
        """By its signatures, and by one call to our extension in every worker, as each transfer makes them."""
        lacking = dict(missing(type(self._engine), EngineCore))
        if not self._sleeps():
            lacking |= dict.fromkeys(SLEEPS, NO_SLEEP)
        try:
            async with _calling("rollfleet_report", FailureReason.TRANSFER_FAILED, deadline_s):
                self._require_all(await self._on_workers("rollfleet_report"))
        except EngineError as error:
            # On CPUs it is the extension that makes workers sleep.
            lost = (*BY_WORKERS, *(SLEEPS if current_platform.is_cpu() else ()))
            lacking |= dict.fromkeys(lost, error.message)
        self._lacking = lacking
        return lacking

    def facts(self) -> Facts:
        """Version, topology, model; no call to the core."""
        parallel, model = self._engine.vllm_config.parallel_config, self._engine.vllm_config.model_config
        return Facts(
            guard_version=guard_version(),
            engine="vllm",
            engine_version=told(vllm.__version__),
            model=model.model,
            world_size=self._workers(),
            data_parallel_size=parallel.data_parallel_size,
            vocabulary=int(model.get_vocab_size()),
            capabilities=able(self._lacking),
        )

    def _sleeps(self) -> bool:
        """On CPUs our worker extension does it, and vLLM refuses the flag."""
        return bool(current_platform.is_cpu() or self._engine.vllm_config.model_config.enable_sleep_mode)

    def _workers(self) -> int:
        parallel = self._engine.vllm_config.parallel_config
        return int(parallel.world_size * parallel.data_parallel_size)

    def _ranks(self) -> int:
        return int(self._engine.vllm_config.parallel_config.data_parallel_size)

    def alive(self) -> bool:
        """Whether the core answers, as far as this process was told."""
        return not self._engine.errored

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Stop scheduling on every rank; all of them or none."""
        async with _calling("pause", FailureReason.PAUSE_FAILED, deadline_s):
            try:
                await self._on_every_rank("pause_scheduler", mode.value, False)
            except RuntimeError as error:
                await self._take_pause_back(error)
                raise
            await self._catch_up_with_outputs()

    async def _take_pause_back(self, failed: RuntimeError) -> None:
        if self._ranks() > 1:
            try:
                await self._on_every_rank("resume_scheduler")
            except RuntimeError as error:
                what = f"{failed}; and some ranks stay paused: {error}"
                raise RuntimeError(what) from failed

    async def _catch_up_with_outputs(self) -> None:
        """What the core computed comes before the pause's answer, and is then taken up by a task of vLLM's own."""
        while not self._engine.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - vLLM's queue tells nobody
            await asyncio.sleep(OUTPUTS_LOOK_S)
        await asyncio.sleep(OUTPUTS_SETTLE_S)

    async def abort_all(self, deadline_s: float) -> None:
        """Abort all that this process has handed to the core: with one API server there is no other way in."""
        await self.abort(tuple(self._engine.output_processor.request_states), deadline_s)

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        """Abort these, by vLLM's own ids."""
        if requests:
            async with _calling("abort", FailureReason.PAUSE_FAILED, deadline_s):
                await self._engine.abort(list(requests), internal=True)

    def tokens(self) -> dict[str, int]:
        """As vLLM's front end has counted them; of a pooling request none."""
        return {
            request: 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
            for request, state in self._engine.output_processor.request_states.items()
        }

    async def resume(self, deadline_s: float) -> None:
        """Start scheduling again."""
        async with _calling("resume", FailureReason.PAUSE_FAILED, deadline_s):
            await self._on_every_rank("resume_scheduler")

    async def is_paused(self, deadline_s: float) -> bool:
        """What the schedulers of all ranks say."""
        async with _calling("is_paused", FailureReason.PAUSE_FAILED, deadline_s):
            return all(await self._on_every_rank("is_scheduler_paused"))

    async def _on_every_rank(self, method: str, *arguments: Any) -> list[Any]:
        """Call every data-parallel rank's core. vLLM's own client gives only the first one's answer.

        All have ended when this returns or raises.
        """
        core = self._engine.engine_core
        calls = [core._call_utility_async(method, *arguments, engine=engine) for engine in core.core_engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, BaseException)]
        for rank, error in failed:
            if isinstance(error, EngineDeadError):
                raise error
            raise RuntimeError(f"{self._of_core(rank)}{error}") from error
        return answers

    def _of_core(self, rank: int) -> str:
        return f"data-parallel rank {rank}: " if self._ranks() > 1 else ""

    async def _on_workers(self, method: str, *arguments: Any) -> Reports:
        """Call a method of our extension on every worker of every rank, in the order of their ranks in a transfer."""
        answers = await self._on_every_rank("collective_rpc", method, None, arguments, None)
        return [report | {"rank": place} for place, report in enumerate(itertools.chain.from_iterable(answers))]

    async def share(self, staged: StagedCheckpoint, deadline_s: float) -> None:
        """Nothing to do where one pod holds the whole engine."""
        if self._engine.vllm_config.parallel_config.nnodes > 1:
            async with _calling("staging on other nodes", FailureReason.CHECKPOINT_INVALID, deadline_s):
                self._require_all(await self._on_workers("rollfleet_share", CheckpointUpdate.of(staged).to_wire()))
                await until_shared(lambda: self._on_workers("rollfleet_shared"))

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """Init (once), start, update, finish; every worker must report the staged digest and full coverage."""
        started = time.monotonic()
        seconds: dict[str, float] = {}
        try:
            async with _calling("weight transfer", FailureReason.TRANSFER_FAILED, deadline_s):
                reports = await self._four_phases(staged, version, seconds)
        except EngineError as error:
            # Until the third phase begins no tensor was loaded, and a reset gives the layers back what they had.
            left_s = started + deadline_s - time.monotonic()
            error.touched = "update" in seconds or not await self._put_back(left_s)
            raise
        return Transferred(
            epoch=epoch,
            version=version,
            digest=staged.digest,
            tensors=len(staged.tensors),
            bytes=staged.nbytes,
            layers=sum(report["layers"] for report in reports),
            seconds=time.monotonic() - started,
            phase_seconds=seconds,
        )

    async def _four_phases(self, staged: StagedCheckpoint, version: int, seconds: dict[str, float]) -> Reports:
        update = {"type": SOURCE_TYPE, "info": CheckpointUpdate.of(staged).to_wire()}
        with timed(seconds, "init"):
            await self._initialise()
        with timed(seconds, "start"):
            await self._phase(lambda: phases.start(self._engine, self._on_workers))
        with timed(seconds, "update"):
            await self._phase(lambda: self._engine.update_weights(WeightTransferUpdateRequest(update)))
        with timed(seconds, "finish"):
            return await self._finish(staged.digest, version)

    async def _finish(self, digest: str | None, version: int) -> Reports:
        reports = await self._phase(lambda: phases.finish(self._engine, self._on_workers))
        _require_finished(reports, digest)
        # Not an argument of finish: vLLM would write the new label even where a worker recorded a failure.
        await phases.tell_version(self._engine, version)
        return reports

    async def push_init(self, backend: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """Every worker joins the trainer's group."""
        wire = {"type": PUSH_TYPE, "backend": backend, "info": dict(info), "deadline_s": _of_workers(deadline_s)}
        async with _calling("init_weight_transfer_engine", FailureReason.TRANSFER_FAILED, deadline_s):
            await self._phase(lambda: self._engine.init_weight_transfer_engine(WeightTransferInitRequest(wire)))

    async def push_start(self, deadline_s: float) -> None:
        """Layers give up their tensors."""
        async with _calling("start_weight_update", FailureReason.TRANSFER_FAILED, deadline_s):
            await self._phase(lambda: phases.start(self._engine, self._on_workers))

    async def push_update(self, info: Mapping[str, Any], deadline_s: float) -> None:
        """Every worker receives, digests and loads."""
        wire = {"type": PUSH_TYPE, "info": dict(info), "deadline_s": _of_workers(deadline_s)}
        async with _calling("update_weights", FailureReason.TRANSFER_FAILED, deadline_s):
            await self._phase(lambda: self._engine.update_weights(WeightTransferUpdateRequest(wire)))

    async def push_finish(self, digest: str | None, version: int, deadline_s: float) -> Received:
        """Every worker must report all tensors, whole layers and the one digest."""
        async with _calling("finish_weight_update", FailureReason.TRANSFER_FAILED, deadline_s):
            reports = await self._finish(digest, version)
        first, layers = reports[0], sum(report["layers"] for report in reports)
        return Received(digest=first["digest"], tensors=first["tensors"], bytes=first["bytes"], layers=layers)

    async def _put_back(self, deadline_s: float) -> bool:
        """Whether all workers are known to hold what they held before the update."""
        if deadline_s <= 0:
            return False
        try:
            await self.recover(deadline_s)
        except EngineError:
            return False  # the failure that led here is the one to tell
        return True

    async def _initialise(self) -> None:
        if not self._initialised:
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest({"type": SOURCE_TYPE}))
            self._initialised = True

    async def _phase(self, call: Callable[[], Awaitable[None]]) -> Reports:
        """One of vLLM's phases, and what every worker says of it: our workers record failures instead of raising."""
        await call()
        return self._without_failure(await self._on_workers("rollfleet_report"))

    def _without_failure(self, reports: Reports) -> Reports:
        self._require_all(reports)
        for report in reports:
            if report["failure"] is not None:
                message = _of_rank(report, report["failure"]["message"], len(reports))
                raise EngineError(FailureReason(report["failure"]["reason"]), message)
        return reports

    def _require_all(self, reports: Reports) -> None:
        if len(reports) != self._workers():
            message = f"{len(reports)} of {self._workers()} workers reported; the others cannot be vouched for"
            raise EngineError(FailureReason.TRANSFER_FAILED, message)

    async def sleep(self, level: int, deadline_s: float) -> None:
        """By vLLM's own sleep on every rank's core, which drops the prefix cache too."""
        if not self._sleeps():
            raise EngineError(FailureReason.SLEEP_FAILED, NO_SLEEP)
        async with _moving("sleep", deadline_s):
            await self._on_every_rank("sleep", level, "abort")
        if self._engine.logger_manager is not None:
            self._engine.logger_manager.record_sleep_state(1, level)

    async def wake(self, tags: tuple[Tag, ...], deadline_s: float) -> None:
        """By vLLM's own wake_up, which resumes the scheduler with the last tag: it is paused again at once.

        Nothing is in it meanwhile: the gate is closed, and nothing was in flight when it fell asleep.
        """
        async with _moving("wake_up", deadline_s):
            await self._on_every_rank("wake_up", [tag.value for tag in tags])
            await self._on_every_rank("pause_scheduler", PauseMode.ABORT.value, False)
            if not all(await self._on_every_rank("is_scheduler_paused")):
                raise RuntimeError("the scheduler runs though it was paused again")
        if self._engine.logger_manager is not None and Tag.KV_CACHE in tags:
            self._engine.logger_manager.record_sleep_state(0, 0)

    async def recover(self, deadline_s: float) -> None:
        """Reset every worker, those that did not fail too."""
        async with _calling("worker reset", FailureReason.TRANSFER_FAILED, deadline_s):
            self._without_failure(await self._on_workers("rollfleet_reset"))

    async def reset_caches(self, deadline_s: float, *, kept: bool = False) -> None:
        """Prefix cache (with any connector's), multi-modal and encoder caches."""
        async with _calling("cache reset", FailureReason.CACHE_RESET_FAILED, deadline_s):
            for rank, done in enumerate(await self._on_every_rank("reset_prefix_cache", kept, True)):
                if not done:
                    message = "vLLM did not reset the prefix cache: blocks are still held by requests"
                    raise EngineError(FailureReason.CACHE_RESET_FAILED, f"{self._of_core(rank)}{message}")
            await self._engine.reset_mm_cache()
            await self._engine.reset_encoder_cache()

    async def probe(self, tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        """Log-probabilities of the prompt itself on every data-parallel rank, under a cache salt of its own."""
        async with _calling("probe", FailureReason.PROBE_FAILED, deadline_s):
            tasks = [asyncio.create_task(self._prompt_logprobs(tokens, rank)) for rank in range(self._ranks())]
            try:
                return tuple(await asyncio.gather(*tasks))
            finally:  # one that is left must not stay in the engine
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _prompt_logprobs(self, tokens: tuple[int, ...], rank: int) -> tuple[float, ...]:
        request = f"rollfleet-probe-{next(self._probes)}"
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        prompt = {"prompt_token_ids": list(tokens), "cache_salt": request}
        found = None
        async for output in self._engine.generate(prompt, parameters, request, data_parallel_rank=rank):
            found = output.prompt_logprobs or found
        if found is None or len(found) != len(tokens):
            message = f"vLLM gave {len(found or ())} prompt log-probabilities for {len(tokens)} tokens on rank {rank}"
            raise EngineError(FailureReason.PROBE_FAILED, message)
        return tuple(float(found[place][token].logprob) for place, token in enumerate(tokens) if place)


def _require_finished(reports: Reports, digest: str | None) -> None:
    """Without a digest that is known beforehand, the workers must agree among themselves."""
    wanted = digest or reports[0]["digest"]
    for report in reports:
        if not report["digest"] or report["digest"] != wanted:
            of_whom = "sent was" if digest else "that of worker 0 is"
            message = f"received digest {report['digest'] or 'of nothing'}, {of_whom} {wanted}"
            raise EngineError(FailureReason.DIGEST_MISMATCH, _of_rank(report, message, len(reports)))
        if not report["finished"] or report["active"] or not report["layers"]:
            raise EngineError(
                FailureReason.TRANSFER_FAILED, _of_rank(report, "did not finish the update", len(reports))
            )


def _of_rank(report: dict[str, Any], message: str, workers: int) -> str:
    return message if workers == 1 else f"worker {report['rank']}: {message}"


@asynccontextmanager
async def _moving(what: str, deadline_s: float) -> AsyncIterator[None]:
    """A call that gives memory back or takes it: when it fails, nobody knows what is still there."""
    try:
        async with _calling(what, FailureReason.SLEEP_FAILED, deadline_s):
            yield
    except EngineError as error:
        error.touched = True
        raise


def _of_workers(deadline_s: float) -> float:
    """They give up first: a call that has not come back at its deadline leaves them where nobody can reach them."""
    return deadline_s - min(WORKERS_LEAD_S, deadline_s / 4)


@asynccontextmanager
async def _calling(what: str, reason: FailureReason, deadline_s: float) -> AsyncIterator[None]:
    """A call to vLLM: ends by the deadline, and whatever it raises comes out as EngineError with vLLM's own text."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        message = f"{what}: vLLM has not answered within {deadline_s:g} s"
        raise EngineError(FailureReason.DEADLINE_EXCEEDED, message) from error
    except EngineDeadError as error:
        raise EngineError(FailureReason.ENGINE_DEAD, f"{what}: vLLM's engine core is dead") from error
    except EngineError:
        raise
    except Exception as error:  # vLLM's client raises bare Exception for any failure in the core
        raise EngineError(reason, f"{what}: {error}") from error
