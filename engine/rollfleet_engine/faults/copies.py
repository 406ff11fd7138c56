"""Damaged copies of checkpoints. Files without damage are links; the original is never written to."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rollfleet_engine.weights.coverage import layer_of
from rollfleet_engine.weights.headers import LENGTH_BYTES, METADATA, TensorEntry, read_header
from rollfleet_engine.weights.layout import INDEX, SUFFIX

Tensors = dict[str, tuple[Path, TensorEntry]]  # by name, with the file that it is in
_CHUNK = 1 << 24


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a checkpoint with its file. Raises CheckpointError or OSError."""
    found: Tensors = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            for entry in read_header(file.fileno(), path.name):
                found[entry.name] = (path, entry)
    return found


def copy_checkpoint(source: Path, target: Path, own: frozenset[str]) -> None:
    """A copy that shares its bytes with the original, but for the files in `own`. Raises OSError."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if not path.is_file():
            continue
        copy = target / path.name
        if path.name in own:
            shutil.copyfile(path, copy)  # not its mode: it is to be written to
        else:
            _link(path, copy)


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path.resolve(), copy)
    except OSError:  # another file system, or one without links
        shutil.copy2(path, copy)


def flip_bit(path: Path, entry: TensorEntry) -> None:
    """Change one bit of a tensor, and nothing else, the time of modification neither. Only a digest sees it."""
    before = path.stat()
    with path.open("r+b") as file:
        place = entry.offset + entry.nbytes - 1
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 0x80]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def drop_layer(source: Path, target: Path, layer: str) -> None:
    """A copy without the tensors of a layer, as a saver leaves it that forgot them: index and headers agree."""
    tensors = tensors_of(source)
    kept = {name: place for name, place in tensors.items() if layer_of(name) != layer}
    hurt = {path.name for name, (path, _) in tensors.items() if name not in kept}
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in hurt and path.name != INDEX:
            _link(path, target / path.name)
    for name in sorted(hurt):
        entries = [entry for path, entry in kept.values() if path.name == name]
        if entries:
            _write_part(source / name, target / name, sorted(entries, key=lambda entry: entry.offset))
    if (source / INDEX).exists():
        index = {"metadata": {}, "weight_map": {tensor: path.name for tensor, (path, _) in kept.items()}}
        (target / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _write_part(source: Path, target: Path, entries: list[TensorEntry]) -> None:
    """The same file with some of its tensors."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with source.open("rb") as reading, target.open("wb") as writing:
        writing.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        for entry in entries:
            reading.seek(entry.offset)
            writing.writelines(_pieces(reading.read, entry.nbytes))


def _pieces(read: Callable[[int], bytes], length: int) -> Iterator[bytes]:
    while length > 0 and (piece := read(min(length, _CHUNK))):
        yield piece
        length -= len(piece)
