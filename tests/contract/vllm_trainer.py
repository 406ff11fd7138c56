"""vLLM's own trainer side over a push of ours: its protocol, its ModuleSource, its TrainerWeightTransferEngine.

vLLM 0.27.1 has one stateful trainer engine, for CUDA IPC, which needs a GPU. So one by gloo is written here on its base
class, and made by its factory, as another backend would be.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from rollfleet_trainer.push import Push


class Policy(torch.nn.Module):
    """A module whose parameters bear the names of a checkpoint's tensors, dots and all."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in tensors.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._tensors.items())


def send_by_vllm(push: Push, tensors: Mapping[str, torch.Tensor], *, digested: bool) -> None:
    """One round of a trainer engine of vLLM's kind."""
    from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415 - takes seconds, and few tests need it
        ModuleSource,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        VLLMWeightSyncClient,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415

    assert isinstance(push, VLLMWeightSyncClient)

    @dataclass
    class GlooInitInfo(TrainerInitInfo):
        backend: ClassVar[str] = "gloo-of-a-test"

    class GlooEngine(TrainerWeightTransferEngine[GlooInitInfo]):
        init_info_cls = GlooInitInfo

        @classmethod
        def trainer_init(cls, init_info: GlooInitInfo, *, client: Any, source: Any) -> "GlooEngine":
            engine = cls(client=client, source=source, is_sender=init_info.is_sender)
            size = push.world_size
            store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
            info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": size}
            joining = threading.Thread(target=client.init_weight_transfer_engine, args=(info,))
            joining.start()
            engine.group = dist.ProcessGroupGloo(store, 0, size)
            joining.join()
            return engine

        def send_weights(self) -> None:
            names = [meta.name for meta in self.source.metadata()]
            self.client.start_weight_update()
            for name, tensor in self.source:
                meta = next(each for each in self.source.metadata() if each.name == name)
                assert (meta.dtype, tuple(meta.shape)) == (tensor.dtype, tuple(tensor.shape))
                info = {
                    "names": [name],
                    "dtype_names": [str(tensor.dtype).removeprefix("torch.")],
                    "shapes": [list(tensor.shape)],
                    "packed_buffer_size_bytes": 4 << 30,
                }
                receiving = threading.Thread(target=self.client.update_weights, args=(info,))
                receiving.start()
                self.group.broadcast([tensor.contiguous().view(torch.uint8).reshape(-1)]).wait()
                receiving.join()
            assert names
            self.client.finish_weight_update()

    registry = WeightTransferTrainerFactory._registry
    registry.setdefault("gloo-of-a-test", lambda: GlooEngine)
    module_source = ModuleSource(Policy(tensors))
    source = push.source(module_source) if digested else module_source
    WeightTransferTrainerFactory.trainer_init(GlooInitInfo(rank=0), client=push, source=source).send_weights()
