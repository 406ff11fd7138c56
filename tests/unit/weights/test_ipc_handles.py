"""Handles of NPU memory as JSON: what torch_npu describes survives, and nothing else comes through. Without torch."""

import json
from base64 import b64encode
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollfleet_protocol.ipc import (
    ARGUMENTS,
    COUNTERS,
    EVENT_BYTES,
    HANDLE_BYTES,
    LEFT_OUT,
    WHOLE_BLOCK,
    IpcHandle,
    IpcUpdate,
    encoded,
    plain_handles,
)
from rollfleet_protocol.pushes import DTYPES, MOST_BYTES, MOST_NPUS, UpdateCall
from rollfleet_trainer.said import Said

NPU = "10.0.0.7-3"
COUNTER_FILE = b"/torch_1234_567890_0"


class Named:
    """As torch's dtypes and classes appear in its tuple: only their text is asked for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


def arguments(size: tuple[int, ...] = (2, 3), dtype: str = "float32", **changes: Any) -> tuple[Any, ...]:
    """What reduce_tensor gives for a tensor of rows."""
    strides = [prod(size[place + 1 :]) for place in range(len(size))]
    found = {
        "tensor_cls": Named("<class 'torch.Tensor'>"),
        "tensor_size": size,
        "tensor_stride": tuple(strides),
        "tensor_offset": 0,
        "storage_cls": Named("<class 'torch.storage.TypedStorage'>"),
        "dtype": Named(f"torch.{dtype}"),
        "storage_device": 3,
        "storage_handle": WHOLE_BLOCK + bytes(HANDLE_BYTES),
        "storage_size_bytes": prod(size) * DTYPES[dtype][1],
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": COUNTER_FILE,
        "ref_counter_offset": 7,
        "event_handle": bytes(EVENT_BYTES),
        "event_sync_required": True,
    } | changes
    return tuple(found[name] for name in ARGUMENTS)


def handle(size: tuple[int, ...] = (2, 3), dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    return encoded(arguments(size, dtype)) | changes


def update(**changes: Any) -> dict[str, Any]:
    """Of two tensors, 24 and 5 bytes, in one buffer of 32."""
    return {
        "names": ["a", "b"],
        "dtype_names": ["float32", "uint8"],
        "shapes": [[2, 3], [5]],
        "tensor_sizes": [24, 5],
        "ipc_handles": {NPU: handle((32,), "uint8")},
    } | changes


@given(
    st.lists(st.integers(1, 50), max_size=5),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 1000),
    st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES),
    st.booleans(),
)
def test_what_torch_npu_describes_comes_out_as_it_was(
    size: list[int], dtype: str, offset: int, opaque: bytes, waits: bool
) -> None:
    nbytes, itemsize = prod(size) * DTYPES[dtype][1], DTYPES[dtype][1]
    described = arguments(
        tuple(size),
        dtype,
        tensor_offset=offset,
        storage_handle=WHOLE_BLOCK + opaque,
        storage_size_bytes=offset * itemsize + nbytes,
        event_sync_required=waits,
    )
    found = IpcHandle.model_validate_json(IpcHandle(**encoded(described)).model_dump_json())
    assert (found.dtype, found.tensor_size) == (dtype, size)
    assert (found.start, found.end) == (offset * itemsize, offset * itemsize + nbytes)
    assert found.raw("storage_handle") == WHOLE_BLOCK + opaque
    assert found.raw("ref_counter_handle") == COUNTER_FILE
    assert found.event_sync_required is waits
    assert set(encoded(described)) == set(ARGUMENTS) - LEFT_OUT


def text(raw: bytes) -> str:
    return b64encode(raw).decode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_offset": -1}, "tensor_offset"),
        ({"tensor_offset": 1}, "the tensor ends at byte 28, its storage at 24"),
        ({"tensor_offset": 1 << 62}, "tensor_offset"),
        ({"tensor_size": [2, 4]}, "tensor_stride"),
        ({"tensor_size": [1 << 40, 1 << 40], "tensor_stride": [1 << 40, 1]}, "the tensor ends at byte"),
        ({"tensor_size": [2, -3]}, "tensor_size"),
        ({"tensor_size": [0]}, "tensor_size"),
        ({"tensor_size": [1] * 65}, "tensor_size"),
        ({"tensor_size": [6]}, "one length"),
        ({"tensor_stride": [1, 2]}, "is not that of rows"),
        ({"tensor_stride": [3, 1.5]}, "tensor_stride"),
        ({"dtype": "object"}, "dtype 'object'"),
        ({"dtype": "float64"}, "the tensor ends at byte 48"),
        ({"dtype": None}, "dtype"),
        ({"storage_device": -1}, "storage_device"),
        ({"storage_device": True}, "storage_device"),
        ({"storage_handle": "not base64"}, "storage_handle: is not base64"),
        ({"storage_handle": "gASV" * 10}, "storage_handle: 30 bytes that are no handle"),
        ({"storage_handle": text(bytes(HANDLE_BYTES - 1))}, "storage_handle: 64 bytes"),
        ({"storage_handle": text(b"\x02c" + bytes(HANDLE_BYTES))}, "storage_handle: 67 bytes"),
        ({"storage_handle": text(b"\x01e" + bytes(HANDLE_BYTES))}, "expandable_segments"),
        ({"storage_handle": "A" * 4096}, "storage_handle"),
        ({"storage_handle": "ä" * 8}, "storage_handle: is not base64"),
        ({"storage_size_bytes": 23}, "its storage at 23"),
        ({"storage_size_bytes": 0}, "storage_size_bytes"),
        ({"storage_size_bytes": MOST_BYTES + 1}, "storage_size_bytes"),
        ({"storage_offset_bytes": -8}, "storage_offset_bytes"),
        ({"storage_offset_bytes": "8"}, "storage_offset_bytes"),
        ({"ref_counter_offset": -1}, "ref_counter_offset"),
        ({"ref_counter_offset": COUNTERS}, "ref_counter_offset"),
        ({"ref_counter_handle": text(b"/sem.lock")}, "counter file"),
        ({"ref_counter_handle": text(b"/torch_1_2_3/../x")}, "counter file"),
        ({"ref_counter_handle": text(b"/torch_1_2_3\n")}, "counter file"),
        ({"ref_counter_handle": ""}, "counter file"),
        ({"event_handle": text(bytes(EVENT_BYTES - 1))}, "event_handle: must be 64 bytes"),
        ({"event_handle": ""}, "event_handle: must be 64 bytes"),
        ({"event_sync_required": 1}, "event_sync_required"),
        ({"requires_grad": True}, "unknown fields: requires_grad"),
        ({"storage_cls": "os.system"}, "unknown fields: storage_cls"),
    ],
)
def test_hostile_fields_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        IpcHandle.model_validate(handle() | change)


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 65), 1 << 65)
    | st.floats()
    | st.text(max_size=90)
    | st.binary(max_size=70).map(text)
    | st.lists(st.integers(-5, 1 << 50), max_size=4)
)


@given(st.dictionaries(st.sampled_from(sorted(set(ARGUMENTS) - LEFT_OUT)), _VALUES, min_size=1, max_size=4))
def test_whatever_comes_through_is_within_its_bounds(changes: dict[str, Any]) -> None:
    """torch_npu would add these to pointers and index shared memory with them."""
    try:
        found = IpcHandle.model_validate(handle() | changes)
    except ValidationError:
        return
    assert 0 <= found.start < found.end <= found.storage_size_bytes <= MOST_BYTES
    assert 0 <= found.storage_offset_bytes <= MOST_BYTES
    assert 0 <= found.ref_counter_offset < COUNTERS
    assert len(found.raw("event_handle")) == EVENT_BYTES
    assert len(found.raw("storage_handle")) in (HANDLE_BYTES, HANDLE_BYTES + 2)
    assert found.raw("ref_counter_handle").startswith(b"/torch_")


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (arguments()[:7], "7 values describe the tensor"),
        (arguments(storage_handle=None), "storage_handle is NoneType"),
        ((), "0 values"),
    ],
)
def test_a_tensor_that_lies_on_no_npu_has_no_handle(described: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encoded(described)


def test_a_dimension_of_one_may_have_any_stride() -> None:
    """As torch has it: what is contiguous is decided by the others."""
    assert IpcHandle.model_validate(handle((2, 1, 3)) | {"tensor_stride": [3, 99, 1]}).end == 24
    assert IpcHandle.model_validate(handle(())).end == 4


def test_a_buffer_s_tensors_follow_each_other() -> None:
    found = IpcUpdate.model_validate(update())
    (region,) = found.regions(NPU)
    assert (found.of_one_buffer, region.start, region.sizes, region.nbytes) == (True, 0, (24, 5), 29)


def test_tensors_of_their_own_are_regions_of_their_own() -> None:
    each = [{NPU: handle()}, {NPU: encoded(arguments((5,), "uint8", tensor_offset=3, storage_size_bytes=8))}]
    found = IpcUpdate.model_validate(update(ipc_handles=each, tensor_sizes=None))
    assert not found.of_one_buffer
    assert [(region.start, region.sizes) for region in found.regions(NPU)] == [(0, (24,)), (3, (5,))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ipc_handles": None}, "ipc_handles must be there"),
        ({"ipc_handles_pickled": "gASV"}, "one of both"),
        ({"ipc_handles": {}}, "ipc_handles"),
        ({"ipc_handles": []}, "ipc_handles"),
        ({"ipc_handles": "gASV"}, "ipc_handles"),
        ({"ipc_handles": {NPU: handle((28,), "uint8")}}, "the tensors have 29 bytes, the buffer on .* has 28"),
        ({"ipc_handles": {NPU: handle((32,), "int8")}}, "not of bytes"),
        ({"ipc_handles": {NPU: handle((4, 8), "uint8")}}, "not of bytes"),
        ({"ipc_handles": {"": handle((32,), "uint8")}}, "ipc_handles"),
        ({"ipc_handles": {NPU: handle((32,), "uint8"), "b": handle() | {"tensor_offset": -1}}}, "tensor_offset"),
        ({"ipc_handles": [{NPU: handle()}]}, "1 ipc_handles for 2 tensors"),
        (
            {"ipc_handles": [{NPU: handle()}, {NPU: handle()}]},
            r"tensor b: is uint8 \[5\], its handle .* float32 \[2, 3\]",
        ),
        ({"tensor_sizes": None}, "tensor_sizes: are missing"),
        ({"tensor_sizes": [24, 6]}, "tensor_sizes are not those"),
        ({"tensor_sizes": [29]}, "tensor_sizes are not those"),
        ({"packed": False}, "packed: is false, and ipc_handles are otherwise"),
        ({"update_kind": "sparse_flat"}, "update_kind"),
        ({"num_updates_list": [1]}, "num_updates_list"),
        ({"pack": True}, "unknown fields: pack"),
    ],
)
def test_an_update_whose_handles_do_not_fit_its_tensors_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        IpcUpdate.model_validate(update(**change))


def test_what_vllm_of_0_23_says_besides_is_understood() -> None:
    besides = {"update_kind": "dense", "num_updates_list": None, "packed": True, "ipc_handles_pickled": None}
    assert IpcUpdate.model_validate(update(**besides)).tensors


def test_a_worker_on_another_npu_is_told_both() -> None:
    wanted = "this worker is on NPU 10.0.0.7-5, the trainer's handles are for 10.0.0.7-3: a rank of the trainer must be"
    for handles in ({NPU: handle((32,), "uint8")}, [{NPU: handle()}, {NPU: handle((5,), "uint8")}]):
        found = IpcUpdate.model_validate(update(ipc_handles=handles))
        with pytest.raises(ValueError, match=wanted):
            list(found.regions("10.0.0.7-5"))


def test_handles_as_vllm_ascend_has_them_become_json() -> None:
    described = arguments((32,), "uint8")
    assert plain_handles({NPU: described}) == {NPU: encoded(described)}
    assert plain_handles([{NPU: described}]) == [{NPU: encoded(described)}]
    assert plain_handles({NPU: encoded(described)}) == {NPU: encoded(described)}
    said = Said({"names": ["w"], "ipc_handles": {NPU: described}}).json  # as a trainer sends it
    assert json.loads(said) == {"names": ["w"], "ipc_handles": {NPU: encoded(described)}}


@pytest.mark.parametrize("handles", ["gASV", 7, None, [[]], [{NPU: "gASV"}], {NPU: object()}, [7]])
def test_other_things_in_their_place_are_no_handles(handles: object) -> None:
    with pytest.raises(ValueError, match=r"ipc_handles: \w+ where a dictionary|the handle for NPU 10.0.0.7-3 is "):
        plain_handles(handles)


def test_a_call_to_the_guard_may_carry_them_and_stays_bounded() -> None:
    call = UpdateCall.model_validate({"update_info": update()})
    assert call.update_info.model_dump(exclude_unset=True) == update()
    for change in (
        {"ipc_handles": [1, 2]},
        {"tensor_sizes": ["x"]},
        {"tensor_sizes": [-1]},
        {"ipc_handles_pickled": 3},
    ):
        with pytest.raises(ValidationError, match=next(iter(change))):
            UpdateCall.model_validate({"update_info": update() | change})


@pytest.mark.parametrize(
    "handles",
    [{str(npu): {} for npu in range(MOST_NPUS + 1)}, [{str(npu): {} for npu in range(MOST_NPUS + 1)}]],
    ids=["a buffer", "each tensor"],
)
def test_more_npus_than_there_are_cost_one_error(handles: object) -> None:
    """Of 2 MiB of empty handles pydantic would make 2.4 million errors, and 3 GiB, in every worker."""
    with pytest.raises(ValidationError, match=f"handles for {MOST_NPUS + 1} NPUs, at most {MOST_NPUS}") as raised:
        IpcUpdate.model_validate(update(ipc_handles=handles))
    assert raised.value.error_count() == 1
    with pytest.raises(ValidationError, match=f"at most {MOST_NPUS}") as raised:
        UpdateCall.model_validate({"update_info": update(ipc_handles=handles)})
    assert raised.value.error_count() < 4
