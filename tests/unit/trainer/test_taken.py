"""What a fleet took once is what its model has: another form is refused before a version is asked for."""

import json
from typing import Any

import pytest

from rollfleet_engine.guard.native import LARGEST_BODY
from rollfleet_protocol.pushes import MOST_TENSORS, StartCall
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.taken import Taken, first_of, fits, listed_forms

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


def test_a_model_of_today_can_be_announced_whole() -> None:
    """Kimi K2: 60 layers of 384 experts, 3 projections, each with its scales."""
    forms = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{what}": ("float8_e4m3fn", (2048, 7168))
        for layer in range(1, 61)
        for expert in range(384)
        for projection in ("gate", "down", "up")
        for what in ("weight", "weight_scale_inv")
    }
    told = listed_forms(forms)
    assert fits(told)
    body = json.dumps({"tensors": told, "whole": True}, ensure_ascii=False).encode()
    assert len(body) < LARGEST_BODY
    assert StartCall.model_validate_json(body).tensors is not None


@pytest.mark.parametrize("names", [MOST_TENSORS + 1, 40_000])
def test_what_is_too_much_for_one_call_is_told_as_far_as_it_goes(names: int) -> None:
    """Too many, or of names that are too long."""
    forms = {f"{number:0512d}" if names < MOST_TENSORS else str(number): ("float32", (1,)) for number in range(names)}
    told = listed_forms(forms)
    assert not fits(told)
    first = first_of(told)
    assert fits(first)
    assert len(json.dumps({"tensors": first, "whole": False}).encode()) < LARGEST_BODY
