"""From objects to what is told of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rollfleet_cli.view import FleetView, build_view, choose_version
from rollfleet_operator.api.meta import Condition, ConditionStatus
from rollfleet_operator.api.rolloutengine import (
    Committed,
    EngineDetail,
    EnginesSummary,
    LastFinished,
    Outcome,
    RolloutEngine,
)
from rollfleet_operator.api.weightversion import FailedEngine, Phase, Progress, WeightVersion
from tests.support.cli import NOW, make_condition, make_fleet, make_pod, make_version


def view(fleet: RolloutEngine, versions: Any = (), pods: Any = ()) -> FleetView:
    return build_view(fleet, list(versions), None if pods is None else list(pods))


def test_a_fleet_that_nobody_has_looked_at_says_so() -> None:
    seen = view(make_fleet())
    assert (seen.state, seen.committed, seen.update) == ("NotObserved", None, None)
    assert "is it running?" in seen.message


def test_engines_are_the_fleets_own_pods_in_order() -> None:
    pods = [make_pod("qwen", 10), make_pod("qwen", 2, node="node-7", restarts=3), make_pod("other", 0, uid="uid-other")]
    seen = view(make_fleet(), pods=pods)
    assert [(engine.ordinal, engine.state, engine.node, engine.restarts) for engine in seen.engines] == [
        (2, "Serving", "node-7", 3),
        (10, "Serving", "node-0", 0),
    ]


def test_an_engine_of_several_pods_is_one_row() -> None:
    led = make_pod("qwen", 0)
    led["metadata"] |= {"name": "qwen-0-1-fghij", "uid": "uid-led"}
    pods = [make_pod("qwen", 0), led]
    assert [engine.name for engine in view(make_fleet(), pods=pods).engines] == ["qwen-0-0-abcde"]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"phase": "Pending"}, "Pending"),
        ({"serving": False}, "NotServing"),
        ({"deleting": True}, "Terminating"),
        ({}, "Serving"),
    ],
)
def test_state_of_an_engine_that_status_does_not_tell_of(change: dict[str, Any], state: str) -> None:
    (engine,) = view(make_fleet(), pods=[make_pod("qwen", 0, **change)]).engines
    assert engine.state == state


def test_a_label_that_somebody_wrote_into_is_shown_and_breaks_nothing() -> None:
    pod = make_pod("qwen", 0)
    pod["metadata"]["labels"]["rollfleet.io/engine"] = "zero"
    (engine,) = build_view(make_fleet(), [], [pod]).engines
    assert (engine.name, engine.ordinal) == ("qwen-0-0-abcde", -1)


def test_status_knows_better_than_the_pod() -> None:
    pod = make_pod("qwen", 0)
    detail = EngineDetail(
        name=pod["metadata"]["name"], ordinal=0, state="CatchingUp", since=NOW, message="reads step-3"
    )
    (engine,) = view(make_fleet(engines=EnginesSummary(details=(detail,))), pods=[pod]).engines
    assert (engine.state, engine.since, engine.message, engine.node) == ("CatchingUp", NOW, "reads step-3", "node-0")


def test_without_pods_only_those_not_well_are_known() -> None:
    detail = EngineDetail(name="qwen-0-0-x", ordinal=0, state="Starting", since=NOW)
    seen = view(make_fleet(engines=EnginesSummary(details=(detail,))), pods=None)
    assert not seen.engines_known
    assert [engine.name for engine in seen.engines] == ["qwen-0-0-x"]


def test_in_an_update_serving_engines_do_what_the_fleet_does() -> None:
    version = make_version(2, phase=Phase.TRANSFERRING, progress=Progress(done=1, total=2))
    (engine,) = view(make_fleet(), [version], [make_pod("qwen", 0)]).engines
    assert engine.state == "Transferring"


def test_the_engine_that_holds_it_up_is_told_in_its_own_words() -> None:
    pod = make_pod("qwen", 0)
    failed = FailedEngine(name=pod["metadata"]["name"], reason="CoverageFailed", message="model.norm.weight is missing")
    version = make_version(2, phase=Phase.PREPARING, progress=Progress(done=0, total=1, failed=(failed,)))
    seen = view(make_fleet(), [version], [pod])
    assert seen.engines[0].message == "CoverageFailed: model.norm.weight is missing"
    assert seen.update is not None
    assert seen.update.held_up == ((pod["metadata"]["name"], "CoverageFailed", "model.norm.weight is missing"),)


def test_last_failure_is_told_until_something_succeeds() -> None:
    failed = LastFinished(version=3, generation=3, outcome=Outcome.FAILED, message="qwen-0: shard 2 is truncated")
    assert view(make_fleet(last_finished=failed)).last_failure == "version 3: qwen-0: shard 2 is truncated"
    done = failed.model_copy(update={"outcome": Outcome.ACTIVE})
    assert view(make_fleet(last_finished=done)).last_failure == ""


@pytest.mark.parametrize(("reason", "told"), [("Preparing", False), ("DigestMismatch", True)])
def test_who_was_only_slow_is_no_part_of_a_failure(reason: str, told: bool) -> None:
    fleet = make_fleet(last_finished=LastFinished(version=3, generation=3, outcome=Outcome.FAILED, message="too late"))
    slow = FailedEngine(name="qwen-0", reason=reason, message="is still at it")
    version = make_version(3, phase=Phase.FAILED, progress=Progress(failed=(slow,)))
    expected = f"version 3: too late{f'; qwen-0: {reason}: is still at it' if told else ''}"
    assert view(fleet, [version]).last_failure == expected


def test_the_accepted_version_is_the_one_in_charge() -> None:
    def named(name: str, accepted: bool, age_s: int) -> WeightVersion:
        condition = make_condition(
            "Accepted", holds=accepted, reason="Accepted" if accepted else "AnotherWeightVersion"
        )
        return make_version(1, name=name, age=timedelta(seconds=age_s), conditions=(condition,))

    old, young = named("old", accepted=False, age_s=100), named("young", accepted=True, age_s=1)
    chosen = choose_version(make_fleet(), [old, young, make_version(1, name="elsewhere", fleet="other")])
    assert chosen is not None
    assert chosen.metadata.name == "young"


def test_what_is_not_accepted_is_a_problem() -> None:
    condition = make_condition("Accepted", holds=False, reason="HostPathNotAllowed", message="no host paths here")
    seen = view(make_fleet(conditions=(condition,)))
    assert seen.problems == ("Accepted=False (HostPathNotAllowed): no host paths here",)


def test_a_well_fleet_has_no_problems() -> None:
    degraded = make_condition("Degraded", holds=False, reason="AllWell")
    accepted = Condition(
        type="Accepted", status=ConditionStatus.TRUE, reason="Accepted", last_transition_time=datetime.now(UTC)
    )
    committed = Committed(version=7, time=NOW)
    seen = view(make_fleet(conditions=(degraded, accepted), committed=committed))
    assert seen.problems == ()
    assert seen.committed == 7
