"""What `update` is given, judged before a version is asked for: later its number is used up, and the fleet closed.

Does not import torch: tensors of it are known by what they can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollfleet_protocol.pushes import DTYPES, MOST_DIMENSIONS
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.host import MOST_NAME, WRAPPERS, is_torch

TAKEN = (
    "a module, a mapping of names to torch's tensors, pairs of both as named_parameters() makes them, a WeightSource, "
    "or a callable that returns pairs"
)
EMPTY = "there are no tensors to send"


def require_kind(given: object) -> None:
    """NotPossible for what tensors cannot come from."""
    if isinstance(given, str | bytes | type) or not (isinstance(given, Iterable) or callable(given)):
        raise NotPossible(f"update takes {TAKEN}; this is {_shown(given)}")


def pair_of(found: object) -> tuple[str, Any]:
    """Name and tensor. NotPossible for anything else, and for a tensor without bytes."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise NotPossible(f"update takes {TAKEN}; among what it was given is {_shown(found)}, which is no such pair")
    name, tensor = found
    require_name(name)
    if not is_torch(tensor):
        cure = ": torch.from_numpy makes one of it" if type(tensor).__module__ == "numpy" else ""
        raise NotPossible(f"tensor {name}: is {_shown(tensor)}, and update sends torch's tensors{cure}")
    if tensor.device.type == "meta":
        raise NotPossible(f"tensor {name}: is on device meta and has no bytes")
    return name, tensor


def require_name(name: object) -> None:
    """NotPossible for what no engine knows as a name."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        raise NotPossible(f"tensor {name!r:.80}: a name is a text of 1 to {MOST_NAME} characters")
    wrapper = next((each for each in WRAPPERS if each in name), None)
    if wrapper is not None:
        raise NotPossible(f"tensor {name}: the model does not know {wrapper!r}: take it out of the names")


def require_form(name: str, dtype: object, shape: Sequence[int]) -> None:
    """NotPossible for what engines' guards refuse by its form."""
    word = str(dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise NotPossible(f"tensor {name}: dtype {word} cannot be sent: {', '.join(DTYPES)} can")
    if len(shape) > MOST_DIMENSIONS:
        raise NotPossible(f"tensor {name}: has {len(shape)} dimensions, at most {MOST_DIMENSIONS} are taken")
    if 0 in shape:
        raise NotPossible(f"tensor {name}: is empty {list(shape)}, so nothing could tell whether it was loaded")


def require_described(found: Sequence[Any]) -> None:
    """All of them, as a WeightSource's metadata() tells. NotPossible where one cannot be sent, or none comes."""
    if not found:
        raise NotPossible(EMPTY)
    for each in found:
        lacking = next((word for word in ("name", "dtype", "shape") if not hasattr(each, word)), None)
        if lacking is not None:
            raise NotPossible(f"metadata() tells of {_shown(each)}, which has no {lacking}")
        require_name(each.name)
        require_form(each.name, each.dtype, each.shape)


def _shown(what: object) -> str:
    kind = type(what)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{what!r:.80} ({name})" if isinstance(what, str | bytes | int | float | type | None) else f"a {name}"
