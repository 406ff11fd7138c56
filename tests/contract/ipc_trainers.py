"""vLLM's own trainer's side of ipc, with what vLLM-Ascend changes of it: the NPU's name, how the device is waited for.

Releases have two of them: an engine over a client (0.27 on), and before a static function that is handed the sending.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from vllm.distributed.weight_transfer import base, ipc_engine
from vllm_ascend.distributed.weight_transfer.npu_ipc_engine import npu_generate_uuid


def send(client: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Through all four phases."""
    if hasattr(base, "WeightSource"):
        _by_engine(client, tensors)
    else:
        _by_function(client, tensors)


def _by_engine(client: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    class Source(base.WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            raise TypeError("ipc asks for none")

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

    class Theirs(ipc_engine.IPCTrainerWeightTransferEngine):  # type: ignore[misc]
        def __init__(self, *, client: Any, source: Any, is_sender: bool = True, **_: Any) -> None:
            self.client, self.source, self.is_sender, self.packed = client, source, is_sender, False
            self.gpu_uuid = npu_generate_uuid()

        _post_send_sync = staticmethod(_wait_for_device)

    engine = Theirs.trainer_init(ipc_engine.IPCTrainerInitInfo(rank=0), client=client, source=Source())
    engine.send_weights()


def _by_function(client: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    theirs = ipc_engine.IPCWeightTransferEngine
    theirs._post_send_sync = staticmethod(_wait_for_device)

    def update(info: Any) -> None:
        client.update_weights(asdict(info))

    client.init_weight_transfer_engine({})
    client.start_weight_update()
    theirs._send_unpacked(iter(tensors.items()), ipc_engine.IPCTrainerSendWeightsArgs(update), npu_generate_uuid())
    client.finish_weight_update()


def _wait_for_device() -> None:
    torch.npu.current_stream().synchronize()
