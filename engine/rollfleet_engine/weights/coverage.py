"""Coverage before: a checkpoint must hold exactly the tensors that the model was started with.

Tied heads by rule: where config.json ties the word embeddings, vLLM skips every lm_head tensor, so either side may have
the head or not. It has the dtype and shape of the embedding that it is; other names below lm_head are no head's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.headers import TensorEntry, load_json_object
from rollfleet_engine.weights.layout import CONFIG, Shard, close_shards, open_folder, open_shards, read_small
from rollfleet_protocol.state import FailureReason

TIED_PREFIX = "lm_head."
HEAD, HEAD_BIAS = f"{TIED_PREFIX}weight", f"{TIED_PREFIX}bias"
EMBEDDINGS = frozenset({"embed_tokens", "word_embeddings", "tok_embeddings", "wte"})  # modules, as models name them
NAMED_AT_MOST = 5  # tensors named in one message

Form = tuple[str, tuple[int, ...]]  # dtype, shape


@dataclass(frozen=True)
class ModelTensors:
    """What a model's own checkpoint holds, in checkpoint-name space."""

    tensors: Mapping[str, Form]  # by name
    tied: bool  # lm_head is the embedding

    def form(self, name: str) -> Form | None:
        """What a tensor of this name must be; None where the model takes none."""
        held = self.tensors.get(name)
        if held is not None or not (self.tied and name in (HEAD, HEAD_BIAS)):
            return held
        weight = self.tensors.get(HEAD) or self._embedding()
        if weight is None or name == HEAD:
            return weight
        dtype, shape = weight
        return dtype, shape[:1]

    def optional(self, name: str) -> bool:
        """Whether the model can do without it."""
        return self.tied and name in (HEAD, HEAD_BIAS)

    def _embedding(self) -> Form | None:
        """Form of the word embedding; None where it is not the only one of its kind, so that nobody knows which."""
        forms = {form for name, form in self.tensors.items() if _is_embedding(name)}
        return forms.pop() if len(forms) == 1 else None


def _is_embedding(name: str) -> bool:
    *_, module, what = ("", *name.split("."))
    return module in EMBEDDINGS and what == "weight"


def read_model_tensors(model_path: Path) -> ModelTensors:
    """Read the headers of model.path. Raises CheckpointError where it has no complete set of safetensors files."""
    folder = open_folder(model_path, ".", confined=False)
    try:
        config = load_json_object(read_small(folder, CONFIG, model_path, confined=False), CONFIG)
        shards = open_shards(folder, model_path, confined=False)
        try:
            tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries_of(shards)}
        finally:
            close_shards(shards)
    finally:
        os.close(folder)
    return ModelTensors(tensors, _is_tied(config, tensors))


def entries_of(shards: Iterable[Shard]) -> Iterable[TensorEntry]:
    """All tensors of all shards."""
    return (entry for shard in shards for entry in shard.tensors)


def _is_tied(config: Mapping[str, object], tensors: Mapping[str, object]) -> bool:
    """As config.json says (multi-modal models: in its text part); left out, a model without a head is a tied one."""
    text = config.get("text_config")
    for part in (text, config):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return not any(name.startswith(TIED_PREFIX) for name in tensors)


def require_coverage(shards: Iterable[Shard], model: ModelTensors) -> None:
    """Names, dtypes and shapes of the checkpoint are those of the model; the error names tensor and file."""
    found = {entry.name: (shard.file.name, entry) for shard in shards for entry in shard.tensors}
    missing = sorted(name for name in model.tensors.keys() - found.keys() if not model.optional(name))
    unexpected = sorted(name for name in found if model.form(name) is None)
    if missing or unexpected:
        raise _failed("; ".join(_difference(missing, unexpected, found)))
    for name, (file_name, entry) in sorted(found.items()):
        wanted = model.form(name)
        if wanted is not None and wanted != (entry.dtype, entry.shape):
            found_form, wanted_form = (
                f"{dtype} {list(shape)}" for dtype, shape in ((entry.dtype, entry.shape), wanted)
            )
            raise _failed(f"tensor {name} in {file_name}: is {found_form}, the model has {wanted_form}")


def require_known(found: Mapping[str, Form], model: ModelTensors) -> None:
    """Of tensors that a trainer announces: the model has each, in this dtype and shape."""
    unexpected = sorted(name for name in found if model.form(name) is None)
    if unexpected:
        raise _failed(f"tensor {_some(unexpected)}: the model has no such tensor")
    for name, form in sorted(found.items()):
        wanted = model.form(name)
        if wanted is not None and wanted != form:
            sent, held = (f"{dtype} {list(shape)}" for dtype, shape in (form, wanted))
            raise _failed(f"tensor {name}: the trainer sends {sent}, the model has {held}")


def require_fits(found: Mapping[str, Form], model: ModelTensors, *, whole: bool) -> None:
    """Of tensors that a trainer announces before it sends the first one; `whole`: no others come."""
    require_known(found, model)
    if whole:
        require_all_came(found.keys(), model)


def require_all_came(names: Collection[str], model: ModelTensors) -> None:
    """Of all tensors of a push: none is missing, and nothing is not something."""
    if not names:
        raise _failed("the trainer sends no tensor")
    missing = sorted(name for name in model.tensors.keys() - set(names) if not model.optional(name))
    if missing:
        raise _failed(f"tensor {_some(missing)}: the model has it, the trainer does not send it")


def _difference(
    missing: list[str], unexpected: list[str], found: Mapping[str, tuple[str, TensorEntry]]
) -> Iterable[str]:
    if missing:
        yield f"tensor {_some(missing)}: the model has it, the checkpoint does not"
    if unexpected:
        yield f"tensor {_some([f'{name} in {found[name][0]}' for name in unexpected])}: the model has no such tensor"


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _failed(message: str) -> CheckpointError:
    return CheckpointError(FailureReason.COVERAGE_FAILED, message)


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: "model.layers.3", or the module for those outside the layers."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return parts[-2] if len(parts) > 1 else "other"
