"""Signs of life."""

import asyncio
from typing import Any

import pytest

from rollfleet_operator.ports import PODS, WEIGHT_VERSIONS
from rollfleet_operator.runtime import watchdog
from rollfleet_operator.runtime.watchdog import DEAD_WATCH_S, EVENT_GRACE_S, MAX_PASS_S, Watchdog, WatchLedger
from tests.support.pods import make_pod


class Clock:
    """Replaces time.monotonic in the module under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(watchdog, "time", fake)
    return fake


def listed(ledger: WatchLedger, *pods: dict[str, Any], namespace: str | None = None) -> None:
    ledger.listed(PODS, namespace, pods)


def test_a_watch_that_tells_what_a_list_shows_is_alive(clock: Clock) -> None:
    ledger = WatchLedger()
    ledger.told(PODS, make_pod(uid="before", revision=3))
    listed(ledger, make_pod(uid="before", revision=3), make_pod(uid="soon", revision=8))
    clock.now += 1
    ledger.told(PODS, make_pod(uid="soon", revision=9))
    clock.now += 10 * EVENT_GRACE_S
    assert ledger.overdue() is None


@pytest.mark.parametrize("told", [None, 7])
def test_a_watch_that_does_not_tell_is_dead(clock: Clock, told: int | None) -> None:
    ledger = WatchLedger()
    if told:
        ledger.told(PODS, make_pod(revision=told))
    listed(ledger, make_pod(revision=8))
    assert ledger.overdue() is None
    clock.now += EVENT_GRACE_S + 1
    assert "the watch on pods" in (ledger.overdue() or "")
    dog = Watchdog(ledger, max_list_age_s=540)
    assert dog.problems(0) == [], "it may be cured by a new start"
    clock.now += DEAD_WATCH_S
    assert "the watch on pods" in dog.problems(0)[-1]


def test_what_was_deleted_meanwhile_needs_no_telling(clock: Clock) -> None:
    ledger = WatchLedger()
    listed(ledger, make_pod(uid="a", revision=8), make_pod(uid="b", revision=8, namespace="other"))
    ledger.told(PODS, make_pod(uid="a", revision=9), deleted=True)
    listed(ledger, namespace="rl")
    clock.now += EVENT_GRACE_S + 1
    assert ledger.overdue() is not None  # b, of the other namespace
    listed(ledger, namespace="other")
    assert ledger.overdue() is None


def test_kinds_are_told_apart(clock: Clock) -> None:
    ledger = WatchLedger()
    ledger.told(WEIGHT_VERSIONS, make_pod(revision=8))
    listed(ledger, make_pod(revision=8))
    clock.now += EVENT_GRACE_S + 1
    assert ledger.overdue() is not None


async def test_health_names_what_is_wrong(clock: Clock) -> None:
    dog = Watchdog(WatchLedger(), max_list_age_s=540)
    assert dog.problems(0) == []
    assert "a pass has been running" in dog.problems(MAX_PASS_S + 1)[0]
    clock.now += 541
    assert [problem.split(" for ")[0] for problem in dog.problems(0)] == [
        "the event loop has not turned",
        "the last whole list of objects is 541 s old",
    ]
    dog.listed()
    beat = asyncio.create_task(dog.beat())
    await asyncio.sleep(0)
    assert dog.problems(0) == []
    beat.cancel()
