"""Whatever happens, the promises hold: a few hundred schedules by seed, and some that hypothesis makes up and shrinks.

`make model SCHEDULES=5000` searches further. A seed that breaks a promise is printed with the command that lives it
again.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollfleet_operator.api.weightversion import Phase as UpdatePhase
from tests.model.__main__ import live_many
from tests.model.api_server import ApiFaults
from tests.model.network import NetFaults
from tests.model.operators import Pace
from tests.model.report import Report
from tests.model.schedule import GAPS, KINDS, LUCK, MAX_HAPPENINGS, SECONDS, STEPS, Happening, Schedule
from tests.model.world import World

SCHEDULES, PART = 200, 100
AT_MOST = 2_000  # the rarest of what must be reached comes about once in 150 schedules
# Where a search must come to: a model that never gets there tries nothing of it. Counted as `__main__` prints them.
REACHED = (
    *(f"phase: {phase}" for phase in UpdatePhase),
    *(f"end: {end}" for end in ("Active", "Superseded", "Failed CannotBeFenced", "Failed TooFewEngines")),
    *(f"aftermath: {aftermath}" for aftermath in ("Reopened", "Restored", "Held")),
    "fleet: Available CommitUnknown",
    "fleet: Available Held",
    "fleet: made again in mid-update",
    "version: deleted in mid-update",
    "attempt: again",
    "attempt: retryRequest followed",
    "commit: minServing above 1",
    "commit: without all targets",
    "commit: found again",
    "open: at the version before, while it rolls",
    "close: in mode wait, with requests in flight",
    "close: in mode keep, with requests in flight",
    "answer: kept",
    "answer: spans versions",
    "answer: cut while kept",
    "command: of an older epoch",
    "operator: lost its term",
    "operator: acted after its term had ended",
    "engine: stopped for good",
    "commit: of a push",
    "end: Failed SenderLost",
    "end: Failed SenderMissing",
    "push: ends before weights are touched",
    "push: start does not fit the model",
    "push: update does not fit the model",
    "end: Failed CoverageFailed",
    "fleet: its weights are lost",
    "trainer: lost the Lease",
    "trainer: sent after it was no sender any more",
)


def search(seeds: range) -> list[Report]:
    reports, broken = live_many(seeds)
    assert not broken, "\n".join(f"python -m tests.model --trace --seed {seed}: {text}" for seed, text in broken)
    return reports


@pytest.mark.parametrize("first", range(0, SCHEDULES, PART))
def test_the_promises_hold(first: int) -> None:
    search(range(first, first + PART))


def test_everything_is_reached() -> None:
    """By as many schedules as it takes: which seed comes where changes with every change of the code."""
    missing = set(REACHED)
    for first in range(SCHEDULES, SCHEDULES + AT_MOST, PART // 2):
        for report in search(range(first, first + PART // 2)):
            missing -= report.seen.keys()
        if not missing:
            return
    raise AssertionError(f"not reached by {AT_MOST} schedules: {sorted(missing)}")


def chance(most: float) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, most / 4, most])


def in_a_row(found: list[tuple[float, str, int, float, int]]) -> tuple[Happening, ...]:
    """Each so long after the one before."""
    at, row = 0.0, []
    for gap, kind, who, seconds, luck in found:
        row.append(Happening(at, kind, who, seconds, luck))
        at += gap
    return (Happening(0.0, "bump", 0, 0.0), *row)


happenings = st.lists(
    st.tuples(
        st.sampled_from(GAPS),
        st.sampled_from(sorted(KINDS)),
        st.integers(0, 11),
        st.sampled_from(SECONDS),
        st.integers(0, LUCK),
    ),
    max_size=MAX_HAPPENINGS,
).map(in_a_row)
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 10_000),
    replicas=st.integers(1, 4),
    operators=st.integers(1, 2),
    lease=st.booleans(),
    drift=st.sampled_from([1.0, 0.9, 1.1]),
    load_s=st.sampled_from([0.2, 1.0, 8.0]),
    step_s=st.tuples(*[st.sampled_from([0.01, 0.1, 1.0, 6.0])] * len(STEPS)),
    net=st.builds(NetFaults, lose_request=chance(0.1), lose_answer=chance(0.2), delay=chance(0.2)),
    api=st.builds(ApiFaults, conflict=chance(0.1), lose_request=chance(0.1), lose_answer=chance(0.1)),
    pace=st.builds(Pace, stall=chance(0.02), watch_lag_s=st.sampled_from([0.05, 2.0])),
    happenings=happenings,
    trainers=st.integers(1, 2),
    trainer_drift=st.sampled_from([1.0, 0.9, 1.1]),
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
