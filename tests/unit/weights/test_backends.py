"""Backends without an engine: how they are found, what they refuse, what shm reads. gloo's bytes: tests/vllm."""

import os
import re
import tomllib
import uuid
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollfleet_engine.weights.backends import registry
from rollfleet_engine.weights.backends.base import Incoming, Seat, rank_of
from rollfleet_engine.weights.backends.receiving import Receiving
from rollfleet_engine.weights.backends.shm import ShmBackend
from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError, PushError
from rollfleet_kernels import digest
from rollfleet_kernels.digest import TensorDigest, lanes_reference, version_digest
from rollfleet_protocol.pushes import (
    DTYPES,
    HCCL_ID_BYTES,
    SHM_FOLDER,
    GlooInit,
    GlooUpdate,
    GroupInit,
    HcclInit,
    HcclUpdate,
    ShmUpdate,
    pieces,
)

ROOT = Path(__file__).resolve().parents[3]
MODEL = ModelTensors({"a": ("F32", (2, 3)), "b": ("U8", (5,))}, tied=False)
A, B = bytes(range(24)), bytes(range(100, 105))
SEAT = Seat(0, 1)


def test_ours_are_the_ones_that_the_distribution_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == registry.OURS


def test_a_wrong_name_fails_with_the_list_of_what_is_there() -> None:
    with pytest.raises(PushError, match=r"no backend 'nccl': there are gloo, hccl, ipc, shm"):
        registry.make("nccl")


def test_hccl_without_vllm_ascend_says_what_is_missing() -> None:
    with pytest.raises(PushError, match=r"backend hccl cannot run here: ModuleNotFoundError: .*; there are .*shm"):
        registry.make("hccl")
    assert "hccl" not in registry.usable_names()


def hccl(**changes: Any) -> dict[str, Any]:
    return {"hccl_id": b64encode(bytes(HCCL_ID_BYTES)).decode(), "rank_offset": 1, "world_size": 3} | changes


def test_the_words_of_hccl() -> None:
    wanted = HcclInit.model_validate(hccl(group="g"))
    assert (wanted.hccl_id, wanted.group) == (bytes(HCCL_ID_BYTES), "g")
    tensors = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    assert HcclUpdate.model_validate(tensors).nbytes == 12
    assert HcclUpdate.model_validate(tensors | {"packed": True, "packed_num_buffers": 3}).packed_num_buffers == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hccl_id": b64encode(bytes(4107)).decode()}, "has 4107 bytes, an id of HCCL's has 4108"),
        ({"hccl_id": ""}, "has 0 bytes"),
        ({"hccl_id": "*"}, "is not base64"),
        ({"hccl_id": list(bytes(4))}, "is not base64 in a string"),
        ({"master_port": 29500}, "send by rollfleet_trainer.hccl.HcclSender"),
        ({"world_size": 1}, "world_size"),
        ({"device": 3}, "unknown fields: device"),
    ],
)
def test_what_is_no_group_of_hccl_s_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        HcclInit.model_validate(hccl(**change))


@pytest.mark.parametrize(
    "change",
    [{"packed": False}, {"packed_num_buffers": 0}, {"packed_num_buffers": 9}, {"packed_buffer_size_bytes": 7}],
)
def test_an_update_of_hccl_that_the_workers_would_read_otherwise_is_refused(change: dict[str, Any]) -> None:
    tensors = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    with pytest.raises(ValidationError, match=next(iter(change))):
        HcclUpdate.model_validate(tensors | change)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 100))
def test_c17_ranks_lie_side_by_side_and_within_the_group(offset: int, workers: int, others: int) -> None:
    wanted = GroupInit(rank_offset=offset, world_size=offset + workers + others)
    ranks = [rank_of("hccl", wanted, Seat(worker, workers)) for worker in range(workers)]
    assert ranks == list(range(offset, offset + workers))
    with pytest.raises(PushError, match=r"hccl: this engine's ranks are .* the group has"):
        rank_of("hccl", wanted, Seat(0, workers + others + 1))


def entry_points_of(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "plugin") -> None:
    """A distribution that is installed beside ours, with these lines under our group."""
    metadata = folder / name / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{text}\n")
    monkeypatch.syspath_prepend(str(folder / name))


def test_others_are_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points_of(tmp_path, monkeypatch, "mine = rollfleet_engine.weights.backends.shm:ShmBackend\ngone = nowhere:X")
    assert isinstance(registry.make("mine"), ShmBackend)
    assert registry.survey().others == ("gone", "mine")
    assert not {"gone", "mine"} & set(registry.usable_names())
    with pytest.raises(PushError, match=r"backend gone cannot run here: .*nowhere.*; there are "):
        registry.make("gone")


@pytest.mark.parametrize("what", ["OSError('no driver')", "RuntimeError('no driver')", "SystemExit('no driver')"])
def test_what_a_plug_in_raises_is_told_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    broken, made = (f"rollfleet_test_{kind}_{what.partition('(')[0].lower()}" for kind in ("broken", "made"))
    entry_points_of(tmp_path, monkeypatch, f"theirs = {broken}:X\nmade = {made}:X")
    (tmp_path / "plugin" / f"{broken}.py").write_text(f"raise {what}\n")
    (tmp_path / "plugin" / f"{made}.py").write_text(f"def X():\n    raise {what}\n")
    told = what.replace("('", ": ").replace("')", "")
    for name in ("theirs", "made"):
        with pytest.raises(PushError, match=rf"backend {name} cannot run here: {told}; there are .*shm"):
            registry.make(name)


def test_a_start_imports_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs while it is imported would hang the engine's start; no spec can name it."""
    imported = tmp_path / "imported"
    entry_points_of(tmp_path, monkeypatch, "theirs = rollfleet_test_slow:X\nshm = rollfleet_test_slow:X")
    (tmp_path / "plugin" / "rollfleet_test_slow.py").write_text(f"open({str(imported)!r}, 'w').close()\n")
    assert registry.survey().others == ("theirs",)
    assert not imported.exists()


@pytest.mark.parametrize("ours", sorted(registry.OURS))
def test_nobody_takes_the_place_of_ours_nor_takes_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    before = registry.survey()
    entry_points_of(tmp_path, monkeypatch, f"{ours} = evil:Backend")
    entry_points_of(tmp_path, monkeypatch, "no equals sign", ours)
    found = registry.survey()
    assert found.left_out[f"{ours} of plugin"] == f"evil:Backend does not replace {registry.OURS[ours]}: rename it"
    assert found.left_out[f"distribution {ours}"].startswith("its metadata: ")
    assert found.usable == before.usable


def test_two_others_of_one_name_are_both_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points_of(tmp_path, monkeypatch, "nccl = rollfleet_engine.weights.backends.shm:ShmBackend", "one")
    entry_points_of(tmp_path, monkeypatch, "nccl = elsewhere:Backend", "two")
    with pytest.raises(PushError, match=r"backend nccl is left out: .*would replace.*there are .*shm"):
        registry.make("nccl")
    assert "nccl" not in registry.usable_names()


def test_metadata_that_cannot_be_read_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points_of(tmp_path, monkeypatch, "no equals sign", "broken")
    entry_points_of(tmp_path, monkeypatch, "mine = rollfleet_engine.weights.backends.shm:ShmBackend", "nameless")
    (tmp_path / "nameless" / "nameless-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    found = registry.survey()
    assert "shm" in found.usable
    assert found.others == ("mine",)
    assert found.left_out["distribution broken"].startswith("its metadata: ")


@pytest.fixture
def file() -> Iterator[str]:
    name = f"rollfleet-{uuid.uuid4().hex}"
    (Path(SHM_FOLDER) / name).write_bytes(A + B)
    yield name
    (Path(SHM_FOLDER) / name).unlink(missing_ok=True)


def update(file: str, /, **changes: Any) -> dict[str, Any]:
    return {"names": ["a", "b"], "dtype_names": ["float32", "uint8"], "shapes": [[2, 3], [5]], "file": file} | changes


def receiving() -> Receiving:
    one = Receiving(lambda: MODEL, SEAT, lanes_reference)
    one.init("shm", {}, 5)
    one.start()
    return one


def test_shm_gives_the_bytes_and_their_digest(file: str) -> None:
    one = receiving()
    assert [bytes(each.raw) for each in one.receive(update(file), 5)] == [A, B]
    expected = [
        TensorDigest("a", "F32", (2, 3), lanes_reference(A)),
        TensorDigest("b", "U8", (5,), lanes_reference(B)),
    ]
    assert one.finish() == version_digest(expected)
    assert one.bytes == 29


class OnDevice:
    """Bytes of which only a copy of a part can be read, as of a tensor on an accelerator."""

    def __init__(self, raw: bytes, copied: list[int]) -> None:
        self._raw, self._copied = raw, copied

    def numel(self) -> int:
        return len(self._raw)

    def __getitem__(self, part: slice, /) -> "OnDevice":
        return OnDevice(self._raw[part], self._copied)

    def cpu(self) -> "OnDevice":
        self._copied.append(len(self._raw))
        return self

    def numpy(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._raw, dtype=np.uint8)


def test_what_lies_on_a_device_has_the_digest_of_its_bytes(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Copied to the host in pieces of a bounded size; what is loaded is never the copy."""
    copied: list[int] = []
    monkeypatch.setattr(digest, "HOST_BYTES", 16)
    gave: list[OnDevice] = []

    def receive(self: ShmBackend, info: Any, deadline_s: float) -> Iterator[Incoming]:
        for meta, raw in zip(self.announced(info), (A, B), strict=True):
            gave.append(OnDevice(raw, copied))
            yield Incoming(meta, gave[-1])

    monkeypatch.setattr(ShmBackend, "receive", receive)
    one = receiving()
    assert [each.raw for each in one.receive(update(file), 5)] == gave
    assert copied == [16, 8, 5]
    expected = [
        TensorDigest("a", "F32", (2, 3), lanes_reference(A)),
        TensorDigest("b", "U8", (5,), lanes_reference(B)),
    ]
    assert one.finish() == version_digest(expected)


def test_several_calls_make_one_update(file: str) -> None:
    one = receiving()
    parts = (
        {"names": ["b"], "dtype_names": ["uint8"], "shapes": [[5]], "offset": 24},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]},
    )
    for part in parts:
        assert list(one.receive(update(file, **part), 5))
    assert one.finish().startswith("sha256:")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file": "../etc/passwd"}, "file"),
        ({"file": "rollfleet-short"}, "file"),
        ({"file": f"rollfleet-{'0' * 32}"}, "do trainer and engine share /dev/shm"),
        ({"offset": 1}, "the tensors end at byte 30"),
        ({"offset": -1}, "offset"),
        ({"shapes": [[2, 3], [0]]}, "shape"),
        ({"dtype_names": ["float32", "object"]}, "dtype 'object'"),
        ({"names": ["a"]}, "one length"),
        ({"handle": "gASV"}, "handle"),
    ],
)
def test_shm_refuses_handles_that_are_not_what_a_trainer_makes(file: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(PushError, match=words):
        list(receiving().receive(update(file, **change), 5))


def test_shm_follows_no_link_and_opens_no_pipe(file: str) -> None:
    for make in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo):
        name = f"rollfleet-{uuid.uuid4().hex}"
        path = Path(SHM_FOLDER) / name
        make(path)
        try:
            with pytest.raises(PushError, match=r"cannot be opened|regular file"):
                list(receiving().receive(update(name), 5))
        finally:
            path.unlink()


def test_c28_nothing_twice_and_too_little_are_never_a_whole_version(file: str) -> None:
    one = receiving()
    with pytest.raises(CheckpointError, match="sends no tensor"):
        one.finish()
    list(one.receive(update(file, names=["a"], dtype_names=["float32"], shapes=[[2, 3]]), 5))
    with pytest.raises(CheckpointError, match="tensor b: the model has it, the trainer does not send it"):
        one.finish()
    with pytest.raises(PushError, match="tensor a is sent twice"):
        list(one.receive(update(file), 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["a", "c"]}, "tensor c: the model has no such tensor"),
        ({"dtype_names": ["int32", "uint8"]}, r"the trainer sends I32 \[2, 3\], the model has F32 \[2, 3\]"),
        ({"shapes": [[3, 2], [5]]}, r"F32 \[3, 2\], the model has F32 \[2, 3\]"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_byte_is_read(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        next(iter(receiving().receive(update(f"rollfleet-{'0' * 32}", **change), 5)))


def test_an_update_without_a_group_says_what_comes_first(file: str) -> None:
    one = Receiving(lambda: MODEL, SEAT, lanes_reference)
    with pytest.raises(PushError, match="init_weight_transfer_engine comes first"):
        list(one.receive(update(file), 5))


def test_a_broken_update_leaves_the_group(file: str) -> None:
    one = receiving()
    stream = one.receive(update(file), 5)
    next(stream)
    stream.close()
    with pytest.raises(PushError, match="init_weight_transfer_engine comes first"):
        list(one.receive(update(file), 5))


@given(st.lists(st.integers(1, 10_000), max_size=20), st.integers(1, 4096))
def test_pieces_are_full_but_the_last_and_lose_nothing(sizes: list[int], buffer: int) -> None:
    found = list(pieces(sizes, buffer))
    assert sum(found) == sum(sizes)
    assert all(size == buffer for size in found[:-1])
    assert all(0 < size <= buffer for size in found)


def test_bounds_of_what_a_trainer_may_ask_for() -> None:
    tensors = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2**40, 2**40]]}
    with pytest.raises(ValidationError, match="too large"):
        GlooUpdate.model_validate(tensors)
    with pytest.raises(ValidationError, match="packed_buffer_size_bytes"):
        GlooUpdate.model_validate(tensors | {"shapes": [[1]], "packed_buffer_size_bytes": 1 << 40})
    with pytest.raises(ValidationError, match="rank_offset"):
        GlooInit(master_address="a", master_port=1, rank_offset=0, world_size=2)
    assert ShmUpdate.model_validate(update(f"rollfleet-{'a' * 32}")).nbytes == 29
    assert set(DTYPES) >= {"bfloat16", "float32", "float8_e4m3fn"}
