"""vLLM's own way to take weights, over gloo: for the engines without a guard of `make bench-loops`.

vLLM has no transfer engine for CPUs. This one does what its engine for NCCL does (distributed/weight_transfer/
nccl_engine.py, 0.27.1), and nothing besides: layers are prepared, tensors loaded as they come, layers processed.
Nothing is digested or counted, and errors are raised. The bytes come by the product's backend gloo, as in a fleet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollfleet_engine.vllm.layers import TORCH_DTYPES, process_tied
from rollfleet_engine.vllm.plugin import register
from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.gloo import GlooBackend
from tests.bench.plain_words import BACKEND

TIMEOUT_S = 60.0

register()  # what keeps a CPU engine from starving its neighbours


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Phase 1. An engine may be in several groups, by name: the bench has a group for each way to update."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Phase 3."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed_buffer_size_bytes: int
    group: str


class PlainGlooEngine(WeightTransferEngine):  # type: ignore[misc]
    """One per worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *made_with: Any) -> None:
        super().__init__(*made_with)
        self._groups: dict[str, GlooBackend] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join."""
        parallel = self.parallel_config
        seat = Seat(parallel.rank, parallel.world_size)
        self._groups[init_info.group] = backend = GlooBackend()
        backend.init(asdict(init_info), seat, TIMEOUT_S)

    def start_weight_update(self) -> None:
        """Prepare the layers."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what comes."""
        info = asdict(update_info)
        self.model.load_weights(self._incoming(self._groups[info.pop("group")], info))

    def _incoming(self, backend: GlooBackend, info: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for one in backend.receive(info, TIMEOUT_S):
            raw = torch.from_numpy(one.raw)
            yield one.meta.name, raw.view(TORCH_DTYPES[one.meta.dtype]).view(one.meta.shape)

    def finish_weight_update(self) -> None:
        """Process the layers, on the CPU also those that share a weight."""
        finalize_layerwise_reload(self.model, self.model_config)
        process_tied(self.model)

    def shutdown(self) -> None:
        """Leave all groups."""
        for backend in self._groups.values():
            backend.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM's base class asks for it; the bench's trainer has its own."""
        raise TypeError("the bench's trainer sends by tests/bench/loops_trainer.py")


WeightTransferEngineFactory.register_engine(BACKEND, PlainGlooEngine)


class PlainExtension:
    """Nothing: vLLM imports this module for it in every worker, before it looks for the transfer engine."""
