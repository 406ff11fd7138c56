"""Looks at a model's folder: which files there are, and whether each holds what its own header says.

Only headers are read. What is in them is checked again, with the tensors' bytes, by whoever loads them.
"""

import os
from pathlib import Path

from rollfleet_engine.launch.facts import ModelFolder
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.headers import TensorEntry, load_json_object, read_header
from rollfleet_protocol.state import FailureReason

INDEX_SUFFIX = ".safetensors.index.json"
CONFIG = "config.json"
_EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_MOST_JSON_BYTES = 100_000_000  # of an index or a config.json: real ones have a few MB
# vLLM loads wide floats as 16 bits unless told otherwise (--dtype auto; config/model.py, _resolve_auto_dtype).
_NARROWED = {"F32": 2, "F64": 4}


def look_at_model(path: Path) -> ModelFolder:
    """The folder, and each of its safetensors files."""
    try:
        if not path.exists():
            return ModelFolder(exists=False)
        if not path.is_dir():
            return ModelFolder(exists=True)
        names = {entry.name for entry in path.iterdir()}
        wanted = {name for index in names if index.endswith(INDEX_SUFFIX) for name in _shards(path / index)}
        weights = tuple(sorted(name for name in names if name.endswith(".safetensors")))
        cut, broken, least = _look_at_files(path, tuple(sorted(wanted & names)) or weights)
        return ModelFolder(
            exists=True,
            is_folder=True,
            has_config=CONFIG in names,
            config_error=_config_error(path / CONFIG) if CONFIG in names else "",
            experts=_experts(path / CONFIG) if CONFIG in names else None,
            weight_files=weights,
            missing_files=tuple(sorted(wanted - names)),
            cut_files=cut,
            broken_files=broken,
            least_bytes=least,
        )
    except CheckpointError as error:
        return ModelFolder(exists=True, is_folder=True, error=error.message)
    except (OSError, ValueError) as error:
        return ModelFolder(exists=True, is_folder=True, error=str(error))


def _shards(index: Path) -> set[str]:
    """The files that an index of Hugging Face's format names (key weight_map)."""
    weight_map = load_json_object(_read(index), index.name).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index.name} has no weight_map")  # noqa: TRY004 - the file's content is wrong, not a caller
    return {str(name) for name in weight_map.values()}


def _config_error(file: Path) -> str:
    try:
        load_json_object(_read(file), file.name)
    except CheckpointError as error:
        return error.message
    return ""


def _experts(file: Path) -> int | None:
    """Of a layer, by the keys that vLLM knows (transformers_utils/model_arch_config_convertor.py); 0: no experts."""
    try:
        whole = load_json_object(_read(file), file.name)
    except CheckpointError:
        return None  # told by _config_error
    text = whole.get("text_config")
    parts = (text, whole) if isinstance(text, dict) else (whole,)
    found = next((part[key] for part in parts for key in _EXPERT_KEYS if part.get(key)), 0)
    number = max(found, default=0) if isinstance(found, list) else found
    return number if isinstance(number, int) else None


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        raw = opened.read(_MOST_JSON_BYTES + 1)
    if len(raw) > _MOST_JSON_BYTES:
        raise ValueError(f"{file.name} has more than {_MOST_JSON_BYTES} bytes")
    return raw


def _look_at_files(folder: Path, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Of these files: what is wrong with those that may still become whole, with the others, and the least bytes."""
    cut: list[str] = []
    broken: list[str] = []
    least = 0
    for name in names:
        try:
            least += sum(_loaded_bytes(entry) for entry in _header_of(folder / name))
        except CheckpointError as error:
            (cut if error.reason is FailureReason.CHECKPOINT_INCOMPLETE else broken).append(error.message)
    return tuple(cut), tuple(broken), least


def _header_of(file: Path) -> tuple[TensorEntry, ...]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return read_header(descriptor, file.name)
    finally:
        os.close(descriptor)


def _loaded_bytes(entry: TensorEntry) -> int:
    return entry.nbytes // _NARROWED.get(entry.dtype, 1)
