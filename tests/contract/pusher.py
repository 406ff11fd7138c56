"""A trainer of one engine, in a process of its own under an interpreter that has torch: sends a checkpoint's tensors.

python -m tests.contract.pusher: a line of JSON on standard input per push, as `Trainer` in test_pushes.py writes it,
and a line of JSON for what came of it. It reads the tensors by safetensors and sends them by rollfleet_trainer, as a
trainer would send its model.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.gloo import GlooSender
from rollfleet_trainer.shm import ShmSender


class Silent(GuardClient):
    """As vLLM's own client: it knows no digest."""

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        super().finish_weight_update(weight_version)


class Breaking(dict[str, torch.Tensor]):
    """Tensors of which one cannot be gathered."""

    def items(self) -> Any:
        yield from self._some()

    def _some(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, item in enumerate(super().items()):
            if place == len(self) // 2:
                raise ValueError("the gather failed on rank 3")
            yield item


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
    return Breaking(found) if settings.get("breaks") else found


KEPT: dict[str, GlooSender | ShmSender] = {}  # senders whose group outlives a push, by the group's name


def push(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Send once; what came of it. A group that is kept is formed by the first push and used by the next ones."""
    kept = settings.get("keeps", "")
    try:
        if kept not in KEPT:
            return _push_anew(settings, kept)
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
    options = {"group": settings.get("group", ""), "buffer_bytes": settings.get("bufferBytes", 1 << 16)}
    backend = settings["backend"]
    sender = (
        GlooSender([target], "127.0.0.1", timeout_s=20, **options)
        if backend == "gloo"
        else ShmSender([target], **options)
    )
    if kept:
        KEPT[kept] = sender
    try:
        sender.init()
        return {"digest": sender.send(tensors_of(settings), settings.get("label"))}
    finally:
        if not kept:
            sender.close()
            client.close()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(push(json.loads(line))), flush=True)
