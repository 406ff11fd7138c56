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
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_kernels import digest
from rollfleet_kernels.digest import (
    BLOCK_WORDS,
    MOST_WORDS,
    THREADS_WORTH_BYTES,
    WORD_BYTES,
    EmptyInputError,
    PieceLanes,
    TensorDigest,
    add_lanes,
    lanes,
    lanes_on_device,
    lanes_reference,
    version_digest,
    warm_up,
    word_keys,
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
    found = IMPLEMENTATIONS[name](bytes.fromhex(case["hex"]) * case.get("times", 1), case["wordOffset"])
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
DISTANCES = (1, 2, 64, BLOCK_WORDS, 4 * BLOCK_WORDS)  # between what is exchanged, in words
TRIALS = 1 << 20
PLACES = 1 << 21  # words of which a trial takes two or four
Words = npt.NDArray[np.uint64]


def _products(words: Words, keys: Words) -> Words:
    """What each word adds to a lane."""
    x = words ^ keys
    product: Words = (x & np.uint64(0xFFFFFFFF)) * (x >> np.uint64(32))
    return product


def test_a_lane_is_the_sum_of_what_its_words_add() -> None:
    """So the trials below are of the digest, though they never build a tensor."""
    words = np.random.default_rng(3).integers(0, 2**64, 3 * BLOCK_WORDS, dtype=np.uint64)
    found = tuple(int(_products(words, keys).sum(dtype=np.uint64)) for keys in word_keys(100, words.size))
    assert lanes(words.tobytes(), 100) == found


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_exchanges_are_noticed_whatever_the_words_differ_in(pattern: int) -> None:
    """A sum of mixed words is blind where mixing maps a difference to the same change for half of all words.

    So was one that shifted by 16 before it multiplied, to pairs of bfloat16 that differ in both signs. Exchanged too:
    four words crosswise, as where two blocks of a matrix of two values change places. If all blocks began at the same
    place of the table, a lane would miss 100 in a million of those.
    """
    generator = np.random.default_rng(7)
    words = generator.integers(0, 2**64, TRIALS, dtype=np.uint64)
    first = generator.integers(0, PLACES // 2, TRIALS)
    distance = generator.choice(DISTANCES, TRIALS)
    across = generator.integers(1, PLACES // 4 // BLOCK_WORDS, TRIALS) * BLOCK_WORDS
    unseen = np.ones(TRIALS, dtype=bool)
    for keys in word_keys(0, PLACES):

        def change(place: npt.NDArray[np.int64], keys: Words = keys) -> Words:
            found: Words = _products(words, keys[place]) - _products(words ^ np.uint64(pattern), keys[place])
            return found

        two = change(first) - change(first + distance)
        four = two - (change(first + across) - change(first + across + distance))
        assert (two != 0).all()
        assert np.count_nonzero(four == 0) < 20
        unseen &= four == 0
    assert not unseen.any()


@given(st.binary(min_size=8, max_size=64))
def test_a_moved_tensor_is_noticed(raw: bytes) -> None:
    assert lanes(raw) != lanes(raw, 1)


def test_large_input_is_the_same_in_threads_and_unaligned() -> None:
    raw = np.random.default_rng(5).integers(0, 256, THREADS_WORTH_BYTES + 3, dtype=np.uint8)
    with ThreadPoolExecutor(2) as pool:
        assert lanes(raw, executor=pool) == lanes(raw) == lanes_reference(raw)
    assert lanes(raw[1:]) == lanes(raw[1:].copy())


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_pieces_in_order_are_the_whole_and_end_with_a_ragged_one(kernel: Any) -> None:
    raw = np.random.default_rng(5).integers(0, 256, 83, dtype=np.uint8)
    pieces = PieceLanes(kernel)
    for start in range(0, raw.size, 16):
        pieces.add(raw[start : start + 16])
    assert pieces.total == lanes_reference(raw)
    with pytest.raises(ValueError, match="3 bytes into a word of 8, and another one follows"):
        pieces.add(b"more")


class OnDevice(np.ndarray[Any, np.dtype[np.uint8]]):
    """A tensor that is copied to the host by parts."""

    def numel(self) -> int:
        return self.size

    def cpu(self) -> OnDevice:
        return self

    def numpy(self) -> npt.NDArray[np.uint8]:
        return np.array(self)


@pytest.mark.parametrize("size", [16, 8])
def test_a_tensor_on_a_device_is_digested_by_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "HOST_BYTES", size)
    raw = np.random.default_rng(5).integers(0, 256, 83, dtype=np.uint8)
    assert lanes_on_device(raw.view(OnDevice)) == lanes_reference(raw)


@pytest.mark.parametrize("kernel", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_what_no_tensor_has_is_refused(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (-1, MOST_WORDS + 1):
        with pytest.raises(ValueError, match="first 4611686018427387904 words"):
            kernel(b"word", place)
    with pytest.raises(TypeError):
        kernel(b"word", 0.5)
    assert kernel(bytes(9 << 20), np.int32(2**31 - 1)) == kernel(bytes(9 << 20), 2**31 - 1)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RuntimeError, match="big-endian"):
        kernel(b"word")


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
