"""Ways in which checkpoints are found broken, each done to a good one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rollfleet_engine.faults.copies import flip_bit, tensors_of
from rollfleet_engine.tools.checkpoint_files import RawTensor, write_checkpoint
from rollfleet_engine.weights.layout import INDEX

Tensors = dict[str, RawTensor]


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a (small) good checkpoint."""
    found: Tensors = {}
    for path in shards(folder):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = raw[start + begin : start + end]
                found[name] = RawTensor(entry["dtype"], tuple(entry["shape"]), data)
    return found


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Write the weights anew with something changed, in as many files as before."""
    files = shards(folder)
    tensors = read_tensors(folder)
    change(tensors)
    for path in [*files, folder / INDEX]:
        path.unlink(missing_ok=True)
    write_checkpoint(folder, tensors, len(files))


def half_written(folder: Path) -> str:
    """As a saver leaves it when it is killed: the last shard unfinished, no index. Returns what a message must name."""
    last = shards(folder)[-1]
    data = last.read_bytes()
    unfinished = last.with_name(last.name + ".tmp")
    unfinished.write_bytes(data[: len(data) // 2])
    last.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    return unfinished.name


def missing_index(folder: Path) -> str:
    """Shards without the file that says which belong together."""
    (folder / INDEX).unlink()
    return INDEX


def missing_shard(folder: Path) -> str:
    """An index that names an absent shard."""
    last = shards(folder)[-1]
    last.unlink()
    return last.name


def truncated_shard(folder: Path, keep: float = 0.5) -> str:
    """A shard cut off within its data."""
    last = shards(folder)[-1]
    data = last.read_bytes()
    last.write_bytes(data[: int(len(data) * keep)])
    return last.name


def renamed_tensor(folder: Path, name: str = "model.norm.weight") -> str:
    """A tensor under a name that the model does not know."""

    def change(tensors: Tensors) -> None:
        tensors[f"{name}.renamed"] = tensors.pop(name)

    rewrite(folder, change)
    return name


def missing_tensor(folder: Path, name: str = "model.norm.weight") -> str:
    """A tensor left out."""
    rewrite(folder, lambda tensors: tensors.pop(name) and None)
    return name


def wrong_shape(folder: Path, name: str = "model.norm.weight") -> str:
    """The same bytes under another shape."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[name]
        tensors[name] = RawTensor(tensor.dtype, (1, *tensor.shape), tensor.data)

    rewrite(folder, change)
    return name


def wrong_dtype(folder: Path, name: str = "model.norm.weight") -> str:
    """The same bytes as another type of the same width."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[name]
        other = {"F32": "I32", "BF16": "F16"}[tensor.dtype]
        tensors[name] = RawTensor(other, tensor.shape, tensor.data)

    rewrite(folder, change)
    return name


def flipped_bit(folder: Path) -> str:
    """One bit of one weight, everything else as it was, the time of modification too. Only a digest sees it."""
    path, entry = max(tensors_of(folder).values(), key=lambda found: (found[0].name, found[1].offset))
    flip_bit(path, entry)
    return path.name
