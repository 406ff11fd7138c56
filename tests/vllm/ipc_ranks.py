"""A trainer of two ranks and an engine of two workers, each pair on an NPU of its own: python -m tests.vllm.ipc_ranks.

Over the CPU's stand-in of torch_npu (tests/support/ascend). Prints a line of JSON for each scene: what each rank of the
trainer got or raised, and the digests of the workers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import multiprocessing as mp
from torch_npu.multiprocessing.reductions import remove_counters

from rollfleet_engine.weights.backends import ipc  # noqa: F401 - with vLLM, before the processes part
from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_kernels.digest import lanes
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.ipc import GroupRanks, IpcPeer, IpcSender

RANKS = 2
DEADLINE_S = 30.0
MODEL = ModelTensors(
    {"a": ("F32", (300, 7)), "b": ("BF16", (41,)), "c": ("U8", (3,)), "d": ("BF16", (64,))}, tied=False
)


def tensors(what: str) -> dict[str, torch.Tensor]:
    """The same on every rank; of one that breaks a tensor cannot be read, and of one that is unlike it is another."""
    found = {
        "a": torch.arange(2100, dtype=torch.float32).view(300, 7),
        "b": torch.arange(41, dtype=torch.bfloat16),
        "c": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "d": torch.ones(128, dtype=torch.bfloat16)[::2],  # not in rows without gaps
    }
    if what == "breaks":
        found["c"] = torch.empty(3, dtype=torch.uint8, device="meta")
    if what == "unlike":
        found["c"] = torch.zeros(4, dtype=torch.uint8)
    return found


def worker(number: int, pipe: Connection) -> None:
    """One of an engine: does what it is told, and says what came of it."""
    os.environ["STAND_IN_NPU"] = str(number)
    receiving = Receiving(lambda: MODEL, Seat(number, RANKS), lanes)

    def update(info: dict[str, Any]) -> None:
        with closing(receiving.receive(info, DEADLINE_S)) as incoming:
            for _ in incoming:
                pass

    calls: dict[str, Callable[..., Any]] = {
        "init": lambda info: receiving.init("ipc", info, DEADLINE_S),
        "start": receiving.start,
        "update": update,
        "finish": receiving.finish,
    }
    while (asked := pipe.recv()) is not None:
        name, *arguments = asked
        try:
            pipe.send(("", calls[name](*arguments)))
        except (PushError, CheckpointError) as error:
            pipe.send((f"worker {number}: {error.message}", None))


class Engine:
    """Its workers behind the trainer's client protocol."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self.digests: list[str] = []
        self.aborted = ""

    def _all(self, *asked: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(asked)
        answers = [pipe.recv() for pipe in self._pipes]
        if failed := [error for error, _ in answers if error]:
            raise TransferError("; ".join(failed))
        return [value for _, value in answers]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init", init_info)

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        self._all("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update", json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        self.digests = [*self._all("finish"), digest]

    def abort_weight_update(self, reason: str) -> None:
        self.aborted = reason


def rank(number: int, npu: int, store: str, what: str, pipes: list[Connection], out: Queue[Any]) -> None:
    """One of the trainer."""
    os.environ["STAND_IN_NPU"] = str(npu)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    engine = Engine(pipes)
    said: dict[str, Any] = {"rank": number}
    sender: IpcSender | IpcPeer = IpcPeer(GroupRanks(), buffer_bytes=4096)
    if number == 0:
        sender = IpcSender([Target(engine, 1, RANKS)], ranks=GroupRanks(), buffer_bytes=4096)
    sender.init()
    try:
        said["digest"] = sender.send(tensors(what))
    except (TransferError, NotImplementedError) as error:
        said["error"] = f"{type(error).__name__}: {error}"
    if isinstance(sender, IpcSender):
        sender.close()
    out.put(said | {"workers": engine.digests, "aborted": engine.aborted})
    torch.distributed.destroy_process_group()
    remove_counters()


def scene(*, npus: tuple[int, int] = (0, 1), second: str = "") -> list[dict[str, Any]]:
    """What each rank said."""
    context = mp.get_context("fork")  # vLLM, which the stand-in takes a class from, is imported once
    pairs = [context.Pipe() for _ in range(RANKS)]
    workers = [context.Process(target=worker, args=(number, pairs[number][1])) for number in range(RANKS)]
    out = context.Queue()
    ours = [pair[0] for pair in pairs]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=rank,
                args=(number, npus[number], f"{folder}/store", second if number else "", [] if number else ours, out),
            )
            for number in range(RANKS)
        ]
        for process in (*workers, *ranks):
            process.start()
        said = sorted((out.get(timeout=60) for _ in ranks), key=lambda each: int(each["rank"]))
        for process in ranks:
            process.join(20)
    for pipe in ours:
        pipe.send(None)
    for process in workers:
        process.join(20)
    return said


if __name__ == "__main__":
    print(json.dumps(scene()), flush=True)
    print(json.dumps(scene(npus=(0, 5))), flush=True)
    print(json.dumps(scene(second="breaks")), flush=True)
    print(json.dumps(scene(second="unlike")), flush=True)
