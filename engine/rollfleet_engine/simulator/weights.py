"""The weights of a simulated engine: a digest for every tensor of real safetensors files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollfleet_engine.weights.coverage import layer_of, read_model_tensors
from rollfleet_engine.weights.staging import StagedCheckpoint, StagedTensor, stage_checkpoint
from rollfleet_engine.weights.transfer import CheckpointReader
from rollfleet_kernels.digest import TensorDigest, lanes_reference, version_digest


@dataclass(frozen=True)
class HeldWeights:
    """What the engine holds now."""

    tensors: tuple[TensorDigest, ...]
    digest: str

    @classmethod
    def of(cls, tensors: Iterable[TensorDigest]) -> "HeldWeights":
        """Weights that hold these tensors."""
        held = tuple(tensors)
        return cls(held, version_digest(held))

    @property
    def layers(self) -> frozenset[str]:
        """Layers that have a tensor."""
        return frozenset(layer_of(tensor.name) for tensor in self.tensors)


def load_model(path: Path) -> HeldWeights:
    """Read the model's folder as it is at start. Raises CheckpointError where it is not complete."""
    staged = stage_checkpoint(path, ".", read_model_tensors(path), confined=False)
    try:
        return HeldWeights.of(
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, tensor.lanes) for tensor in staged.tensors
        )
    finally:
        staged.close()


def read_again(reader: CheckpointReader, staged: StagedCheckpoint) -> Iterator[TensorDigest]:
    """Each staged tensor, read from its open file and digested as the workers of a real engine do it."""
    for tensor in staged.tensors:
        buffer = bytearray(tensor.nbytes)
        lanes = reader.read_checked(tensor, memoryview(buffer), lanes_reference)
        yield TensorDigest(tensor.name, tensor.dtype, tensor.shape, lanes)


def elements_by_layer(tensors: Iterable[TensorDigest | StagedTensor]) -> dict[str, int]:
    """Loaded elements per layer."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        elements = 1
        for size in tensor.shape:
            elements *= size
        layer = layer_of(tensor.name)
        counts[layer] = counts.get(layer, 0) + elements
    return counts
