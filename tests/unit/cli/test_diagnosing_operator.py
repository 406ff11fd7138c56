"""`rollfleet diagnose` of the operator itself: away, not ready, without a leader, or failing."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rollfleet_cli.snapshot import HelperPod, LeaseView, OperatorView, entries_about
from rollfleet_operator.api.weightversion import Phase
from tests.support.cli import NOW, make_fleet, make_version
from tests.unit.cli.test_diagnosing import WORDS, findings, well_fleet


def test_a_fleet_that_no_operator_looks_at() -> None:
    found = findings(make_fleet())["NotObserved"]
    assert "no operator looks at this namespace" in found.cause
    assert "watchNamespaces" in found.remedy


def test_a_spec_that_the_operator_has_not_seen() -> None:
    fleet = well_fleet(observed_generation=3)
    newer = fleet.model_copy(update={"metadata": fleet.metadata.model_copy(update={"generation": 4})})
    assert findings(newer)["NotObserved"].words == "its status speaks of generation 3 of 4"
    version = make_version(2, generation=2, observed_generation=1, phase=Phase.ACTIVE)
    assert findings(well_fleet(), version)["NotObserved"].subject == "WeightVersion/qwen-policy"


def test_an_operator_that_is_not_ready() -> None:
    pod = HelperPod("operator-1", "rollfleet", ready=False, restarts=3, message="CrashLoopBackOff")
    found = findings(well_fleet(), operator=OperatorView("rollfleet/operator", (pod,)))["OperatorNotReady"]
    assert found.words == "pod rollfleet/operator-1 is not ready, restarted 3 times: CrashLoopBackOff"
    one_of_two = OperatorView("rollfleet/operator", (pod, replace(pod, name="operator-2", ready=True)))
    assert findings(well_fleet(), operator=one_of_two) == {}


def test_an_operator_that_is_gone_matters_where_something_waits_for_it() -> None:
    gone = OperatorView("rollfleet/operator")
    assert findings(well_fleet(), make_version(2, phase=Phase.ACTIVE), operator=gone) == {}
    found = findings(well_fleet(), make_version(2, phase=Phase.PREPARING), operator=gone)["OperatorNotReady"]
    assert "no pod runs under ServiceAccount rollfleet/operator" in found.words


LEASES = [
    ("renewed", LeaseView("operator-1", NOW - timedelta(seconds=3)), False),
    ("old", LeaseView("operator-1", NOW - timedelta(seconds=90)), True),
    ("given back", LeaseView("", NOW), True),
    ("never renewed", LeaseView("operator-1", None), True),
    ("no election", None, False),
]


@pytest.mark.parametrize(("lease", "found"), [case[1:] for case in LEASES], ids=[case[0] for case in LEASES])
def test_an_operator_of_which_no_process_acts(lease: LeaseView | None, found: bool) -> None:
    ready = OperatorView("rollfleet/operator", (HelperPod("operator-1", "rollfleet", ready=True),), lease=lease)
    assert (set(findings(well_fleet(), operator=ready)) == {"NoLeader"}) is found


def test_an_operator_that_runs_elsewhere_and_holds_the_lease_is_not_gone() -> None:
    view = OperatorView("rollfleet/operator", lease=LeaseView("somewhere", NOW))
    assert findings(well_fleet(), make_version(2, phase=Phase.PREPARING), operator=view) == {}


@pytest.mark.parametrize(("message", "reason"), [("pass failed", "PassFailed"), ("pass crashed", "PassCrashed")])
def test_what_the_operators_log_says(message: str, reason: str) -> None:
    text = "\n".join(
        [
            "not JSON",
            '{"level": "warning", "message": "pass failed", "key": "rl/other", "error": "elsewhere"}',
            f'{{"level": "warning", "message": "{message}", "key": "rl/qwen", "error": "older"}}',
            f'{{"level": "warning", "message": "{message}", "key": "rl/qwen", "error": "{WORDS}"}}',
            '{"level": "info", "message": "decision", "key": "rl/qwen"}',
        ]
    )
    log = tuple(entries_about("rl/qwen", "operator-1", text))
    assert [entry.error for entry in log] == ["older", WORDS]
    view = OperatorView("rollfleet/operator", (HelperPod("operator-1", "rollfleet", ready=True),), log)
    found = findings(well_fleet(), operator=view)
    assert (found[reason].words, set(found)) == (WORDS, {reason})
