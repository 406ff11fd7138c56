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
from collections.abc import Mapping
from typing import Any

import torch_npu  # noqa: F401 - before vLLM's module binds reduce_tensor, as on an NPU
from torch_npu.multiprocessing.reductions import readers

from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.ipc import IpcSender
from tests.contract import ipc_trainers
from tests.contract.pusher import tensors_of


class Pickling(GuardClient):
    """Bodies as vLLM's own HTTP client makes them (0.27: HTTPVLLMWeightSyncClient, 0.23: _do_send), with our token."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        pickled = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
        super().update_weights({**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled})


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
        ipc_trainers.send(client, tensors)
        return {}
    target = Target(client, settings["rankOffset"], settings["workers"])
    with IpcSender([target], buffer_bytes=settings.get("bufferBytes", 1 << 16)) as sender:
        sender.init()
        return {"digest": sender.send(tensors, settings.get("label"))}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(push(json.loads(line))), flush=True)
