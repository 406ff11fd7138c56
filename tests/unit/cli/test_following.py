"""`rollfleet watch`: what it tells, when it ends, how long it bears an API server that is away."""

from collections.abc import Callable
from typing import Any

import pytest

from rollfleet_cli.errors import (
    NotFoundError,
    SupersededError,
    TimedOutError,
    UnreachableError,
    UpdateFailedError,
)
from rollfleet_cli.following import GIVE_UP_S, INTERVAL_S, Clock, changes, follow, has_reached
from rollfleet_cli.view import FleetView, build_view
from rollfleet_operator.api.rolloutengine import Committed, LastFinished, Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import FailedEngine, HistoryEntry, Phase, Progress, WeightVersion
from rollfleet_operator.core.reasons import Reason
from tests.support.cli import NOW, make_condition, make_fleet, make_pod, make_version


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.passed = 0.0

    def sleep(self, seconds: float) -> None:
        self.passed += seconds

    def clock(self) -> Clock:
        return Clock(now=lambda: NOW, monotonic=lambda: self.passed, sleep=self.sleep)


class Script:
    """A Reader that answers what the test says, look by look; the last answer stays."""

    namespace = "rl"

    def __init__(self, *answers: RolloutEngine | Exception) -> None:
        self.answers = list(answers)

    def fleet(self, namespace: str, name: str) -> RolloutEngine:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fleets(self, namespace: str | None) -> list[RolloutEngine]:
        return [self.fleet("", "")]

    def versions(self, namespace: str | None) -> list[WeightVersion]:
        return []

    def pods(self, namespace: str | None, fleet: str | None) -> list[dict[str, Any]]:
        return []


def view(fleet: RolloutEngine, *versions: WeightVersion, pods: Any = ()) -> FleetView:
    return build_view(fleet, list(versions), list(pods))


def test_a_short_silence_is_borne_and_a_long_one_is_told() -> None:
    time, away = Time(), UnreachableError("connection refused")
    views = follow(Script(make_fleet(), away, away, make_fleet()), "rl", "qwen", time.clock(), None)
    assert next(views).name == "qwen"
    assert next(views).name == "qwen"
    assert time.passed == pytest.approx(3 * INTERVAL_S)
    with pytest.raises(UnreachableError, match="connection refused"):
        list(follow(Script(away), "rl", "qwen", time.clock(), None))
    assert GIVE_UP_S < time.passed < 2 * GIVE_UP_S


def test_timeout_ends_it_even_when_nobody_answers() -> None:
    for answer in (make_fleet(), UnreachableError("away")):
        time = Time()
        words = ": away" if isinstance(answer, Exception) else ""
        with pytest.raises(TimedOutError, match=f"rl/qwen: not there within 3 s{words}$"):
            list(follow(Script(answer), "rl", "qwen", time.clock(), 3.0))
        assert time.passed <= 3.0 + INTERVAL_S


class WithUpdate(Script):
    """A fleet whose update hangs."""

    def versions(self, namespace: str | None) -> list[WeightVersion]:
        return [make_version(2, phase=Phase.PREPARING)]


def test_a_timeout_tells_what_the_update_was_doing() -> None:
    with pytest.raises(TimedOutError, match="rl/qwen: not there within 3 s: version 2 Preparing"):
        list(follow(WithUpdate(make_fleet()), "rl", "qwen", Time().clock(), 3.0))


def test_a_fleet_that_is_gone_ends_it_at_once() -> None:
    with pytest.raises(NotFoundError):
        list(follow(Script(NotFoundError("no such fleet")), "rl", "qwen", Time().clock(), None))


REACHED = [
    ("active at the version", make_version(2, phase=Phase.ACTIVE), True),
    ("active at a higher one", make_version(3, phase=Phase.ACTIVE), True),
    ("active at a lower one", make_version(1, phase=Phase.ACTIVE), False),
    (
        "active, and the fleet's record is lost",
        make_version(
            2, phase=Phase.ACTIVE, conditions=(make_condition("Active", holds=False, message="nobody can tell"),)
        ),
        False,
    ),
    ("under way", make_version(2, phase=Phase.VERIFYING), False),
    ("committed but not open", make_version(2, phase=Phase.OPENING), False),
    ("a lower one failed", make_version(1, phase=Phase.FAILED), False),
    (
        "the operator has not seen the spec",
        make_version(2, generation=5, observed_generation=4, phase=Phase.ACTIVE),
        False,
    ),
]


@pytest.mark.parametrize(("version", "reached"), [case[1:] for case in REACHED], ids=[case[0] for case in REACHED])
def test_when_a_version_counts_as_served(version: WeightVersion, reached: bool) -> None:
    assert has_reached(view(make_fleet(), version), 2) is reached


def test_a_failed_version_is_told_with_the_engines_words() -> None:
    failed = LastFinished(version=2, generation=1, outcome=Outcome.FAILED, message="qwen-1: shard 2 is truncated")
    with pytest.raises(UpdateFailedError, match="the update failed: version 2: qwen-1: shard 2 is truncated"):
        has_reached(view(make_fleet(last_finished=failed), make_version(2, phase=Phase.FAILED)), 2)


def test_without_a_weight_version_only_the_commit_counts() -> None:
    assert has_reached(view(make_fleet(committed=Committed(version=2, time=NOW), serving_replicas=1)), 2)
    with pytest.raises(NotFoundError, match="no WeightVersion"):
        has_reached(view(make_fleet()), 2)


def test_version_0_needs_no_weight_version() -> None:
    assert has_reached(view(make_fleet()), 0) is False
    assert has_reached(view(make_fleet(committed=Committed(version=0, time=NOW), serving_replicas=1)), 0)


def test_what_is_committed_and_not_open_yet_is_not_served() -> None:
    assert has_reached(view(make_fleet(committed=Committed(version=0, time=NOW))), 0) is False


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.FAILED])
def test_what_becomes_of_a_later_version_does_not_matter(phase: Phase) -> None:
    fleet = make_fleet(committed=Committed(version=2, time=NOW))
    assert has_reached(view(fleet, make_version(3, phase=phase)), 2)


def test_a_failure_is_not_the_end_where_a_retry_waits() -> None:
    failed = make_version(2, phase=Phase.FAILED)
    asked = failed.model_copy(update={"spec": failed.spec.model_copy(update={"retry_request": "again"})})
    assert has_reached(view(make_fleet(), asked), 2) is False
    begun = asked.model_copy(update={"status": asked.status.model_copy(update={"retry_request": "again"})})
    with pytest.raises(UpdateFailedError):
        has_reached(view(make_fleet(), begun), 2)


def refused(version: int, *, of_generation: int = 1) -> WeightVersion:
    said = make_condition("Accepted", holds=False, reason="InvalidSpec", message="set it")
    condition = said.model_copy(update={"observed_generation": of_generation})
    return make_version(version, generation=1, phase=Phase.PENDING, conditions=(condition,))


def test_a_version_that_is_not_accepted_ends_it_at_once() -> None:
    with pytest.raises(UpdateFailedError, match="version 2 is not accepted: InvalidSpec: set it"):
        has_reached(view(make_fleet(), refused(2)), 2)


def test_what_is_not_accepted_does_not_matter_where_it_is_not_awaited() -> None:
    assert has_reached(view(make_fleet(), refused(2)), 3) is False, "it may still be raised"
    assert has_reached(view(make_fleet(), refused(2, of_generation=0)), 2) is False, "that was said of an older spec"
    assert has_reached(view(make_fleet(committed=Committed(version=5, time=NOW)), refused(2)), 2)


def later(*ended: tuple[int, Outcome], generation: int = 4, observed: int = 4, **status: Any) -> WeightVersion:
    """Version 3 is asked for, after these have ended."""
    history = tuple(HistoryEntry(version=v, outcome=o, time=NOW, message="why") for v, o in ended)
    return make_version(3, generation=generation, observed_generation=observed, history=history, **status)


def test_a_version_that_was_served_before_the_next_one_counts() -> None:
    committed = make_fleet(committed=Committed(version=2, time=NOW))
    assert has_reached(view(committed, later(phase=Phase.PREPARING)), 2, exactly=True)
    assert has_reached(view(make_fleet(), later((2, Outcome.ACTIVE))), 2, exactly=True)


def test_a_version_that_was_overtaken_is_superseded() -> None:
    for overtaken in (later((2, Outcome.SUPERSEDED)), later(phase=Phase.ACTIVE)):
        with pytest.raises(SupersededError, match="version 2 was superseded: qwen-policy asks for 3 now"):
            has_reached(view(make_fleet(), overtaken), 2, exactly=True)
    assert has_reached(view(make_fleet(), later(observed=3)), 2, exactly=True) is False, "it may be opening"


def test_a_version_that_failed_before_the_next_one_has_failed() -> None:
    with pytest.raises(UpdateFailedError, match="the update failed: version 2: why"):
        has_reached(view(make_fleet(), later((2, Outcome.FAILED))), 2, exactly=True)


def test_nothing_is_told_twice() -> None:
    seen = view(make_fleet(serving_replicas=2), make_version(2, phase=Phase.ACTIVE), pods=[make_pod("qwen", 0)])
    assert changes(None, seen)
    assert changes(seen, seen) == []


def _fleet(**status: Any) -> RolloutEngine:
    return make_fleet(**{"conditions": (make_condition("Available", reason="Serving", message="2 of 2"),), **status})


def _moving(*failed: FailedEngine, generation: int = 4, message: str = "") -> WeightVersion:
    return make_version(
        2,
        phase=Phase.PREPARING,
        generation=generation,
        progress=Progress(done=0, total=2, failed=failed),
        conditions=(
            make_condition("Active", holds=False, reason="Preparing", message=message or Reason.PREPARING.sentence),
        ),
    )


SLOW = FailedEngine(name="qwen-1-0-abcde", reason="Preparing", message="is still reading")
BAD = FailedEngine(name="qwen-1-0-abcde", reason="CheckpointNotFound", message="no such folder")
PODS = [make_pod("qwen", 0), make_pod("qwen", 1)]


def test_engines_that_go_along_are_not_told_of_one_by_one() -> None:
    before = view(_fleet(), pods=PODS)
    assert changes(before, view(_fleet(), _moving(SLOW), pods=PODS)) == ["version 2 Preparing 0/2 engines"]
    failing = view(_fleet(), _moving(BAD), pods=PODS)
    words = "engine qwen-1-0-abcde Preparing: CheckpointNotFound: no such folder"
    assert changes(before, failing) == ["version 2 Preparing 0/2 engines", words]
    assert changes(failing, before) == ["engine qwen-1-0-abcde Serving"]
    why = "CheckpointNotFound: qwen-1-0-abcde: no such folder; tried again"
    told = changes(before, view(_fleet(), _moving(BAD, message=why), pods=PODS))
    assert told == [f"version 2 Preparing 0/2 engines: {why}"], "each word once"


def test_what_was_asked_for_before_is_not_told_of_the_newest_version() -> None:
    seen = make_version(2, phase=Phase.ACTIVE, generation=5, observed_generation=4)
    assert changes(view(_fleet()), view(_fleet(), seen)) == ["version 2 is asked for"]


CHANGES: dict[str, tuple[Callable[[], FleetView], list[str]]] = {
    "progress": (
        lambda: view(_fleet(), make_version(2, phase=Phase.PREPARING, progress=Progress(done=1, total=2))),
        ["version 2 Preparing 1/2 engines"],
    ),
    "commit": (
        lambda: view(_fleet(committed=Committed(version=2, time=NOW))),
        ["committed version 2"],
    ),
    "serving": (lambda: view(_fleet(serving_replicas=1)), ["1/2 engines serving"]),
    "a new engine": (lambda: view(_fleet(), pods=[make_pod("qwen", 1)]), ["engine qwen-1-0-abcde Serving"]),
    "why the fleet does not serve": (
        lambda: view(
            make_fleet(conditions=(make_condition("Available", holds=False, reason="Starting", message="0 of 2"),))
        ),
        ["fleet Starting: 0 of 2"],
    ),
    "a pending version says why": (
        lambda: view(
            _fleet(),
            make_version(
                2,
                phase=Phase.PENDING,
                conditions=(
                    make_condition("Accepted", holds=False, reason="VersionNotHigher", message="5 is committed"),
                ),
            ),
        ),
        [
            "version 2 Pending: 5 is committed",
            "qwen-policy: Accepted=False (VersionNotHigher): 5 is committed",
        ],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_told_of_a_change(case: str) -> None:
    make, lines = CHANGES[case]
    assert changes(view(_fleet()), make()) == lines


def test_an_engine_that_is_gone_is_told() -> None:
    assert changes(view(_fleet(), pods=[make_pod("qwen", 1)]), view(_fleet())) == ["engine qwen-1-0-abcde is gone"]
