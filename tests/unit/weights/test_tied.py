"""Tied heads: what passes for one before the first byte is read, from a checkpoint and from a trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.weights import staging
from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.coverage import Form, ModelTensors, require_known
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_kernels.digest import lanes_reference
from rollfleet_protocol.state import FailureReason

EMBEDDING: Form = ("F32", (10, 4))
REST: dict[str, Form] = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": ("F32", (4,))}
TORCH = {"F32": "float32", "BF16": "bfloat16"}
SIZES = {"F32": 4, "BF16": 2}
NO_FILE = f"rollfleet-{'0' * 32}"


def write(folder: Path, tensors: dict[str, Form]) -> None:
    """A checkpoint in one file, of zeros."""
    folder.mkdir()
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


def stage(root: Path, model: ModelTensors, more: dict[str, Form]) -> int:
    write(root / "step", REST | more)
    staged = stage_checkpoint(root, "step", model)
    try:
        return len(staged.tensors)
    finally:
        staged.close()


def push(model: ModelTensors, more: dict[str, Form]) -> None:
    """Fails before its file, which is not there, is looked for."""
    tensors = REST | more
    info: dict[str, Any] = {
        "names": list(tensors),
        "dtype_names": [TORCH[dtype] for dtype, _ in tensors.values()],
        "shapes": [list(shape) for _, shape in tensors.values()],
        "file": NO_FILE,
    }
    receiving = Receiving(lambda: model, Seat(0, 1), lanes_reference)
    receiving.init("shm", {}, 5)
    receiving.start()
    next(iter(receiving.receive(info, 5)))


@pytest.fixture
def model() -> ModelTensors:
    return ModelTensors(REST, tied=True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of which tensors are read."""
    found: list[str] = []
    read_into = staging.read_into

    def counted(fd: int, buffer: memoryview, offset: int, file_name: str) -> None:
        found.append(file_name)
        read_into(fd, buffer, offset, file_name)

    monkeypatch.setattr(staging, "read_into", counted)
    return found


BAD: list[tuple[str, Form]] = [
    ("lm_head.anything", EMBEDDING),
    ("lm_head.anything", ("F32", (1 << 10, 1 << 10))),
    ("lm_head.weight_scale", ("F32", (1,))),
    ("lm_head.weight.more", EMBEDDING),
    ("lm_head.weight", ("F32", (10, 5))),
    ("lm_head.weight", ("F32", (4, 10))),
    ("lm_head.weight", ("F32", (40,))),
    ("lm_head.weight", ("BF16", (10, 4))),
    ("lm_head.bias", ("F32", (10, 4))),
    ("lm_head.bias", ("F32", (4,))),
    ("lm_head.bias", ("BF16", (10,))),
]


@pytest.mark.parametrize(("name", "form"), BAD)
def test_what_is_no_head_is_refused_before_it_is_read(
    tmp_path: Path, model: ModelTensors, reads: list[str], name: str, form: Form
) -> None:
    for attempt in (lambda: stage(tmp_path, model, {name: form}), lambda: push(model, {name: form})):
        with pytest.raises(CheckpointError, match=name) as raised:
            attempt()
        assert raised.value.reason is FailureReason.COVERAGE_FAILED
    assert reads == []


@pytest.mark.parametrize(
    "head", [{}, {"lm_head.weight": EMBEDDING}, {"lm_head.weight": EMBEDDING, "lm_head.bias": ("F32", (10,))}]
)
def test_a_head_like_the_embedding_may_be_there_or_not(
    tmp_path: Path, model: ModelTensors, reads: list[str], head: dict[str, Form]
) -> None:
    assert stage(tmp_path, model, head) == len(REST) + len(head)
    assert reads
    require_known(REST | head, model)


@pytest.mark.parametrize("name", ["wte.weight", "model.language_model.embed_tokens.weight", "transformer.wte.weight"])
def test_the_embedding_is_known_by_what_models_call_it(name: str) -> None:
    model = ModelTensors({name: EMBEDDING, "patch_embed.weight": ("F32", (3, 3))}, tied=True)
    assert model.form("lm_head.weight") == EMBEDDING


@pytest.mark.parametrize(
    "tensors", [{}, {"a.embed_tokens.weight": EMBEDDING, "b.embed_tokens.weight": ("F32", (10, 8))}]
)
def test_of_an_embedding_that_nobody_knows_no_head_is_taken(tensors: dict[str, Form]) -> None:
    assert ModelTensors(tensors, tied=True).form("lm_head.weight") is None


def test_a_model_s_own_head_says_what_it_is() -> None:
    model = ModelTensors(REST | {"lm_head.weight": ("BF16", (10, 4))}, tied=True)
    assert model.form("lm_head.weight") == ("BF16", (10, 4))
    require_known(REST, model)


def test_nothing_is_optional_where_nothing_is_tied() -> None:
    untied = ModelTensors(REST, tied=False)
    assert untied.form("lm_head.weight") is None
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: the model has no such tensor"):
        require_known(REST | {"lm_head.weight": EMBEDDING}, untied)
