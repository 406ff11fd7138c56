"""vLLM-Ascend's own trainer engine of ipc, from a checkout, sends to our backend: python -m tests.vllm.their_trainer.

VLLM_ASCEND names the checkout; the stand-in (tests/support/ascend) runs its modules over the CPU. What it sends goes
through our client's form and is read here, without a guard. Prints a line of JSON: the digest of each way of sending,
and of the tensors themselves.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import torch
import torch_npu  # noqa: F401 - before vLLM's module binds reduce_tensor, as on an NPU
from vllm_ascend.distributed.weight_transfer import npu_ipc_engine as theirs

from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_kernels.digest import lanes
from rollfleet_protocol.ipc import plain_handles
from rollfleet_trainer.tensors import Sent, raw_bytes
from tests.vllm.ipc_ranks import DEADLINE_S, MODEL, tensors

BUFFER = 8448  # bytes: the first tensor and a little, so that there are two buffers


class Client:
    """vLLM's four methods, as GuardClient puts them into JSON."""

    def __init__(self) -> None:
        self._receiving = Receiving(lambda: MODEL, Seat(0, 1), lanes)
        self.calls = 0
        self.digest = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._receiving.init("ipc", init_info, DEADLINE_S)

    def start_weight_update(self) -> None:
        self._receiving.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = {name: value for name, value in update_info.items() if value is not None}
        info["ipc_handles"] = plain_handles(info["ipc_handles"])
        self.calls += 1
        with closing(self._receiving.receive(json.loads(json.dumps(info)), DEADLINE_S)) as incoming:
            for _ in incoming:
                pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.digest = self._receiving.finish()


def send(packed: bool) -> dict[str, Any]:
    """By their engine, from its making to its end."""
    client = Client()
    info = theirs.NPUIPCTrainerInitInfo(rank=0, packed=packed, packed_buffer_size_bytes=BUFFER)
    engine = theirs.NPUIPCTrainerWeightTransferEngine.trainer_init(
        info, client=client, source=list(tensors("").items())
    )
    engine.send_weights()
    return {"calls": client.calls, "digest": client.digest}


if __name__ == "__main__":
    torch.accelerator.current_device_index = lambda: 0  # of no device, torch says none
    sent = Sent()
    for name, tensor in tensors("").items():
        sent.add(name, tensor, raw_bytes(tensor))
    print(json.dumps({"sent": sent.digest(), "each": send(packed=False), "packed": send(packed=True)}), flush=True)
