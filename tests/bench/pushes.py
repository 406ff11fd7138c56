"""gloo packed beside a plain gloo broadcast of the same bytes, in one run, and what it takes of memory.

python -m tests.bench.pushes [-n ROUNDS] [--mib SIZE] [--ranks N], with torch (`make bench-pushes`).
Sender and receivers are processes of their own. Packed is all of it: packing, broadcast, digest and coverage on both
sides, the copy into a tensor's own memory. Plain is one broadcast per tensor, and nothing else. Ends with 1 where
packed is below half of plain, or where a side takes more memory than two buffers beside its tensors.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_kernels.digest import lanes, warm_up
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import FanOut, Target
from rollfleet_trainer.gloo import GlooSender

MIB = 1 << 20
TENSOR_MIB = 8
BUFFER_MIB = 16
TIMEOUT_S = 60.0
SLACK_MIB = 24  # of the allocator and of gloo's own threads


def names_of(mib: int) -> list[str]:
    return [f"model.layers.{place}.weight" for place in range(mib // TENSOR_MIB)]


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def reset_peak() -> int:
    """Bytes resident now; from here on the peak is counted anew (Linux, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def receiver(pipe: Connection, rank: int, mib: int) -> None:
    """One worker: does what the pipe says."""
    warm_up()
    shape = (TENSOR_MIB * MIB // 4,)
    model = ModelTensors(dict.fromkeys(names_of(mib), ("F32", shape)), tied=False)
    one = Receiving(lambda: model, Seat(0, 1), lanes)
    group: Any = None
    grown = 0

    def take(info: dict[str, Any]) -> None:
        nonlocal grown
        before = reset_peak()
        for _ in one.receive(info, TIMEOUT_S):
            pass
        grown = peak() - before

    def plain(port: int, world: int) -> None:
        nonlocal group
        if group is None:
            store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=TIMEOUT_S))
            group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=TIMEOUT_S))
        for _ in names_of(mib):
            broadcast(group, torch.empty(shape))

    calls: dict[str, Callable[..., Any]] = {
        "init": lambda info: one.init("gloo", info, TIMEOUT_S),
        "start": one.start,
        "update": take,
        "finish": one.finish,
        "plain": plain,
        "grown": lambda: grown,
    }
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            return
        try:
            pipe.send(("ok", calls[name](*arguments)))
        except (PushError, CheckpointError) as error:
            pipe.send(("error", error.message))


class PipeClient:
    """Keeps SyncClient over a pipe to one receiver."""

    def __init__(self, rank: int, mib: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=receiver, args=(other, rank, mib), daemon=True)
        self._process.start()

    def call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        kind, value = self._pipe.recv()
        if kind == "error":
            raise TransferError(value)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init", init_info)

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        self.call("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        if (found := self.call("finish")) != digest:
            raise TransferError(f"digest {found}, sent was {digest}")

    def abort_weight_update(self, reason: str) -> None:
        """The pipe carries one call at a time; what failed is raised anyway."""

    def end(self) -> None:
        self._pipe.send(("end", ()))
        self._process.join(20)


def measure(rounds: int, mib: int, ranks: int) -> tuple[list[float], list[float], int, int]:
    """Seconds of packed and plain, and bytes that receivers and sender took beside their tensors."""
    warm_up()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(TENSOR_MIB * MIB // 4, generator=generator) for name in names_of(mib)}
    clients = [PipeClient(rank, mib) for rank in range(1, ranks + 1)]
    targets = [Target(client, rank, 1) for rank, client in enumerate(clients, 1)]
    world, timeout = ranks + 1, timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, world, True, timeout, wait_for_workers=False)
    group: Any = None
    packed_s, plain_s, received, sent = [], [], 0, 0
    fan = FanOut(targets)
    with GlooSender(targets, "127.0.0.1", buffer_bytes=BUFFER_MIB * MIB, timeout_s=TIMEOUT_S) as sender:
        sender.init()
        for place in range(rounds + 1):  # the first one warms up
            before = reset_peak()
            began = time.perf_counter()
            sender.send(tensors)
            packed = time.perf_counter() - began
            sent = max(sent, peak() - before) if place else 0
            calls = fan.begin(lambda target: target.client.call("plain", store.port, world))  # type: ignore[attr-defined]
            if group is None:
                group = dist.ProcessGroupGloo(store, 0, world, timeout)
            began = time.perf_counter()
            for tensor in tensors.values():
                broadcast(group, tensor)
            for call in calls:
                call.result()
            if place:
                packed_s.append(packed)
                plain_s.append(time.perf_counter() - began)
                received = max(received, *(client.call("grown") for client in clients))
    fan.close()
    for client in clients:
        client.end()
    return packed_s, plain_s, received, sent


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="tests.bench.pushes", description="gloo packed beside gloo plain")
    parser.add_argument("-n", "--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    packed, plain, received, sent = measure(arguments.rounds, arguments.mib, arguments.ranks)
    gib = arguments.mib / 1024
    for name, seconds in (("packed", packed), ("plain", plain)):
        print(f"{name}: {gib / statistics.median(seconds):.2f} GiB/s median, {gib / max(seconds):.2f} slowest")
    share = statistics.median(plain) / statistics.median(packed)
    allowed = 2 * BUFFER_MIB + TENSOR_MIB + SLACK_MIB
    print(
        f"packed is {share:.0%} of plain; {arguments.mib} MiB, {arguments.rounds} rounds, {arguments.ranks} receivers"
    )
    print(
        f"memory beside the tensors: receiver {received / MIB:.0f} MiB, sender {sent / MIB:.0f} MiB, {allowed} allowed"
    )
    return 0 if share >= 0.5 and max(received, sent) <= allowed * MIB else 1


if __name__ == "__main__":
    sys.exit(main())
