"""The digest: known answers, one definition in three implementations, and what it must notice."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_kernels.digest import (
    CHUNK_WORDS,
    PIECE_BYTES,
    EmptyInputError,
    TensorDigest,
    add_lanes,
    lanes,
    lanes_reference,
    version_digest,
    warm_up,
)

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_answers.json").read_text(encoding="utf-8"))
IMPLEMENTATIONS = {"reference": lanes_reference, "compiled": lanes}
data = st.binary(min_size=1, max_size=400)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Not within a test's own time."""
    warm_up()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", KNOWN["lanes"], ids=lambda case: case["name"])
def test_known_answers(name: str, case: dict[str, Any]) -> None:
    """Made by a scalar program in plain integers, written from the definition alone."""
    found = IMPLEMENTATIONS[name](bytes.fromhex(case["hex"]), case["wordOffset"])
    assert [f"{lane:08x}" for lane in found] == case["lanes"]


def test_known_answer_of_a_version() -> None:
    version = KNOWN["version"]
    tensors = [
        TensorDigest(each["name"], each["dtype"], tuple(each["shape"]), lanes(bytes.fromhex(each["hex"])))
        for each in version["tensors"]
    ]
    assert version_digest(tensors) == version["digest"]
    assert version_digest(reversed(tensors)) == version["digest"]


@given(data, st.integers(0, 2**40))
def test_implementations_agree(raw: bytes, offset: int) -> None:
    assert lanes(raw, offset) == lanes_reference(raw, offset)


@given(data, st.integers(0, 100), st.sampled_from([0, CHUNK_WORDS - 20, 5 * CHUNK_WORDS - 7]))
def test_pieces_in_any_order_sum_to_the_whole(raw: bytes, cut: int, offset: int) -> None:
    border = min(4 * cut, (len(raw) - 1) // 4 * 4)
    whole = lanes(raw, offset)
    if border:
        assert add_lanes(lanes(raw[border:], offset + border // 4), lanes(raw[:border], offset)) == whole


@given(data, st.data())
def test_one_flipped_bit_changes_every_lane(raw: bytes, pick: st.DataObject) -> None:
    bit = pick.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    assert all(one != other for one, other in zip(lanes(raw), lanes(flipped), strict=True))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=64, unique=True), st.data())
def test_swapped_words_are_noticed(words: list[int], pick: st.DataObject) -> None:
    one, other = pick.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    before, after = (struct.pack(f"<{len(words)}I", *each) for each in (words, swapped))
    assert lanes(before) != lanes(after)


def test_exchanged_signs_are_noticed() -> None:
    """x and -x exchanged differ in one bit each: mixing without a first shift misses half of them in each lane."""
    numbers = np.random.default_rng(3).standard_normal(2000).astype("<f4")
    missed_by_a_lane = 0
    for place in range(0, numbers.size, 2):
        pair = np.zeros(numbers.size, dtype="<f4")
        pair[place], pair[place + 1] = numbers[place], -numbers[place]
        exchanged = -pair
        exchanged[pair == 0] = 0
        one, other = lanes(pair.tobytes()), lanes(exchanged.tobytes())
        assert one != other
        missed_by_a_lane += sum(a == b for a, b in zip(one, other, strict=True))
    assert missed_by_a_lane < numbers.size * 2 * 0.005


@given(st.binary(min_size=4, max_size=64))
def test_a_moved_tensor_is_noticed(raw: bytes) -> None:
    assert lanes(raw) != lanes(raw, 1)


def test_large_input_is_the_same_in_threads_and_unaligned() -> None:
    raw = np.random.default_rng(5).integers(0, 256, 3 * PIECE_BYTES + 3, dtype=np.uint8)
    with ThreadPoolExecutor(2) as pool:
        assert lanes(raw, executor=pool) == lanes(raw) == lanes_reference(raw)
    assert lanes(raw[1:]) == lanes(raw[1:].copy())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values())
def test_no_bytes_have_no_digest(implementation: Any) -> None:
    with pytest.raises(EmptyInputError):
        implementation(b"")


def test_no_tensors_have_no_digest() -> None:
    with pytest.raises(EmptyInputError):
        version_digest([])


def test_a_name_twice_is_an_error() -> None:
    tensor = TensorDigest("a", "F32", (1,), (1, 2, 3, 4))
    with pytest.raises(ValueError, match="a appears twice"):
        version_digest([tensor, tensor])


@settings(max_examples=50)
@given(st.sampled_from(["name", "dtype", "shape", "lanes"]))
def test_everything_about_a_tensor_counts(field: str) -> None:
    one = TensorDigest("a", "F32", (2, 3), (1, 2, 3, 4))
    changed = {"name": "b", "dtype": "I32", "shape": (3, 2), "lanes": (1, 2, 3, 5)}
    other = TensorDigest(**({name: getattr(one, name) for name in changed} | {field: changed[field]}))
    assert version_digest([one]) != version_digest([other])


def test_digests_of_small_data_need_no_numba() -> None:
    """Simulated engines and those who only compare must not pay for a compiler."""
    code = (
        "import sys; from rollfleet_kernels.digest import lanes_reference; lanes_reference(b'abc');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
