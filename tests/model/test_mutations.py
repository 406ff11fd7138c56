"""The model bites: each deliberate fault breaks a promise, the one that stands for it, within so many schedules."""

import pytest

from tests.model.mutations import MUTATIONS, Mutation
from tests.model.promises import BrokenPromise
from tests.model.world import World

BOUND = 100


def hunt(mutation: Mutation, bound: int = BOUND) -> tuple[int, BrokenPromise] | None:
    """The first seed that finds it."""
    for seed in range(bound):
        try:
            World(mutation.schedule(seed)).live()
        except BrokenPromise as broken:
            return seed, broken
    return None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_fault_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.spoil(monkeypatch)
    found = hunt(mutation)
    assert found is not None, f"{BOUND} schedules saw nothing of it"
    assert found[1].promise in mutation.promises, f"seed {found[0]}: {found[1]}"
