"""Whatever happens, the promises hold: a few hundred schedules by seed, and some that hypothesis makes up and shrinks.

`make model SCHEDULES=5000` searches further. A seed that breaks a promise is printed with the command that lives it
again.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.model.__main__ import live_many
from tests.model.api_server import ApiFaults
from tests.model.network import NetFaults
from tests.model.operators import Pace
from tests.model.schedule import GAPS, KINDS, MAX_HAPPENINGS, SECONDS, STEPS, Happening, Schedule
from tests.model.world import World

SCHEDULES, CHUNK = 200, 20


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_the_promises_hold(first: int) -> None:
    reports, broken = live_many(range(first, first + CHUNK))
    assert not broken, "\n".join(f"python -m tests.model --trace --seed {seed}: {text}" for seed, text in broken)
    assert sum(report.commits for report in reports) > CHUNK, "hardly anything was committed: the model tries nothing"


def chance(most: float) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, most / 4, most])


def in_a_row(found: list[tuple[float, str, int, float]]) -> tuple[Happening, ...]:
    """Each so long after the one before."""
    at, row = 0.0, []
    for gap, kind, who, seconds in found:
        row.append(Happening(at, kind, who, seconds))
        at += gap
    return (Happening(0.0, "bump", 0, 0.0), *row)


happenings = st.lists(
    st.tuples(st.sampled_from(GAPS), st.sampled_from(sorted(KINDS)), st.integers(0, 11), st.sampled_from(SECONDS)),
    max_size=MAX_HAPPENINGS,
).map(in_a_row)
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 10_000),
    replicas=st.integers(1, 4),
    operators=st.integers(1, 2),
    load_s=st.sampled_from([0.2, 1.0, 8.0]),
    step_s=st.tuples(*[st.sampled_from([0.01, 0.1, 1.0, 6.0])] * len(STEPS)),
    net=st.builds(NetFaults, lose_request=chance(0.1), lose_answer=chance(0.2), delay=chance(0.2)),
    api=st.builds(ApiFaults, conflict=chance(0.1), lose_request=chance(0.1), lose_answer=chance(0.1)),
    pace=st.builds(Pace, stall=chance(0.02), watch_lag_s=st.sampled_from([0.05, 2.0])),
    happenings=happenings,
)


@given(schedules)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_the_promises_hold_in_what_hypothesis_makes_up(schedule: Schedule) -> None:
    World(schedule).live()
