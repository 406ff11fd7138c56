"""Writes checkpoints in Hugging Face's layout, without torch: one file, or shards with their index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rollfleet_engine.weights.layout import INDEX, SINGLE


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its file holds it."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    data: bytes


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """One safetensors file; the header is padded with spaces so that the data starts at a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(tensor.data)],
        }
        end += len(tensor.data)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            file.write(tensor.data)


def write_checkpoint(folder: Path, tensors: Mapping[str, RawTensor], shards: int = 1) -> None:
    """The weights of a checkpoint directory. Files are renamed into place, the index last, as careful savers do."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        _write_renamed(folder / SINGLE, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(list(tensors), shards), start=1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _write_renamed(folder / file_name, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_renamed(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    write_safetensors(unfinished, tensors)
    unfinished.rename(path)


def _split(names: Sequence[str], parts: int) -> list[Sequence[str]]:
    if not 1 <= parts <= len(names):
        raise ValueError(f"{len(names)} tensors cannot be split into {parts} shards")
    borders = [len(names) * part // parts for part in range(parts + 1)]
    return [names[start:end] for start, end in pairwise(borders)]
