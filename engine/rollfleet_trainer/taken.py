"""The tensors that a fleet took last, by name, dtype and shape: what differs from them fits its model no more.

Engines would find it too, once the fleet is closed and they have put their old weights away. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollfleet_protocol.pushes import MOST_TENSORS
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.said import Said, said

TOLD = 5  # tensors named in one message
HEAD = "lm_head."  # where word embeddings are tied, either side may have the head or not
MOST_TOLD = 15 << 20  # bytes of what is said of tensors in one call: a guard takes 16 MiB
FIRST = 10_000  # tensors of names as long as they may be
Forms = Mapping[str, tuple[str, Sequence[int]]]  # dtype as "bfloat16", full shape


class Taken:
    """What an update has brought to a fleet, as far as it was known before it was sent."""

    def __init__(self) -> None:
        self._forms: Forms | None = None
        self._version = 0

    def note(self, version: int, forms: Forms | None) -> None:
        """The fleet serves the version, with these. None: nobody knew them beforehand."""
        if forms is not None:
            self._forms, self._version = dict(forms), version

    def require_alike(self, forms: Forms | None) -> None:
        """NotPossible where these are not those of the version before, with the first that differ."""
        if self._forms is None or forms is None:
            return
        found = list(differences(self._forms, forms))
        if not found:
            return
        more = f" and {len(found) - TOLD} more" if len(found) > TOLD else ""
        raise NotPossible(
            f"{'; '.join(found[:TOLD])}{more}: the fleet took others as version {self._version}, and would close for "
            "these and refuse them. Where its model is another one now, send them by a new RolloutFleet object"
        )


def differences(before: Forms, now: Forms) -> list[str]:
    """In words, wrong forms first, by name."""
    forms = [
        f"tensor {name}: is {_form(now[name])}, was {_form(before[name])}"
        for name in sorted(before.keys() & now.keys())
        if _form(now[name]) != _form(before[name])
    ]
    new = [f"tensor {name}: is new" for name in sorted(now.keys() - before.keys()) if not name.startswith(HEAD)]
    gone = [f"tensor {name}: is missing" for name in sorted(before.keys() - now.keys()) if not name.startswith(HEAD)]
    return [*forms, *new, *gone]


def listed_forms(forms: Forms) -> Said:
    """names, dtype_names, shapes as the native calls have them."""
    return Said(
        {
            "names": list(forms),
            "dtype_names": [dtype for dtype, _ in forms.values()],
            "shapes": [list(shape) for _, shape in forms.values()],
        }
    )


def fits(tensors: Mapping[str, Any]) -> bool:
    """Whether one call can say all of this."""
    return len(tensors["names"]) <= MOST_TENSORS and len(said(tensors).json) <= MOST_TOLD


def first_of(tensors: Mapping[str, Any]) -> Said:
    """As many as fit into one call, whatever their names."""
    return Said({name: values[:FIRST] for name, values in tensors.items()})


def _form(form: tuple[str, Sequence[int]]) -> str:
    return f"{form[0]} {list(form[1])}"
