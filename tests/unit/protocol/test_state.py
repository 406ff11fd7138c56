"""What a guard says is bounded: it goes into statuses, which hold 1.5 MB in all, and numbers of 64 bits."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rollfleet_protocol.state import EngineState
from rollfleet_protocol.words import MAX_WORDS
from tests.support.builders import make_state

TOO_MUCH: dict[str, tuple[tuple[str, ...], Any]] = {
    "workers that no rank can number": (("facts", "worldSize"), 2**63),
    "fewer than no workers": (("facts", "worldSize"), -1),
    "capabilities without end": (("facts", "capabilities"), ["x"] * 1000),
    "an epoch": (("epoch",), 2**63),
    "a version": (("weights", "version"), 2**63),
    "a digest": (("weights", "digest"), "x" * 1000),
    "a source": (("weights", "source"), "x" * 5000),
    "an incarnation": (("incarnation",), "x" * 1000),
    "tokens": (("probe", "tokens"), [1] * 5000),
    "log-probabilities": (("probe", "logprobs"), [-1.0] * 5000),
    "ranks": (("probe", "otherRanks"), [[-1.0]] * 5000),
}


def said(path: tuple[str, ...], value: Any) -> str:
    document = make_state(0).model_dump(mode="json", by_alias=True)
    part = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_no_guard_says_is_not_read(case: str) -> None:
    with pytest.raises(ValidationError):
        EngineState.model_validate_json(said(*TOO_MUCH[case]))


@pytest.mark.parametrize("field", ["guardVersion", "engine", "engineVersion", "model"])
def test_words_are_cut(field: str) -> None:
    state = EngineState.model_validate_json(said(("facts", field), "x" * 100_000))
    assert max(map(len, (state.facts.guard_version, state.facts.engine, state.facts.model))) <= MAX_WORDS
