"""The trainer of `make bench-loops`: one process with torch and the weights, which updates engines by three ways.

A line of JSON on standard input per order, one on standard output for what came of it. All ways send the same tensors
by gloo, through two buffers of the same size. Groups are formed once, by the first update of each way, and kept: as
vLLM's examples do (examples/rl/rlhf_http_nccl.py), and rollfleet while the members are the same.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import requests
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from rollfleet_protocol.pushes import PACKED_BUFFER_BYTES
from rollfleet_trainer import RolloutFleet
from rollfleet_trainer.gloo import BUFFERS, _packed
from rollfleet_trainer.tensors import Sent, listed, nbytes
from rollfleet_transport.gloo import group_of, own_address

TIMEOUT_S = 60.0
Tensors = Mapping[str, torch.Tensor]


class NotDigested(Sent):
    """vLLM's trainers do not digest what they send."""

    def add(self, *_: Any) -> None:
        """Nothing."""


class Group:
    """Rank 0 of a group with these engines, a rank each."""

    def __init__(self, name: str, urls: Sequence[str]) -> None:
        self.name = name
        self._address = own_address(str(urlsplit(urls[0]).hostname), 80)
        self._size = len(urls) + 1
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(self._address, 0, self._size, True, self._timeout, wait_for_workers=False)
        self._group: Any = None

    def init_info(self, rank: int) -> dict[str, Any]:
        """For the engine with this rank."""
        where = {"master_address": self._address, "master_port": int(self._store.port)}
        return where | {"rank_offset": rank, "world_size": self._size, "group": self.name}

    def form(self) -> None:
        """Blocks until the engines are there."""
        self._group = group_of(self._store, 0, self._size, self._timeout, self._address)

    def update_info(self, tensors: Tensors) -> dict[str, Any]:
        """What comes."""
        return listed(tensors) | {"packed_buffer_size_bytes": PACKED_BUFFER_BYTES, "group": self.name}

    def broadcast(self, tensors: Tensors) -> None:
        """All of them, while the engines receive."""
        total = sum(nbytes(each) for each in tensors.values())
        free = [torch.empty(min(PACKED_BUFFER_BYTES, total), dtype=torch.uint8) for _ in range(BUFFERS)]
        going: deque[tuple[torch.Tensor, Any]] = deque()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for buffer, size in _packed(tensors, NotDigested(), free):
            going.append((buffer, self._group.broadcast([buffer[:size]], options)))
            if len(going) == BUFFERS:
                sent, work = going.popleft()
                work.wait()
                free.append(sent)
        for _, work in going:
            work.wait()


class InSequence:
    """Engine after engine by vLLM's own HTTP client, in the order of its examples."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._aside = ThreadPoolExecutor(1)
        self._groups: list[Group] = []

    def update(self, tensors: Tensors) -> None:
        """All engines."""
        if not self._groups:
            self._groups = [self._joined(url) for url in self._urls]
        for url, group in zip(self._urls, self._groups, strict=True):
            self._one(url, group, tensors)

    def _joined(self, url: str) -> Group:
        group = Group(f"sequence {url}", [url])
        joining = self._aside.submit(HTTPVLLMWeightSyncClient(url).init_weight_transfer_engine, group.init_info(1))
        group.form()
        joining.result()
        return group

    def _one(self, url: str, group: Group, tensors: Tensors) -> None:
        client = HTTPVLLMWeightSyncClient(url)
        requests.post(f"{url}/pause", timeout=TIMEOUT_S).raise_for_status()
        client.start_weight_update()
        self.send(client, group, tensors)
        client.finish_weight_update()
        requests.post(f"{url}/resume", timeout=TIMEOUT_S).raise_for_status()

    def send(self, client: HTTPVLLMWeightSyncClient, group: Group, tensors: Tensors) -> None:
        """Between start and finish."""
        receiving: Future[None] = self._aside.submit(client.update_weights, group.update_info(tensors))
        group.broadcast(tensors)
        receiving.result()


class AtOnce:
    """All engines at once, by hand with asyncio and httpx."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._group: Group | None = None

    def update(self, tensors: Tensors) -> None:
        """All engines."""
        asyncio.run(self._update(tensors))

    async def _update(self, tensors: Tensors) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            if self._group is None:
                self._group = await self._joined(client)
            await self._everywhere(client, "pause")
            await self._everywhere(client, "start_weight_update")
            info = {"update_info": self._group.update_info(tensors)}
            receiving = asyncio.create_task(self._everywhere(client, "update_weights", info))
            await asyncio.to_thread(self._group.broadcast, tensors)
            await receiving
            await self._everywhere(client, "finish_weight_update")
            await self._everywhere(client, "resume")

    async def _joined(self, client: httpx.AsyncClient) -> Group:
        group = Group("at once", self._urls)
        bodies = [{"init_info": group.init_info(rank)} for rank in range(1, len(self._urls) + 1)]
        joining = asyncio.create_task(self._everywhere(client, "init_weight_transfer_engine", *bodies))
        await asyncio.to_thread(group.form)
        await joining
        return group

    async def _everywhere(self, client: httpx.AsyncClient, path: str, *bodies: Any) -> None:
        """One body for all, or one for each, or none."""
        each = bodies if len(bodies) == len(self._urls) else (bodies or (None,)) * len(self._urls)
        calls = (client.post(f"{url}/{path}", json=body) for url, body in zip(self._urls, each, strict=True))
        for answer in await asyncio.gather(*calls):
            answer.raise_for_status()


class Rollfleet:
    """RolloutFleet, with the operator that the cluster has."""

    def __init__(self, fleet: str, kubeconfig: str) -> None:
        self._fleet = RolloutFleet(fleet, kubeconfig)

    def update(self, tensors: Tensors) -> dict[str, Any]:
        """What the operator measured besides."""
        update = self._fleet.blocking.update(tensors, pause="abort")
        return {"pausedS": update.paused_s, "transferS": update.transfer_s, "phases": dict(update.phase_seconds)}

    def close(self) -> None:
        """Give the Lease back."""
        self._fleet.blocking.close()


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """All of a checkpoint's."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def main() -> None:
    """Orders until the input ends: the first one says who and what."""
    begun = json.loads(sys.stdin.readline())
    weights = [tensors_of(folder) for folder in begun["checkpoints"]]
    fleet = Rollfleet(begun["fleet"], begun["kubeconfig"])
    ways: dict[str, Any] = {
        "rollfleet": fleet,
        "sequence": InSequence(begun["urls"]),
        "asyncio": AtOnce(begun["urls"]),
    }
    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        told = ways[order["way"]].update(weights[order["weights"]])
        print(json.dumps({"seconds": time.monotonic() - began} | (told or {})), flush=True)
    fleet.close()


if __name__ == "__main__":
    main()
