"""The one transfer engine of a worker: takes an update from a staged checkpoint through vLLM's four phases.

A phase that fails does not raise. vLLM's executor reads the workers' answers in order and stops at the first error, so
with several workers the answers of the others stay in their queues and are taken for answers to the next call
(v1/executor/multiproc_executor.py, 0.27.1). Instead the failure is recorded, the phases after it do nothing, and the
adapter reads every worker's report after each phase.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollfleet_engine.vllm.layers import (
    TORCH_DTYPES,
    LayerCount,
    abandon,
    compare_layers,
    loaded_layers,
    measure_layers,
    summarise,
)
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import StagedTensor
from rollfleet_engine.weights.transfer import SOURCE_TYPE, CheckpointReader, CheckpointUpdate
from rollfleet_kernels.digest import TensorDigest, lanes, version_digest, warm_up
from rollfleet_protocol.state import FailureReason

logger = logging.getLogger(__name__)
DIGEST_THREADS = 2


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Phase 1. A checkpoint needs no group, so there is nothing but the kind of source."""

    type: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Phase 3: CheckpointUpdate.to_wire()."""

    type: str
    files: list[dict[str, Any]]
    tensors: list[list[Any]]
    digest: str


@dataclass
class Report:
    """What this worker did since the last start; plain values, since it goes through vLLM's RPC."""

    started: bool = False
    finished: bool = False
    tensors: int = 0
    bytes: int = 0
    layers: int = 0
    digest: str | None = None  # of what was received
    failure: dict[str, str] | None = None  # reason, message
    problems: list[str] = field(default_factory=list)  # layers that were not fully loaded

    def fail(self, reason: FailureReason, message: str) -> None:
        """Record the first failure; what follows from it is noise."""
        if self.failure is None:
            self.failure = {"reason": reason.value, "message": message}


class RollfleetWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM makes one per worker, right after the model was loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._report = Report()
        self._expected: dict[str, LayerCount] = {}
        self._unmeasured = ""  # why there are no expected counts
        warm_up()
        self._measure()

    def _measure(self) -> None:
        try:
            tensors = read_model_tensors(Path(self.model_config.model)).tensors
            self._expected = dict(measure_layers(self.model, tensors))
        except CheckpointError as error:
            self._unmeasured = error.message
        except Exception as error:  # loaders of any model run here; the engine can serve without updates
            logger.exception("rollfleet: cannot count the elements that a checkpoint loads")
            self._unmeasured = f"{type(error).__name__}: {error}"

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Phase 1."""
        if init_info.type != SOURCE_TYPE:
            raise ValueError(f"source type {init_info.type!r} is not known, only {SOURCE_TYPE!r}")

    def start_weight_update(self) -> None:
        """Phase 2: layers give up their tensors and count what they get."""
        self._report = Report(started=True, layers=loaded_layers(self._expected))
        if not self._expected:
            self._report.fail(
                FailureReason.COVERAGE_FAILED,
                f"this model's layers cannot be counted, so no update of it can be trusted: {self._unmeasured}",
            )
            return
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Phase 3: read, digest, load, one tensor at a time."""
        if self._report.failure:
            return
        try:
            self._load(CheckpointUpdate.from_wire(asdict(update_info)))
        except CheckpointError as error:
            self._fail(error.reason, error.message)
        except Exception as error:  # the boundary of the RPC, see the module's text
            logger.exception("rollfleet: the model did not take the weights")
            self._fail(FailureReason.TRANSFER_FAILED, f"{type(error).__name__}: {error}")

    def _load(self, update: CheckpointUpdate) -> None:
        received: list[TensorDigest] = []
        with CheckpointReader(update) as reader, ThreadPoolExecutor(DIGEST_THREADS) as pool:
            self.model.load_weights(self._tensors(update, reader, pool, received))
        if len(received) != len(update.tensors):
            raise RuntimeError(f"the model took {len(received)} of {len(update.tensors)} tensors")
        self._report.digest = version_digest(received)

    def _tensors(
        self, update: CheckpointUpdate, reader: CheckpointReader, pool: ThreadPoolExecutor, received: list[TensorDigest]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor's bytes are checked before any layer sees them."""
        for tensor in update.tensors:
            raw = torch.empty(tensor.nbytes, dtype=torch.uint8)
            reader.read(tensor, memoryview(raw.numpy()))
            found = lanes(raw.numpy(), executor=pool)
            reader.require_digest(tensor, found)
            received.append(TensorDigest(tensor.name, tensor.dtype, tensor.shape, found))
            self._report.tensors += 1
            self._report.bytes += tensor.nbytes
            yield tensor.name, _shaped(raw, tensor)

    def finish_weight_update(self) -> None:
        """Phase 4: count, and only then let vLLM process what is left."""
        if self._report.failure is None:
            self._report.problems = compare_layers(self.model, self._expected)
            if self._report.problems:
                self._fail(FailureReason.COVERAGE_FAILED, summarise(self._report.problems))
        if self._report.failure is None:
            finalize_layerwise_reload(self.model, self.model_config)
            self._report.finished = True

    def _fail(self, reason: FailureReason, message: str) -> None:
        self._report.fail(reason, message)
        abandon(self.model)

    def reset(self) -> None:
        """Forget an update that did not finish; the weights may then be a mixture."""
        abandon(self.model)
        self.reset_weight_update_target()
        self._report = Report()

    def report(self) -> dict[str, Any]:
        """What happened since the last start."""
        return asdict(self._report)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM's base class asks for a sender on the trainer's side; a checkpoint has none."""
        raise TypeError("a checkpoint is not sent: the trainer writes it, and a WeightVersion names it")


def _shaped(raw: torch.Tensor, tensor: StagedTensor) -> torch.Tensor:
    return raw.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)
