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
    BLOCK_WORDS,
    THREADS_WORTH_BYTES,
    WORD_BYTES,
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
    assert [f"{lane:016x}" for lane in found] == case["lanes"]


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


@given(data, st.integers(0, 100), st.sampled_from([0, BLOCK_WORDS - 20, 5 * BLOCK_WORDS - 7, 2**40]))
def test_pieces_in_any_order_sum_to_the_whole(raw: bytes, cut: int, offset: int) -> None:
    border = min(WORD_BYTES * cut, (len(raw) - 1) // WORD_BYTES * WORD_BYTES)
    whole = lanes(raw, offset)
    if border:
        assert add_lanes(lanes(raw[border:], offset + border // WORD_BYTES), lanes(raw[:border], offset)) == whole


@given(data, st.data())
def test_one_flipped_bit_changes_every_lane(raw: bytes, pick: st.DataObject) -> None:
    bit = pick.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    assert all(one != other for one, other in zip(lanes(raw), lanes(flipped), strict=True))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=64, unique=True), st.data())
def test_swapped_half_words_are_noticed_by_every_lane(words: list[int], pick: st.DataObject) -> None:
    one, other = pick.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    before, after = (struct.pack(f"<{len(words)}I", *each) for each in (words, swapped))
    assert all(a != b for a, b in zip(lanes(before), lanes(after), strict=True))


# What a word and the one it is exchanged with differ in.
PATTERNS = {
    "sign": 1 << 63,
    "signs of float32": 0x80000000_80000000,
    "signs of a pair of bfloat16": 0x80008000,
    "signs of bfloat16": 0x80008000_80008000,
    "one of bfloat16": 0x8000,
    "lowest": 1,
}
ACROSS = 3 * BLOCK_WORDS
DISTANCES = (1, 2, 64, BLOCK_WORDS, 4 * BLOCK_WORDS)  # between what is exchanged, in words


def _placed(words: tuple[np.uint64, ...], first: int, distance: int) -> bytes:
    """Zeros but for two words, or for four of which two lie in other blocks."""
    places = (first, first + distance, first + ACROSS, first + ACROSS + distance)
    whole = np.zeros(places[-1] + 1, dtype="<u8")
    whole[list(places[: len(words)])] = words
    return whole.tobytes()


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_exchanges_are_noticed_whatever_the_words_differ_in(pattern: int, distance: int) -> None:
    """A sum of mixed words is blind where mixing maps a difference to the same change for half of all words.

    So was one that shifted by 16 before it multiplied, to pairs of bfloat16 that differ in both signs. Exchanged too:
    four words crosswise, as where two blocks of a matrix of two values change places.
    """
    generator = np.random.default_rng(7)
    for _ in range(500):
        word = generator.integers(0, 2**64, dtype=np.uint64)
        other = word ^ np.uint64(pattern)
        first = int(generator.integers(0, BLOCK_WORDS))

        for before, after in (((word, other), (other, word)), ((word, other, other, word), (other, word, word, other))):
            one, two = (lanes(_placed(each, first, distance)) for each in (before, after))
            assert all(a != b for a, b in zip(one, two, strict=True)), (before, first)


@given(st.binary(min_size=8, max_size=64))
def test_a_moved_tensor_is_noticed(raw: bytes) -> None:
    assert lanes(raw) != lanes(raw, 1)


def test_large_input_is_the_same_in_threads_and_unaligned() -> None:
    raw = np.random.default_rng(5).integers(0, 256, THREADS_WORTH_BYTES + 3, dtype=np.uint8)
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
    tensor = TensorDigest("a", "F32", (1,), (1, 2))
    with pytest.raises(ValueError, match="a appears twice"):
        version_digest([tensor, tensor])


@settings(max_examples=50)
@given(st.sampled_from(["name", "dtype", "shape", "lanes"]))
def test_everything_about_a_tensor_counts(field: str) -> None:
    one = TensorDigest("a", "F32", (2, 3), (1, 2))
    changed = {"name": "b", "dtype": "I32", "shape": (3, 2), "lanes": (1, 3)}
    other = TensorDigest(**({name: getattr(one, name) for name in changed} | {field: changed[field]}))
    assert version_digest([one]) != version_digest([other])


def test_digests_of_small_data_need_no_numba() -> None:
    """Simulated engines and those who only compare must not pay for a compiler."""
    code = (
        "import sys; from rollfleet_kernels.digest import lanes_reference; lanes_reference(b'abc');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
