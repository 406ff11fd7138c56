"""A trainer that sends by ipc, over the CPU's stand-in of torch_npu (tests/support/ascend), in a process of its own.

python -m tests.contract.ipc_pusher: lines of JSON as tests.contract.pusher takes them. `how` says who sends: our
sender; vLLM's own trainer engine with our client, or with vLLM's form of HTTP bodies, which is a pickle; or somebody
hostile.
"""

import base64
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch_npu  # noqa: F401 - before vLLM's module binds reduce_tensor, as on an NPU
from torch_npu.multiprocessing.reductions import readers
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.clients import _json_safe_update_info
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import npu_generate_uuid

from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.ipc import IpcSender
from tests.contract.pusher import tensors_of


class Pickling(GuardClient):
    """Bodies as vLLM's HTTPVLLMWeightSyncClient makes them, with the token that it lacks."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(_json_safe_update_info(update_info))


class Canary:
    """Whoever unpickles it creates a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self._path,)


class Hostile(Pickling):
    """Its handles are a canary."""

    canary = ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        pickled = base64.b64encode(pickle.dumps([Canary(self.canary)])).decode()
        super().update_weights(update_info | {"ipc_handles": None, "ipc_handles_pickled": pickled})


class Source(WeightSource):
    """A checkpoint's tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[Any]:
        raise TypeError("ipc asks for none")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


class TheirTrainer(IPCTrainerWeightTransferEngine):
    """vLLM's, with what vLLM-Ascend changes of it: the NPU's name and how the device is waited for."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True, **_: Any) -> None:
        self.client, self.source, self.is_sender, self.packed = client, source, is_sender, False
        self.gpu_uuid = npu_generate_uuid()

    @staticmethod
    def _post_send_sync() -> None:
        torch.npu.current_stream().synchronize()


CLIENTS = {"pickled": Pickling, "hostile": Hostile}


def push(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Send once; what came of it, and how many descriptions nobody has let go of."""
    before = readers()
    os.environ["STAND_IN_NPU"] = settings.get("npu", "0")
    how = settings.get("how", "sender")
    client = CLIENTS.get(how, GuardClient)(
        settings["url"],
        lambda: str(settings["token"]),
        ca=settings["ca"],
        server_name=settings["serverName"],
        timeout_s=60,
        name="engine-0",
    )
    if isinstance(client, Hostile):
        client.canary = settings["canary"]
    try:
        found = _send(settings, how, client)
    except (TransferError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        client.close()
    return found | {"readers": readers() - before}


def _send(settings: Mapping[str, Any], how: str, client: GuardClient) -> dict[str, Any]:
    tensors = tensors_of(settings)
    if how != "sender":
        engine = TheirTrainer.trainer_init(IPCTrainerInitInfo(rank=0), client=client, source=Source(tensors))
        engine.send_weights()
        return {}
    target = Target(client, settings["rankOffset"], settings["workers"])
    with IpcSender([target], buffer_bytes=settings.get("bufferBytes", 1 << 16)) as sender:
        sender.init()
        return {"digest": sender.send(tensors, settings.get("label"))}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(push(json.loads(line))), flush=True)
