"""TRL's client of a vLLM server, kept over a fleet: GRPOTrainer(use_vllm=True, vllm_mode="server") trains against it.

    with vllm_client_replaced(lambda: FleetClient(RolloutFleet("rl/qwen"), Rollouts(url, model="policy", ...))):
        trainer = GRPOTrainer(...)

Methods and arguments are those of trl/generation/vllm_client.py of TRL 1.16.0 (docs/trl.md). There a trainer's sync is
`update_named_params` with all tensors, then `reset_prefix_cache`; samples follow. Here it is one version of the fleet:
it is served when the call returns, and every sample after it must be of that version, or is refused.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollfleet_trainer.asking import OnAbort
from rollfleet_trainer.background import Background
from rollfleet_trainer.ending import ENDINGS
from rollfleet_trainer.errors import NotPossible, SenderLost
from rollfleet_trainer.passing import Announced, Handed, OnePass, copied
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample
from rollfleet_trainer.sending import require_sender
from rollfleet_trainer.trl_sampling import Batch, Wish, batch_of, require_no_images, schemas
from rollfleet_trainer.updates import OnProgress, Update

if TYPE_CHECKING:
    import torch

    from rollfleet_trainer.fleet import RolloutFleet

WHERE = "trl.generation.vllm_generation"  # the module whose trainers make their client by the name VLLMClient
CONCURRENCY = 64  # TRL's default
RAW_LOGPROBS = "raw_logprobs"  # spec.features.logprobs.mode where absent
Asked = Callable[[int | None], Awaitable[Sample]]  # by the version that must answer


class FleetClient:
    """On a trainer's main process only, as TRL makes its own. One object per trainer.

    fleet, rollouts: where weights go, and where samples come from; this object closes both. rollouts must not hand out
    interrupted samples (on_abort restart or continue): TRL cannot tell them from finished ones.
    dtype: floating tensors are sent in it, where the trainer's is not the checkpoint's. keep_copy: hold a sync's
    weights in host memory, so that they can be sent again where the fleet asks for a second attempt.
    step: asked at each sync for the label of the version, as `lambda: trainer.state.global_step`.
    pause, spec, on_progress: of RolloutFleet.update.
    """

    def __init__(
        self,
        fleet: RolloutFleet,
        rollouts: Rollouts,
        *,
        dtype: torch.dtype | None = None,
        keep_copy: bool = False,
        step: Callable[[], int | str] | None = None,
        pause: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if rollouts.on_abort is OnAbort.RETURN:
            raise NotPossible(
                "Rollouts(on_abort='return') hands out interrupted samples, and TRL cannot tell them apart"
            )
        if fleet.ranks > 1:
            raise NotPossible("TRL gathers by itself and calls its client on one process: RolloutFleet without a group")
        self._fleet, self._rollouts = fleet, rollouts
        self._dtype, self._keep_copy, self._step = dtype, keep_copy, step
        self._options: dict[str, Any] = {"pause": pause, "spec": spec, "on_progress": on_progress}
        self._background = Background("rollfleet trl")
        self._handed: tuple[Handed, asyncio.Task[Update]] | None = None
        self._closed = False
        self.model = rollouts.model
        self.update: Update | None = None  # the last sync's
        ENDINGS.add(self.close_communicator)

    # --- the server

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait for the fleet's HTTP server, for so many seconds. ConnectionError with its last words.

        A fleet that waits for weights, or changes them, is there.
        """
        self._background.run(self._reached(total_timeout, retry_interval))

    async def _reached(self, total_timeout: float, retry_interval: float) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + total_timeout
        while why := await self._rollouts.unreachable():
            if loop.time() >= ends:
                raise ConnectionError(f"the fleet cannot be reached after {total_timeout:g} s: {why}")
            await asyncio.sleep(min(retry_interval, max(0.0, ends - loop.time())))

    def get_server_info(self) -> dict[str, Any]:
        """Of vLLM's configuration what TRL asks for, as the RolloutEngine says it.

        model_config.logprobs_mode, weight_transfer_config.backend; nothing else is there.
        """
        spec = self._fleet.blocking.spec()
        mode = ((spec.get("features") or {}).get("logprobs") or {}).get("mode") or RAW_LOGPROBS
        backend = (spec.get("weightTransfer") or {}).get("backend")
        return {
            "model_config": {"logprobs_mode": mode},
            "weight_transfer_config": {"backend": backend} if backend else None,
        }

    def get_world_size(self) -> int:
        """Refused: a fleet has none that lasts."""
        raise NotPossible("get_world_size: engines come and go; RolloutFleet.begin tells each push's world_size")

    # --- weights

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Look whether this process may send to the fleet. The Lease is taken, and a group formed, by the first sync.

        device: made current for the thread that sends what `update_named_param` is given.
        """
        backend = (self._fleet.blocking.spec().get("weightTransfer") or {}).get("backend")
        require_sender(str(backend or ""), int(os.environ.get("WORLD_SIZE", "1")))
        self._background.run(self._use(device))

    async def _use(self, device: torch.device | str | int) -> None:
        import torch  # noqa: PLC0415

        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and torch.accelerator.is_available():
            torch.accelerator.set_device_index(index)

    def update_named_params(
        self, metadata: Sequence[Announced], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """One version of the fleet; returns when it is served. Raises the errors of RolloutFleet.update.

        metadata: (name, dtype, shape) of all that comes, in its order. named_params is gone through to its end whatever
        happens: that may be collectives, in which other ranks wait.
        """
        self._require_no_update()
        passing = OnePass(metadata, named_params, self._dtype, keep=self._keep_copy)
        try:
            update = self._fleet.blocking.update(passing, **self._wishes())
        except Exception:
            passing.exhaust()
            raise
        passing.exhaust()
        self._updated(update)

    def update_model_params(self, model: torch.nn.Module) -> None:
        """The same with all parameters of a model, which can be sent again."""
        self._require_no_update()
        dtype = self._dtype
        given = model if dtype is None else lambda: ((n, copied(p, dtype)) for n, p in model.named_parameters())
        self._updated(self._fleet.blocking.update(given, **self._wishes()))

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """What `update_named_param` is given inside is one version, served when this is left."""
        self._require_no_update()
        handed = Handed()
        task = self._background.run(self._begun(handed))
        self._handed = handed, task
        try:
            yield
            handed.end()
            self._updated(self._background.run(_result(task)))
        except BaseException as error:
            handed.fail(error)
            if not task.done():
                why = error if isinstance(error, Exception) else SenderLost(f"interrupted: {type(error).__name__}")
                self._fleet.stop(why)
            self._background.run(_ended(task))
            raise
        finally:
            self._handed = None

    async def _begun(self, handed: Handed) -> asyncio.Task[Update]:
        async def sent() -> Update:
            try:
                return await self._fleet.update(handed, **self._wishes())
            finally:
                handed.over()

        task = asyncio.create_task(sent())
        await asyncio.sleep(0)  # it runs: whatever ends it from now on, `over` is told
        return task

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        """One tensor, inside `weight_update` only: a version has all tensors."""
        if self._handed is None:
            raise NotPossible(
                "update_named_param: only inside `with client.weight_update()`: a version has all tensors"
            )
        handed, task = self._handed
        if not handed.put((name, copied(weights, self._dtype))):
            update = self._background.run(_result(task))  # raises what ended it
            raise NotPossible(f"version {update.version} is served already, without {name}")

    def _require_no_update(self) -> None:
        if self._handed is not None:
            raise NotPossible("inside `weight_update` tensors are given by update_named_param")

    def _wishes(self) -> dict[str, Any]:
        return self._options | ({} if self._step is None else {"step": self._step()})

    def _updated(self, update: Update) -> None:
        self.update = update

    def reset_prefix_cache(self) -> None:
        """Nothing is left to be done: engines drop their caches before they serve a version."""

    def close_communicator(self) -> None:
        """Give the Lease back, end what runs. The object is of no use afterwards."""
        if self._closed:
            return
        self._closed = True
        ENDINGS.remove(self.close_communicator)
        self._background.run(self._rollouts.aclose())
        self._background.close()
        self._fleet.blocking.close()

    # --- samples

    def image_features(self, images: list[list[Any] | None], max_concurrent_requests: int = CONCURRENCY) -> list[None]:
        """Of prompts without images: None for each. Images are refused."""
        if any(images):
            raise NotPossible("image_features: prompts with images are not sent to a fleet")
        return [None for _ in images]

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        features: list[dict[str, Any] | None] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> Batch:
        """n samples of each prompt, prompt by prompt. Raises the kinds of RolloutError.

        prompt_ids has one list per prompt, completion_ids one per sample, logprobs and logprob_token_ids (samples,
        tokens, 1), natural logs, None where not a number. Beside TRL's keys: versions, of each token.
        """
        if features is not None:
            self.image_features([[each] if each else None for each in features])
        named: dict[str, Any] = {"repetition_penalty": repetition_penalty, "temperature": temperature, "top_p": top_p}
        named |= {"top_k": top_k, "min_p": min_p, "n": n, "max_tokens": max_tokens, "logprobs": logprobs}
        wish = Wish(named, structured_outputs_regex, generation_kwargs)

        def asked(prompt: str | list[int], fields: dict[str, Any]) -> Asked:
            return lambda version: self._rollouts.complete(prompt, wish.max_tokens, version=version, **fields)

        asks = [asked(prompt, fields) for prompt in prompts for fields in wish.fields()]
        return batch_of(self._background.run(self._samples(asks, len(asks))), wish)

    def chat(
        self,
        messages: list[list[dict[str, Any]]],
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        chat_template: str | None = None,
        max_concurrent_requests: int = CONCURRENCY,
    ) -> Batch:
        """n samples of each conversation; else as generate. Tools are shown to the model; calls are not parsed."""
        require_no_images(messages)
        named: dict[str, Any] = {"repetition_penalty": repetition_penalty, "temperature": temperature, "top_p": top_p}
        named |= {"top_k": top_k, "min_p": min_p, "n": n, "max_tokens": max_tokens, "logprobs": logprobs}
        named |= {"chat_template": chat_template} if chat_template is not None else {}
        named |= {"chat_template_kwargs": chat_template_kwargs} if chat_template_kwargs else {}
        # Calls are parsed by who asked: without "none" an engine wants a parser of its own.
        named |= {"tools": schemas(tools), "tool_choice": "none"} if tools else {}
        wish = Wish(named, structured_outputs_regex, generation_kwargs)

        def asked(turns: list[dict[str, Any]], fields: dict[str, Any]) -> Asked:
            return lambda version: self._rollouts.chat(turns, wish.max_tokens, version=version, **fields)

        asks = [asked(turns, fields) for turns in messages for fields in wish.fields()]
        return batch_of(self._background.run(self._samples(asks, max_concurrent_requests)), wish)

    async def _samples(self, asks: Sequence[Asked], at_once: int) -> list[Sample]:
        """All of them, in their order; where one fails the others are ended, in the engines too."""
        version = None if self.update is None else self.update.version
        if version is not None:
            self._rollouts.note_version(version)
        turns = asyncio.Semaphore(max(1, at_once))

        async def one(ask: Asked) -> Sample:
            async with turns:
                return await ask(version)

        tasks = [asyncio.ensure_future(one(ask)) for ask in asks]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def get_sequence_logprobs(
        self,
        sequences: list[list[int]],
        prompt_lengths: list[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> dict[str, list[Any]]:
        """Refused: that is asked of a teacher, whose weights do not change."""
        raise NotPossible("get_sequence_logprobs: a fleet is no teacher; keep TRL's own client for that server")


async def _result(task: asyncio.Task[Update]) -> Update:
    return await task


async def _ended(task: asyncio.Task[Update]) -> None:
    """Whatever comes of it is not what is told. One that has not begun is told nothing by `stop`."""
    if not task.cancelling():  # a second one would be no wait for its end
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextmanager
def vllm_client_replaced(make: Callable[[], FleetClient]) -> Iterator[None]:
    """TRL's trainers that are made inside have the client of `make` in the place of their own.

    It is made on the main process only, where TRL makes its own, and waited for as vllm_server_timeout says; URLs and
    ports of the trainer's configuration have no meaning. The trainer's environment needs no vLLM. NotPossible where
    the installed TRL has no such client, and where no trainer asked for one.
    """
    try:
        module: Any = importlib.import_module(WHERE)
    except ModuleNotFoundError as error:
        raise NotPossible(f"{WHERE} cannot be imported: TRL 1.16.0 has it: {error}") from error
    before = {name: getattr(module, name, None) for name in ("VLLMClient", "is_vllm_available")}
    lacking = [name for name, value in before.items() if value is None]
    if lacking:
        raise NotPossible(f"{WHERE} has no {lacking[0]}: this TRL is another one than 1.16.0")
    made = False

    def client(
        base_url: str | None = None,
        host: str = "0.0.0.0",  # noqa: S104 - TRL's own default
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
    ) -> FleetClient:
        nonlocal made
        made = True
        one = make()
        try:
            one.check_server(connection_timeout)
        except BaseException:
            one.close_communicator()
            raise
        return one

    module.VLLMClient, module.is_vllm_available = client, lambda *_: True
    try:
        yield
    finally:
        module.VLLMClient, module.is_vllm_available = before["VLLMClient"], before["is_vllm_available"]
    if not made and os.environ.get("RANK", "0") == "0":
        raise NotPossible('no trainer asked for a client: use_vllm=True and vllm_mode="server" do')
