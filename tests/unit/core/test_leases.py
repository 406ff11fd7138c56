"""Who may act: the record of a Lease, and how long one who does not hold it waits."""

from datetime import UTC, datetime

import pytest

from rollfleet_operator.core.leases import (
    DURATION_S,
    LONGEST_DURATION_S,
    PERIOD_S,
    RENEW_DEADLINE_S,
    LeaseRecord,
    Rival,
    held_by,
    released,
)

NOW = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
TAKEOVER_S = 15.0  # promised


def test_a_takeover_is_done_in_time_and_a_holder_has_stopped_before() -> None:
    assert RENEW_DEADLINE_S < DURATION_S
    assert 1.2 * PERIOD_S + DURATION_S < TAKEOVER_S  # seen as late as can be, and then waited for


def test_a_record_is_what_the_api_server_keeps_of_it() -> None:
    record = held_by("a", LeaseRecord(), NOW)
    assert record.spec()["renewTime"] == "2026-11-29T12:00:00.123456Z"
    assert LeaseRecord.of({"spec": record.spec()}) == record
    assert LeaseRecord.of({"metadata": {}}) == LeaseRecord()


def test_transitions_count_holders_and_not_renewals() -> None:
    first = held_by("a", LeaseRecord(), NOW)
    renewed = held_by("a", first, NOW.replace(second=2))
    assert (renewed.transitions, renewed.acquired, renewed.renewed > first.renewed) == (0, first.acquired, True)
    second = held_by("b", renewed, NOW.replace(second=9))
    assert (second.transitions, second.acquired) == (1, second.renewed)
    third = held_by("c", released(second, NOW), NOW)
    assert third.transitions == 2


@pytest.mark.parametrize("holder", ["", "me"])
def test_a_lease_of_nobody_or_of_ones_own_pod_is_free(holder: str) -> None:
    rival = Rival()
    assert rival.free_in("me", 0.0) == 0.0, "there is none"
    rival.saw(LeaseRecord(holder, renewed="t1"), 0.0)
    assert rival.free_in("me", 0.0) == 0.0


def test_one_who_waits_counts_from_when_it_saw_a_sign_of_life() -> None:
    rival = Rival()
    rival.saw(LeaseRecord("a", renewed="t1"), 100.0)
    rival.saw(LeaseRecord("a", renewed="t1"), 105.0)  # no sign
    assert rival.free_in("me", 105.0) == pytest.approx(DURATION_S - 5)
    rival.saw(LeaseRecord("a", renewed="t2"), 106.0)
    assert rival.free_in("me", 106.0) == DURATION_S
    assert rival.free_in("me", 106.0 + DURATION_S) == 0.0


@pytest.mark.parametrize(("told_s", "waits_s"), [(1.0, DURATION_S), (30.0, 30.0), (1e6, LONGEST_DURATION_S)])
def test_what_a_holder_asks_for_is_respected_within_reason(told_s: float, waits_s: float) -> None:
    rival = Rival()
    rival.saw(LeaseRecord("a", told_s, renewed="t1"), 0.0)
    assert rival.free_in("me", 0.0) == waits_s
