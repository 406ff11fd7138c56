"""A trainer of one engine, in a process of its own under an interpreter that has torch: sends a checkpoint's tensors.

python -m tests.contract.pusher: a line of JSON on standard input per push, as `Trainer` in test_pushes.py writes it,
and a line of JSON for what came of it. It reads the tensors by safetensors and sends them by rollfleet_trainer, as a
trainer would send its model.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.gloo import GlooSender
from rollfleet_trainer.looks import Seat
from rollfleet_trainer.push import Door, Push
from rollfleet_trainer.sender import Sender
from rollfleet_trainer.shm import ShmSender

HANG_S = 30.0


class Silent(GuardClient):
    """As vLLM's own client: it says nothing at the start of an update, and knows no digest."""

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        super().start_weight_update()

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        super().finish_weight_update(weight_version)


class Breaking(dict[str, torch.Tensor]):
    """Tensors of which one cannot be gathered: half-way something happens."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], how: str) -> None:
        super().__init__(tensors)
        self._happen = {"breaks": fail, "dies": die, "hangs": hang}[how]

    def items(self) -> Any:
        yield from self._some()

    def _some(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, item in enumerate(super().items()):
            if place == len(self) // 2:
                self._happen()
            yield item


def fail() -> None:
    raise ValueError("the gather failed on rank 3")


def die() -> None:
    os._exit(9)


def hang() -> None:
    threading.Event().wait(HANG_S)


def tensors_of(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All of the checkpoint's, changed as the settings say."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(settings["checkpoint"]).glob("*.safetensors")):
        found |= load_file(path)
    for name in settings.get("omit", ()):
        del found[name]
    for name in settings.get("halve", ()):
        found[name] = found[name][: len(found[name]) // 2].clone()
    for name in settings.get("add", ()):
        found[name] = torch.zeros(3)
    how = settings.get("half_way")
    return Breaking(found, how) if how else found


KEPT: dict[str, Sender] = {}  # senders whose group outlives a push, by the group's name


def push(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Send once; what came of it. A group that is kept is formed by the first push and used by the next ones."""
    kept = settings.get("keeps", "")
    try:
        if kept not in KEPT:
            return _push_anew(settings, kept)
        if settings.get("joins"):
            KEPT[kept].init()
        return {"digest": KEPT[kept].send(tensors_of(settings), settings.get("label"))}
    except (TransferError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _push_anew(settings: Mapping[str, Any], kept: str) -> dict[str, Any]:
    client = (Silent if settings.get("silent") else GuardClient)(
        settings["url"],
        lambda: str(settings["token"]),
        ca=settings["ca"],
        server_name=settings["serverName"],
        timeout_s=60,
        name="engine-0",
    )
    target = Target(client, settings["rankOffset"], settings["workers"])
    sender = sender_of(settings, target)
    if kept:
        KEPT[kept] = sender
    try:
        if settings.get("helper"):
            return _sent_by_their_helper(settings, client)
        sender.init()
        return {"digest": sender.send(tensors_of(settings), settings.get("label"))}
    finally:
        if not kept:
            sender.close()
            client.close()


def _sent_by_their_helper(settings: Mapping[str, Any], client: GuardClient) -> dict[str, Any]:
    """As docs/trainer.md has it: the group is ours, what sends is vLLM-Ascend's static function."""
    from vllm_ascend.distributed.weight_transfer.hccl_engine import HCCLWeightTransferEngine  # noqa: PLC0415

    from rollfleet_trainer.hccl import HcclSender  # noqa: PLC0415 - with the stand-in on the path only

    seat = Seat("engine-0", "", "", settings["url"], settings["rankOffset"], settings["workers"])
    u = Push(int(settings["label"]), [seat], [Door(client)], settings.get("group", ""), lambda: None)
    buffers = {"packed": True, "packed_buffer_size_bytes": 1 << 12}
    with closing(u), HcclSender([u.as_target], group=u.group, timeout_s=20) as sender:
        sender.init()
        source = u.source(tensors_of(settings))
        u.start_weight_update()
        with ThreadPoolExecutor(1) as beside:
            receiving = beside.submit(u.update_weights, described(source.metadata()) | buffers)
            HCCLWeightTransferEngine.trainer_send_weights(iter(source), {"group": sender.communicator, **buffers})
            receiving.result()
        u.finish_weight_update()
    return {"digest": u._digest}


def described(metadata: Iterable[Any]) -> dict[str, Any]:
    """vLLM's ParamMeta, as update_weights takes it."""
    rows = [(each.name, str(each.dtype).removeprefix("torch."), list(each.shape)) for each in metadata]
    return dict(zip(("names", "dtype_names", "shapes"), map(list, zip(*rows, strict=True)), strict=True))


def sender_of(settings: Mapping[str, Any], target: Target) -> Sender:
    """Of the backend that is asked for; hccl needs its stand-in on the path."""
    options = {"group": settings.get("group", ""), "buffer_bytes": settings.get("bufferBytes", 1 << 16)}
    backend = settings["backend"]
    if backend == "gloo":
        return GlooSender([target], "127.0.0.1", timeout_s=20, **options)
    if backend == "shm":
        return ShmSender([target], **options)
    sender: type[Sender] = import_module("rollfleet_trainer.hccl").HcclSender
    return sender([target], timeout_s=20, **options)  # type: ignore[call-arg]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(push(json.loads(line))), flush=True)
