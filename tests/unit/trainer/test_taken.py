"""What a fleet took once is what its model has: another form is refused before a version is asked for."""

from typing import Any

import pytest

from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.taken import Taken

MODEL: dict[str, Any] = {
    "model.embed_tokens.weight": ("bfloat16", (64, 8)),
    "model.norm.weight": ("bfloat16", (8,)),
    "lm_head.weight": ("bfloat16", (64, 8)),
}


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {name: form for name, form in MODEL.items() if name not in names} | more


@pytest.fixture
def taken() -> Taken:
    found = Taken()
    found.note(7, MODEL)
    return found


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (without("model.norm.weight"), "^tensor model.norm.weight: is missing: the fleet took others as version 7"),
        (
            without("model.norm.weight", **{"model.nrom.weight": ("bfloat16", (8,))}),
            "^tensor model.nrom.weight: is new; tensor model.norm.weight: is missing: ",
        ),
        (
            without(**{"model.norm.weight": ("float32", (8,))}),
            r"^tensor model.norm.weight: is float32 \[8\], was bfloat16 \[8\]: ",
        ),
        (without(**{"lm_head.weight": ("bfloat16", (8, 64))}), r"is bfloat16 \[8, 64\], was bfloat16 \[64, 8\]: "),
        ({f"layers.{n}": ("float32", (1,)) for n in range(9)}, "layers.4: is new and 6 more: .* a new RolloutFleet"),
    ],
)
def test_another_form_is_refused_with_the_tensors_that_differ(taken: Taken, now: Any, words: str) -> None:
    with pytest.raises(NotPossible, match=words):
        taken.require_alike(now)


@pytest.mark.parametrize(
    "now", [MODEL, dict(reversed(MODEL.items())), without("lm_head.weight"), without(**{"lm_head.bias": ("x", (64,))})]
)
def test_the_order_counts_not_nor_does_a_head_that_may_be_tied(taken: Taken, now: Any) -> None:
    taken.require_alike(now)


def test_nothing_is_refused_that_nobody_knows_beforehand_nor_before_the_first_version() -> None:
    found = Taken()
    found.require_alike(MODEL)
    found.note(3, None)
    found.require_alike(without("model.norm.weight"))
    found.note(7, MODEL)
    found.note(8, None)
    found.require_alike(None)
    with pytest.raises(NotPossible, match="version 7"):
        found.require_alike(without("model.norm.weight"))
