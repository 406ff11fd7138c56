"""Runs one real vLLM engine and does as it is told by lines of JSON on stdin; answers on the descriptor named in argv.

Runs under vLLM's own interpreter, so it imports nothing of pytest. One line in, one line out: {"call": name,
...arguments} -> {"ok": value} or {"error": {"type", "reason", "message", "touched"}}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rollfleet_engine.guard.ports import EngineError, Received
from rollfleet_engine.vllm.adapter import VllmAdapter
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import StagedCheckpoint, stage_checkpoint
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.gloo import GlooSender
from rollfleet_trainer.sender import Sender
from rollfleet_trainer.shm import ShmSender

DEADLINE_S = 60.0


class Driver:
    """One method per call."""

    def __init__(self, engine: AsyncLLM, model: Path) -> None:
        self.engine = engine
        self.adapter = VllmAdapter(engine)
        self.model = model
        self.requests = 0
        self.tokens = 0
        self.background: dict[str, asyncio.Task[Any]] = {}

    async def facts(self) -> Any:
        return self.adapter.facts().model_dump(mode="json", by_alias=False)

    async def look(self) -> Any:
        """What it lacks, and the capabilities that it tells then."""
        lacking = await self.adapter.look(DEADLINE_S)
        return {"lacking": dict(lacking), "capabilities": list(self.adapter.facts().capabilities)}

    async def generate(self, prompt: list[int], count: int) -> Any:
        """Greedy tokens, their log-probabilities, cached prompt tokens and how it ended."""
        self.requests += 1
        parameters = SamplingParams(temperature=0.0, max_tokens=count, logprobs=1)
        last = None
        async for output in self.engine.generate({"prompt_token_ids": prompt}, parameters, f"request-{self.requests}"):
            last = output
            self.tokens = len(output.outputs[0].token_ids)
        assert last is not None
        first = last.outputs[0]
        return {
            "tokens": list(first.token_ids),
            "finish": first.finish_reason,
            "cached": last.num_cached_tokens,
            "logprobs": [
                each[token].logprob for each, token in zip(first.logprobs or [], first.token_ids, strict=True)
            ],
        }

    async def begin(self, name: str, prompt: list[int], count: int) -> Any:
        """Start generating in the background."""
        self.tokens = 0
        self.background[name] = asyncio.create_task(self.generate(prompt, count))

    async def end(self, name: str) -> Any:
        """The result of what `begin` started."""
        return await asyncio.wait_for(self.background.pop(name), DEADLINE_S)

    async def running(self) -> Any:
        """Requests that this process has not answered yet."""
        return self.engine.output_processor.get_num_unfinished_requests()

    async def produced(self) -> Any:
        """Tokens so far of the newest request: above 0, the core holds cache blocks for it."""
        return self.tokens

    async def pause(self) -> Any:
        await self.adapter.pause(PauseMode.ABORT, DEADLINE_S)

    async def abort_all(self) -> Any:
        await self.adapter.abort_all(DEADLINE_S)

    async def resume(self) -> Any:
        await self.adapter.resume(DEADLINE_S)

    async def is_paused(self) -> Any:
        return await self.adapter.is_paused(DEADLINE_S)

    async def reset_caches(self) -> Any:
        await self.adapter.reset_caches(DEADLINE_S)

    async def recover(self) -> Any:
        await self.adapter.recover(DEADLINE_S)

    async def reports(self) -> Any:
        return await self.engine.collective_rpc("rollfleet_report")

    async def workers(self, method: str, arguments: list[Any]) -> Any:
        return await self.engine.collective_rpc(method, args=tuple(arguments))

    async def weight_version(self) -> Any:
        """vLLM 0.23 keeps none."""
        return await self.engine.get_weight_version() if hasattr(self.engine, "get_weight_version") else "none kept"

    async def probe(self, tokens: list[int]) -> Any:
        (logprobs,) = await self.adapter.probe(tuple(tokens), DEADLINE_S)
        return logprobs

    async def update(self, path: str, version: int, fault: str = "", tensor: str = "", deadline_s: float = 60.0) -> Any:
        """Stage a checkpoint, damage what was staged as `fault` says, and apply it."""
        root = Path(path)
        staged = await asyncio.to_thread(stage_checkpoint, root.parent, root.name, read_model_tensors(self.model))
        try:
            done = await self.adapter.apply(_damaged(staged, root, fault, tensor), 1, version, deadline_s)
        finally:
            staged.close()
        return done.model_dump(mode="json", by_alias=False)

    async def push(self, path: str, backend: str, version: int, **changes: Any) -> Any:
        """A trainer in a thread of this process sends a checkpoint to all workers of this engine."""
        tensors = await asyncio.to_thread(_tensors_of, Path(path))
        for name in changes.get("omit", ()):
            del tensors[name]
        workers = self.adapter.facts().world_size
        client = AdapterClient(self.adapter, backend, version)
        target = Target(client, 1, workers)

        def send() -> str:
            with sender_of(backend, target) as sender:
                sender.init()
                return sender.send(tensors, str(version))

        digest = await asyncio.to_thread(send)
        received = client.received
        assert received is not None
        return {"digest": digest, "tensors": received.tensors, "layers": received.layers}

    async def sleep(self, level: int) -> Any:
        await self.adapter.sleep(level, DEADLINE_S)

    async def wake(self, tags: list[str]) -> Any:
        await self.adapter.wake(tuple(Tag(tag) for tag in tags), DEADLINE_S)


def sender_of(backend: str, target: Target) -> Sender:
    """hccl and ipc need their stand-in on the path (tests/support/ascend)."""
    if backend == "gloo":
        return GlooSender([target], "127.0.0.1", buffer_bytes=1 << 16)
    if backend == "shm":
        return ShmSender([target])
    name = {"hccl": "HcclSender", "ipc": "IpcSender"}[backend]
    sender: type[Sender] = getattr(import_module(f"rollfleet_trainer.{backend}"), name)
    return sender([target], buffer_bytes=1 << 16)


def _tensors_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


class AdapterClient:
    """Keeps rollfleet_trainer's SyncClient over the adapter, from another thread than the engine's loop."""

    def __init__(self, adapter: VllmAdapter, backend: str, version: int) -> None:
        self._adapter, self._backend, self._version = adapter, backend, version
        self._loop = asyncio.get_running_loop()
        self.received: Received | None = None

    def _run(self, call: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(DEADLINE_S)
        except EngineError as error:
            raise TransferError(f"{error.reason}: {error.message}") from error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self._adapter.push_init(self._backend, init_info, DEADLINE_S))

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        self._run(self._adapter.push_start(DEADLINE_S))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._run(self._adapter.push_update(update_info, DEADLINE_S))

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        self.received = self._run(self._adapter.push_finish(digest, self._version, DEADLINE_S))

    def abort_weight_update(self, reason: str) -> None:
        """There is no guard to tell it."""


def _damaged(staged: StagedCheckpoint, root: Path, fault: str, tensor: str) -> StagedCheckpoint:
    if fault == "omit":
        return replace(staged, tensors=tuple(each for each in staged.tensors if each.name != tensor))
    if fault in {"flip", "flip-unnoticed"}:
        each = next(each for each in staged.tensors if each.name == tensor)
        file = staged.files[each.file]
        with (root / file.name).open("r+b") as shard:
            shard.seek(each.offset)
            first = shard.read(1)[0]
            shard.seek(each.offset)
            shard.write(bytes([first ^ 0x80]))
        if fault == "flip-unnoticed":
            os.utime(root / file.name, ns=(file.mtime_ns, file.mtime_ns))
    return staged


async def _serve(args: dict[str, Any], answers: Any) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    driver = Driver(engine, Path(args["model"]))
    _answer(answers, {"ok": "ready"})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        try:
            value = await getattr(driver, request.pop("call"))(**request)
            _answer(answers, {"ok": value})
        except TransferError as error:
            _answer(answers, {"error": {"type": "TransferError", "reason": "", "message": str(error), "touched": True}})
        except (EngineError, CheckpointError) as error:
            touched = getattr(error, "touched", False)
            found = {"type": type(error).__name__, "reason": error.reason.value, "message": error.message}
            _answer(answers, {"error": found | {"touched": touched}})
    engine.shutdown()


def _answer(answers: Any, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        asyncio.run(_serve(json.loads(sys.argv[2]), pipe))
