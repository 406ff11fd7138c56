"""What `update` is given, by its form. What torch makes of it is judged in tests/contract/test_sdk.py."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.given import EMPTY, pair_of, require_described, require_form, require_kind


@pytest.mark.parametrize("given", ["model", b"model", 5, None, 1.5, int, object()])
def test_what_no_tensors_come_from_is_refused_with_what_may_be_given(given: object):
    with pytest.raises(
        NotPossible, match=r"update takes a module, a mapping .*, or a callable that returns pairs; this"
    ):
        require_kind(given)


@pytest.mark.parametrize("given", [{}, [], iter(()), lambda: []])
def test_emptiness_is_no_matter_of_kind(given: object):
    require_kind(given)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("w", np.ones(2)), "tensor w: is a numpy.ndarray, and update sends torch's tensors: torch.from_numpy makes"),
        (("w", [1.0]), "tensor w: is a list, and update sends torch's tensors$"),
        (("w",), "is a tuple, which is no such pair"),
        ("wx", r"is 'wx' \(str\), which is no such pair"),
        (("", np.ones(2)), "a name is a text of 1 to 512 characters"),
        (("w" * 513, np.ones(2)), "a name is a text of 1 to 512 characters"),
        ((b"w", np.ones(2)), "a name is a text of 1 to 512 characters"),
        (("a._fsdp_wrapped_module.w", np.ones(2)), "does not know '_fsdp_wrapped_module.'"),
    ],
)
def test_what_is_no_name_with_a_tensor_is_told(pair: object, words: str):
    with pytest.raises(NotPossible, match=words):
        pair_of(pair)


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("torch.complex128", (2,), "dtype complex128 cannot be sent"),
        ("torch.float32", (2, 0), r"is empty \[2, 0\]"),
        ("torch.float32", (1,) * 65, "has 65 dimensions, at most 64"),
    ],
)
def test_a_form_that_guards_refuse_is_told(dtype: str, shape: tuple[int, ...], words: str):
    with pytest.raises(NotPossible, match=f"tensor w: {words}"):
        require_form("w", dtype, shape)


@dataclass
class Meta:
    name: Any = "w"
    dtype: str = "torch.bfloat16"
    shape: tuple[int, ...] = field(default=())  # a scalar has one element


def test_all_that_a_source_tells_of_is_judged():
    require_described([Meta(), Meta("v", "torch.int8", (2, 3))])
    with pytest.raises(NotPossible, match=EMPTY):
        require_described([])
    with pytest.raises(NotPossible, match="tensor v: is empty"):
        require_described([Meta(), Meta("v", shape=(0,))])
    with pytest.raises(NotPossible, match=r"metadata\(\) tells of a types\.SimpleNamespace, which has no shape"):
        require_described([Meta(), SimpleNamespace(name="v", dtype="torch.int8")])
