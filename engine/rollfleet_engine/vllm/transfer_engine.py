"""The one transfer engine of a worker: takes an update from a staged checkpoint, or from a trainer by whatever backend
the update names, through vLLM's four phases.

A phase that fails does not raise. vLLM's executor reads the workers' answers in order and stops at the first error, so
with several workers the answers of the others stay in their queues and are taken for answers to the next call
(v1/executor/multiproc_executor.py, 0.27.1). Instead the failure is recorded, the phases after it do nothing, and the
adapter reads every worker's report after each phase.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rollfleet_engine.vllm.layers import (
    TORCH_DTYPES,
    LayerCount,
    abandon,
    compare_layers,
    keep_unloadable,
    loaded_layers,
    measure_layers,
    process_tied,
    summarise,
)
from rollfleet_engine.vllm.phases import ENGINE_DOES_ALL, TransferEngineBase
from rollfleet_engine.weights.backends.base import HostBytes, Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.coverage import ModelTensors, read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_engine.weights.own_copy import OwnCopy
from rollfleet_engine.weights.transfer import SOURCE_TYPE, CheckpointReader, CheckpointUpdate
from rollfleet_kernels.digest import Buffer, DeviceBytes, Lanes, TensorDigest, lanes, version_digest, warm_up
from rollfleet_protocol.state import FailureReason

logger = logging.getLogger(__name__)
DIGEST_THREADS = 2


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Phase 1. A checkpoint needs no group, so there is nothing but the kind of source; a push has all of it."""

    type: str
    backend: str = ""
    info: dict[str, Any] = field(default_factory=dict)  # the trainer's own
    deadline_s: float = 0.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Phase 3: CheckpointUpdate.to_wire(), or the trainer's own dictionary."""

    type: str
    info: dict[str, Any]
    deadline_s: float = 0.0


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


class RollfleetWeightTransferEngine(TransferEngineBase):  # type: ignore[misc]
    """vLLM makes one per worker, right after the model was loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    model_config: Any = None

    def __init__(self, config: Any, *made_with: Any) -> None:
        """As vLLM makes it: with its configuration, device and model; in 0.23 with parallel_config and model."""
        super().__init__(config, *made_with)
        self._report = Report()
        self._expected: dict[str, LayerCount] = {}
        self._pool = ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="rollfleet-digest")
        self._receiving = Receiving(self._model_tensors, self._seat(), self._lanes)
        self._unmeasured = ""  # why there are no expected counts
        self._elsewhere = self.parallel_config.node_rank > 0  # the guard's open files are out of reach
        self._copy: OwnCopy | None = None
        self._measured = False
        warm_up()
        if ENGINE_DOES_ALL:
            self.know(self.model_config)

    def know(self, model_config: Any) -> None:
        """Which model it is; counts its elements, once. Of 0.23 only the worker can say it, when it is first asked."""
        if not self._measured:
            self._measured, self.model_config = True, model_config
            self._measure()

    @cache  # noqa: B019 - one engine per process, and it lives as long
    def _model_tensors(self) -> ModelTensors:
        return read_model_tensors(Path(self.model_config.model))

    def _seat(self) -> Seat:
        """Places as vLLM's own back ends number them: first all workers of data-parallel index 0."""
        parallel = self.parallel_config
        return Seat(
            worker=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            workers=parallel.world_size * parallel.data_parallel_size,
        )

    def _lanes(self, raw: Buffer, word_offset: int) -> Lanes:
        return lanes(raw, word_offset, executor=self._pool)

    def _measure(self) -> None:
        try:
            tensors = self._model_tensors().tensors
            self._expected = dict(measure_layers(self.model, tensors))
        except CheckpointError as error:
            self._unmeasured = error.message
        except Exception as error:  # loaders of any model run here; the engine can serve without updates
            logger.exception("rollfleet: cannot count the elements that a checkpoint loads")
            self._unmeasured = f"{type(error).__name__}: {error}"

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Phase 1. A checkpoint has no group to join."""
        if init_info.type == SOURCE_TYPE:
            return
        self._report = Report()
        with self._recording("this worker could not join the trainer's group"):
            self._receiving.init(init_info.backend, init_info.info, init_info.deadline_s)

    def start_weight_update(self) -> None:
        """Phase 2: layers give up their tensors and count what they get."""
        self._report = Report(started=True, layers=loaded_layers(self._expected))
        self._receiving.start()
        if not self._expected:
            self._report.fail(
                FailureReason.COVERAGE_FAILED,
                f"this model's layers cannot be counted, so no update of it can be trusted: {self._unmeasured}",
            )
            return
        with self._recording("layers could not be made ready for new weights"):
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
        """Phase 3: read, digest, load, one tensor at a time, by the model's own loaders."""
        if self._report.failure:
            return
        with self._recording("the model did not take the weights"):
            if update_info.type == SOURCE_TYPE:
                self._load(CheckpointUpdate.from_wire(update_info.info))
            else:
                self._take(update_info)

    @contextmanager
    def _recording(self, what: str) -> Iterator[None]:
        """The boundary of the RPC, see the module's text."""
        try:
            yield
        except (CheckpointError, PushError) as error:
            self._fail(error.reason, error.message)
        except Exception as error:
            logger.exception("rollfleet: %s", what)
            self._fail(FailureReason.TRANSFER_FAILED, f"{what}: {type(error).__name__}: {error}")

    def _take(self, update_info: UpdateInfo) -> None:
        with closing(self._receiving.receive(update_info.info, update_info.deadline_s)) as incoming:
            self.model.load_weights(
                (each.meta.name, _shaped(_tensor_of(each.raw), each.meta.dtype, each.meta.shape)) for each in incoming
            )
            if next(incoming, None) is not None:
                raise RuntimeError(f"the model took {len(self._receiving.received) - 1} tensors and left the rest")
        self._report.tensors, self._report.bytes = len(self._receiving.received), self._receiving.bytes

    def _load(self, update: CheckpointUpdate) -> None:
        received: list[TensorDigest] = []
        with self._reader(update) as reader:
            self.model.load_weights(self._tensors(update, reader, received))
        if len(received) != len(update.tensors):
            raise RuntimeError(f"the model took {len(received)} of {len(update.tensors)} tensors")
        self._report.digest = version_digest(received)

    def _reader(self, update: CheckpointUpdate) -> CheckpointReader:
        if not self._elsewhere:
            return CheckpointReader(update)
        if self._copy is None or self._copy.digest != update.digest:
            message = "this node has no copy of the checkpoint staged: Prepare again"
            raise CheckpointError(FailureReason.CHECKPOINT_CHANGED, message)
        return self._copy.reader()

    def share(self, wire: dict[str, Any], *, hashes: bool) -> None:
        """Start to stage this node's own copy of what the guard has staged; nothing on the guard's own node."""
        self._forget_copy()
        if self._elsewhere:
            self._copy = OwnCopy(CheckpointUpdate.from_wire(wire), hashes=hashes)

    def shared(self) -> dict[str, Any]:
        """Whether it is there, or why not."""
        failure = None if self._copy is None else self._copy.failure
        return {
            "ready": self._copy is None or self._copy.done,
            "node": int(self.parallel_config.node_rank),
            "failure": None if failure is None else {"reason": failure.reason.value, "message": failure.message},
        }

    def _forget_copy(self) -> None:
        if self._copy is not None:
            self._copy.close()
        self._copy = None

    def _tensors(
        self, update: CheckpointUpdate, reader: CheckpointReader, received: list[TensorDigest]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor's bytes are checked before any layer sees them."""
        for tensor in update.tensors:
            raw = torch.empty(tensor.nbytes, dtype=torch.uint8)
            found = reader.read_checked(tensor, memoryview(raw.numpy()), lanes)
            received.append(TensorDigest(tensor.name, tensor.dtype, tensor.shape, found))
            self._report.tensors += 1
            self._report.bytes += tensor.nbytes
            yield tensor.name, _shaped(raw, tensor.dtype, tensor.shape)

    def finish_weight_update(self) -> None:
        """Phase 4: count, and only then let vLLM process what is left."""
        if self._report.failure is None:
            with self._recording("the update cannot be finished"):
                self._finish()

    def _finish(self) -> None:
        if self._report.digest is None:
            self._report.digest = self._receiving.finish()
        self._report.problems = compare_layers(self.model, self._expected)
        if self._report.problems:
            raise CheckpointError(FailureReason.COVERAGE_FAILED, summarise(self._report.problems))
        keep_unloadable(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            process_tied(self.model)
        self._report.finished = True
        self._forget_copy()

    def _fail(self, reason: FailureReason, message: str) -> None:
        self._report.fail(reason, message)
        self._put_away()

    def _put_away(self) -> None:
        """What was begun. That it fails must not end the RPC either; the report says it where nothing else failed."""
        try:
            self._receiving.close()  # nobody must wait for this rank
            abandon(self.model)
        except Exception as error:
            logger.exception("rollfleet: an update could not be put away")
            words = f"an update could not be put away: {type(error).__name__}: {error}"
            self._report.fail(FailureReason.TRANSFER_FAILED, words)

    def reset(self) -> None:
        """Forget an update that did not finish; the weights may then be a mixture. The report says if it cannot be."""
        self._report = Report()
        self._put_away()
        self.reset_weight_update_target()

    def report(self) -> dict[str, Any]:
        """What happened since the last start."""
        return asdict(self._report)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        self._receiving.close()
        self._forget_copy()
        self._pool.shutdown(wait=False)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM's base class asks for a sender on the trainer's side; a checkpoint has none."""
        raise TypeError("a checkpoint is not sent: the trainer writes it, and a WeightVersion names it")


def _tensor_of(raw: HostBytes | DeviceBytes) -> torch.Tensor:
    """Nothing is copied, and what lies on a device stays there."""
    if isinstance(raw, np.ndarray):
        return torch.from_numpy(raw)
    if not isinstance(raw, torch.Tensor):
        raise TypeError(f"a backend gave bytes as {type(raw).__name__}, which is neither numpy's nor torch's")
    return raw


def _shaped(raw: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view; only a part of a buffer that begins between two elements must be copied."""
    element = TORCH_DTYPES[dtype]
    if raw.storage_offset() % element.itemsize:
        raw = raw.clone()
    return raw.view(element).view(shape)
