"""Ranks of a transfer: contiguous, without overlap, the trainer first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_operator.core.topology import place, world_size


def test_two_engines_of_two_by_two_come_after_the_trainer() -> None:
    """C17: 2 engines x DP 2 x TP 2 have offsets 1 and 5, and the whole group 9 ranks."""
    places = place([("engine-0", 4), ("engine-1", 4)])
    assert [each.rank_offset for each in places] == [1, 5]
    assert world_size(places) == 9


@given(st.lists(st.integers(min_value=1, max_value=64), max_size=50))
def test_ranks_never_overlap_and_leave_no_gap(worlds: list[int]) -> None:
    places = place((f"engine-{i}", size) for i, size in enumerate(worlds))
    ranks = [rank for each in places for rank in range(each.rank_offset, each.rank_offset + each.world_size)]
    assert ranks == list(range(1, world_size(places)))


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_without_workers_names_the_engine(size: int) -> None:
    with pytest.raises(ValueError, match="engine-0 reports a world"):
        place([("engine-0", size)])
