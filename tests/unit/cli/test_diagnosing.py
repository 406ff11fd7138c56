"""`rollfleet diagnose`: one test for each cause that docs/troubleshooting.md tells of, and what stands beside it.

The causes are read from the page itself, so that one which is added there needs a remedy here.
"""

import io
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rollfleet_cli.asking import Answer
from rollfleet_cli.diagnosing import Finding, diagnose
from rollfleet_cli.plain import PlainConsole
from rollfleet_cli.remedies import (
    ENGINES,
    EXIT_CODES,
    FAILED,
    IGNORED,
    JOINING,
    NOT_ACCEPTED,
    STEPS,
    UNAVAILABLE,
    VERSIONS,
    WAITING,
)
from rollfleet_cli.render_inspect import render_diagnosis
from rollfleet_cli.snapshot import EventNote, HelperPod, OperatorView, Snapshot
from rollfleet_operator.api.rolloutengine import EngineDetail, EnginesSummary, LastFinished, Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import FailedAttempt, FailedEngine, Phase, Progress, WeightVersion
from rollfleet_protocol.state import Failure, FailureReason, OperationName, OperationStatus, Weights, WeightsState
from tests.support.builders import make_operation
from tests.support.cli import NOW, make_condition, make_fleet, make_version
from tests.support.pods import make_pod
from tests.support.states import make_state

PAGE = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
WORDS = "in its own words"
POD = "qwen-0-0-abcde"


def rows_of(title: str, column: str) -> list[str]:
    """Names in the first column of a table under a title; what follows a colon is a case of it."""
    section = PAGE.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]
    table = section.split(f"| {column} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    return list(dict.fromkeys(name.split(":")[0].strip() for cell in cells for name in cell.split(",")))


def well_fleet(**status: Any) -> RolloutEngine:
    conditions = (make_condition("Accepted"), make_condition("Available", reason="Serving"))
    return make_fleet(**{"conditions": conditions, **status})


def look(fleet: RolloutEngine | None, *versions: WeightVersion, **more: Any) -> Snapshot:
    return Snapshot(now=NOW, namespace="rl", name="qwen", fleet=fleet, versions=versions, **more)


def findings(fleet: RolloutEngine | None, *versions: WeightVersion, **more: Any) -> dict[str, Finding]:
    return {found.reason: found for found in diagnose(look(fleet, *versions, **more))}


def condition_of(kind: str, reason: str) -> Any:
    return make_condition(kind, holds=False, reason=reason, message=WORDS)


def test_a_fleet_that_is_well_has_no_findings() -> None:
    answer = Answer(POD, "p-1", make_state())
    version = make_version(1, phase=Phase.ACTIVE, conditions=(make_condition("Accepted"), make_condition("Active")))
    running = OperatorView("rollfleet/operator", (HelperPod("operator-1", "rollfleet", ready=True),))
    found = findings(well_fleet(), version, pods=(make_pod(),), answers=(answer,), operator=running)
    assert found == {}


def check(found: dict[str, Finding], reason: str, table: dict[str, Any]) -> Finding:
    assert reason in found, found
    assert (found[reason].cause, found[reason].remedy) == (table[reason].cause, table[reason].remedy)
    return found[reason]


@pytest.mark.parametrize("reason", rows_of("A WeightVersion is not followed", "reason"))
def test_a_weight_version_that_is_not_accepted(reason: str) -> None:
    version = make_version(1, conditions=(condition_of("Accepted", reason), condition_of("Active", reason)))
    found = check(findings(well_fleet(), version), reason, NOT_ACCEPTED)
    assert (found.subject, found.words) == ("WeightVersion/qwen-policy", WORDS)


@pytest.mark.parametrize("reason", rows_of("A WeightVersion waits", "reason of Active"))
def test_a_weight_version_that_waits(reason: str) -> None:
    version = make_version(1, phase=Phase.PENDING, conditions=(condition_of("Active", reason),))
    assert check(findings(well_fleet(), version), reason, WAITING).words == WORDS


@pytest.mark.parametrize(
    "reason", [*rows_of("An update hangs or failed", "reason"), *rows_of("A WeightVersion waits", "reason of Active")]
)
def test_an_update_that_failed(reason: str) -> None:
    """Also by what it waited for in Pending until its time was over."""
    ended = LastFinished(version=2, generation=1, outcome=Outcome.FAILED, reason=reason, message=WORDS)
    version = make_version(2, phase=Phase.FAILED, conditions=(condition_of("Active", reason),))
    found = check(findings(well_fleet(last_finished=ended), version), reason, WAITING | FAILED)
    assert (found.subject, found.words) == ("WeightVersion/qwen-policy", WORDS)
    check(findings(well_fleet(), version), reason, WAITING | FAILED)  # the fleet has lost its record


def test_an_attempt_that_failed_while_the_next_one_runs() -> None:
    last = FailedAttempt(attempt=1, reason="TransferFailed", message=WORDS)
    said = (condition_of("Active", "Preparing"),)
    version = make_version(2, phase=Phase.PREPARING, attempt=2, last_attempt=last, conditions=said)
    assert check(findings(well_fleet(), version), "TransferFailed", FAILED).words == f"attempt 1: {WORDS}"
    straight_on = last.model_copy(update={"attempt": 0, "reason": "Superseded"})
    version = make_version(2, phase=Phase.PREPARING, attempt=1, last_attempt=straight_on, conditions=said)
    assert findings(well_fleet(), version) == {}


def test_a_failure_whose_weight_version_was_deleted() -> None:
    ended = LastFinished(version=2, generation=1, outcome=Outcome.FAILED, reason="EnginesLost", message=WORDS)
    assert check(findings(well_fleet(last_finished=ended)), "EnginesLost", FAILED).words == f"version 2: {WORDS}"
    moving = make_version(3, phase=Phase.PREPARING, conditions=(make_condition("Accepted"),))
    assert findings(well_fleet(last_finished=ended), moving) == {}, "that one is over"


@pytest.mark.parametrize(
    "reason",
    [*rows_of("An update hangs or failed", "reason"), *rows_of("An update hangs or failed", "engine at")],
)
def test_an_update_that_is_held_up(reason: str) -> None:
    failed = FailedEngine(name=POD, reason=reason, message=WORDS)
    progress = Progress(done=0, total=1, failed=(failed,))
    version = make_version(
        2, phase=Phase.PREPARING, progress=progress, conditions=(condition_of("Active", "Preparing"),)
    )
    found = check(findings(well_fleet(), version), reason, STEPS | FAILED)
    assert (found.subject, found.words) == (f"Pod/{POD}", WORDS)


def test_nobody_waits_for_an_engine_of_an_update_that_failed() -> None:
    slow = FailedEngine(name=POD, reason="Quiescing", message=WORDS)
    version = make_version(2, phase=Phase.FAILED, progress=Progress(failed=(slow,)))
    assert findings(well_fleet(), version) == {}


@pytest.mark.parametrize("kind", rows_of("An update hangs or failed", "condition"))
@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.ACTIVE])
def test_a_promise_that_is_given_up_is_told(kind: str, phase: Phase) -> None:
    given_up = make_condition(kind, reason="Rolling", message=WORDS)
    version = make_version(2, phase=phase, conditions=(make_condition("Active"), given_up))
    found = check(findings(well_fleet(), version), kind, VERSIONS)
    assert (found.subject, found.words) == ("WeightVersion/qwen-policy", WORDS)
    kept = make_version(2, phase=phase, conditions=(make_condition("Active"), condition_of(kind, "OneVersion")))
    assert findings(well_fleet(), kept) == {}


@pytest.mark.parametrize("reason", ["ApplyFailed", "WeightsLost", "CommitUnknown", "ProbesDisagree"])
def test_what_is_wrong_with_a_fleet_that_answers_all_the_same(reason: str) -> None:
    degraded = make_condition("Degraded", reason=reason, message=WORDS)
    fleet = well_fleet(conditions=(*well_fleet().status.conditions, degraded))
    assert check(findings(fleet), reason, UNAVAILABLE).words == WORDS
    single = make_condition("Degraded", reason="EnginesNotWell", message=WORDS)
    assert findings(well_fleet(conditions=(*well_fleet().status.conditions, single))) == {}, (
        "the engine is named itself"
    )


@pytest.mark.parametrize("reason", rows_of("A fleet does not answer", "reason"))
def test_a_fleet_that_does_not_answer(reason: str) -> None:
    fleet = well_fleet(conditions=(make_condition("Accepted"), condition_of("Available", reason)))
    found = check(findings(fleet), reason, UNAVAILABLE)
    assert (found.subject, found.words) == ("RolloutEngine/qwen", WORDS)


@pytest.mark.parametrize("state", rows_of("Single engines", "state"))
def test_an_engine_that_is_not_well(state: str) -> None:
    detail = EngineDetail(name=POD, ordinal=0, state=state, since=NOW, message=WORDS)
    fleet = well_fleet(engines=EnginesSummary(details=(detail,)))
    for pods in ((), (make_pod(),)):
        assert check(findings(fleet, pods=pods), state, ENGINES).words == WORDS


@pytest.mark.parametrize("state", rows_of("Single engines", "coming up"))
def test_an_engine_that_comes_up_and_says_what_keeps_it(state: str) -> None:
    words = "restarted 3 times, exit code 1" if state == "Starting" else "CheckpointNotFound: step-1 is not there"
    for message, told in ((words, {state}), ("", set()), ("joins after the update", set())):
        detail = EngineDetail(name=POD, ordinal=0, state=state, since=NOW, message=message)
        found = findings(well_fleet(engines=EnginesSummary(details=(detail,))))
        assert set(found) == told
    assert JOINING[state].remedy


@pytest.mark.parametrize("code", rows_of("Single engines", "exit code of an engine"))
def test_an_engine_that_ended(code: str) -> None:
    ended = {"terminated": {"exitCode": int(code), "reason": "Error", "message": WORDS}}
    container = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    pod = make_pod(container=container, conditions=[])
    found = findings(well_fleet(), pods=(pod,))[f"ExitCode{code}"]
    assert found.cause == EXIT_CODES[int(code)].cause
    assert WORDS in found.words


@pytest.mark.parametrize("reason", rows_of("A fleet's settings have no effect", "reason"))
def test_settings_without_effect(reason: str) -> None:
    said = make_condition("SettingsIgnored", holds=True, reason=reason, message=WORDS)
    status = well_fleet().status
    fleet = well_fleet(conditions=(*status.conditions, said))
    assert check(findings(fleet), reason, IGNORED).words == WORDS


def test_every_remedy_is_documented() -> None:
    assert set(NOT_ACCEPTED) == set(rows_of("A WeightVersion is not followed", "reason"))
    assert set(IGNORED) == set(rows_of("A fleet's settings have no effect", "reason"))
    assert set(WAITING) == set(rows_of("A WeightVersion waits", "reason of Active"))
    assert set(FAILED) == set(rows_of("An update hangs or failed", "reason"))
    assert set(STEPS) == set(rows_of("An update hangs or failed", "engine at"))
    assert set(VERSIONS) == set(rows_of("An update hangs or failed", "condition"))
    assert set(JOINING) == set(rows_of("Single engines", "coming up"))
    assert set(UNAVAILABLE) == set(rows_of("A fleet does not answer", "reason"))
    assert set(ENGINES) == set(rows_of("Single engines", "state"))
    assert {str(code) for code in EXIT_CODES} == set(rows_of("Single engines", "exit code of an engine"))


# --- what guards and pods say


def said(reason: str, **state: Any) -> Finding:
    answer = Answer(POD, "p-1", make_state(**state))
    return findings(well_fleet(epoch=4), pods=(make_pod(),), answers=(answer,))[reason]


GUARDS: dict[str, Callable[[], Finding]] = {
    "EngineDead": lambda: said("EngineDead", alive=False),
    "Uncertain": lambda: said("Uncertain", weights=Weights(state=WeightsState.UNCERTAIN)),
    "Quarantined": lambda: said("Quarantined", epoch=2**60),
    "CheckpointIncomplete": lambda: said(
        "CheckpointIncomplete",
        operation=make_operation(
            OperationName.PREPARE,
            OperationStatus.FAILED,
            version=3,
            failure=Failure(reason=FailureReason.CHECKPOINT_INCOMPLETE, message=WORDS),
        ),
    ),
}


@pytest.mark.parametrize("reason", GUARDS)
def test_what_a_guard_says_of_itself(reason: str) -> None:
    found = GUARDS[reason]()
    assert (found.subject, found.reason) == (f"Pod/{POD}", reason)
    assert found.remedy


@pytest.mark.parametrize("disowned", [True, False])
def test_a_guard_that_does_not_answer(disowned: bool) -> None:
    answer = Answer[Any](POD, "p-1", error=WORDS, disowned=disowned)
    assert findings(well_fleet(), pods=(make_pod(),), answers=(answer,))["Unreachable"].words == WORDS


def test_an_engine_that_still_starts_is_no_fault() -> None:
    answer = Answer[Any](POD, "p-1", error="connection refused")
    pod = make_pod(container={"started": False}, conditions=[])
    assert findings(well_fleet(), pods=(pod,), answers=(answer,)) == {}


def test_who_may_not_ask_learns_nothing_about_engines() -> None:
    answer = Answer[Any](POD, "p-1", error="forbidden", denied=True)
    assert findings(well_fleet(), pods=(make_pod(),), answers=(answer,)) == {}


def test_an_image_that_cannot_be_pulled() -> None:
    container = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": WORDS}}}
    found = findings(well_fleet(), pods=(make_pod(container=container, conditions=[]),))["Broken"]
    assert found.words == f"ImagePullBackOff: {WORDS}"


def creating() -> dict[str, Any]:
    container = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    return make_pod(container=container, conditions=[], phase="Pending")


def test_a_pod_that_is_being_created_is_no_fault() -> None:
    pulled = EventNote(f"Pod/{POD}", "Normal", "Scheduled", "assigned", 1, NOW)
    waited = EventNote(f"Pod/{POD}", "Warning", "FailedScheduling", "no node yet", 1, NOW)
    router = HelperPod("qwen-router-1", "rl", ready=False, message="ContainerCreating")
    assert findings(well_fleet(), pods=(creating(),), events=(waited, pulled), routers=(router,)) == {}


def test_what_keeps_a_pod_from_being_created_is_told_by_events_alone() -> None:
    events = tuple(EventNote(f"Pod/{POD}", "Warning", "FailedMount", words, 1, NOW) for words in ("older", WORDS))
    found = check(findings(well_fleet(), pods=(creating(),), events=events), "NotCreated", ENGINES)
    assert (found.subject, found.words) == (f"Pod/{POD}", f"FailedMount: {WORDS}")
    assert findings(well_fleet(), pods=(make_pod(),), events=events) == {}, "it runs by now"


@pytest.mark.parametrize(("serves", "message"), [(False, WORDS), (True, WORDS), (True, "Running")])
def test_a_router_that_does_not_answer(serves: bool, message: str) -> None:
    fleet = well_fleet() if serves else make_fleet(conditions=(condition_of("Available", "Starting"),))
    router = HelperPod("qwen-router-1", "rl", ready=False, message=message)
    found = check(findings(fleet, routers=(router,)), "RouterNotReady", UNAVAILABLE)
    assert (found.subject, message in found.words) == ("Pod/qwen-router-1", True)


def test_a_router_that_waits_for_the_engines_is_no_fault() -> None:
    router = HelperPod("qwen-router-1", "rl", ready=False, message="Running")
    fleet = make_fleet(conditions=(condition_of("Available", "Starting"),))
    assert set(findings(fleet, routers=(router,))) == {"Starting"}


def test_a_router_that_is_not_there() -> None:
    assert set(findings(well_fleet(), routers=())) == {"RouterNotReady"}
    assert findings(well_fleet(), routers=None) == {}, "none is wanted"


def test_a_pod_that_finds_no_node() -> None:
    unscheduled = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": WORDS}]
    found = findings(well_fleet(), pods=(make_pod(conditions=unscheduled, phase="Pending"),))
    assert WORDS in found["Unschedulable"].words


def test_an_engine_that_is_held_is_not_said_to_be_restored_by_itself() -> None:
    detail = EngineDetail(name=POD, ordinal=0, state="Uncertain", since=NOW, message=WORDS)
    engines = EnginesSummary(details=(detail,))
    state = make_state(weights=Weights(state=WeightsState.UNCERTAIN), open=False)
    more = {"pods": (make_pod(),), "answers": (Answer(POD, "p-1", state),)}
    for reason, names in (("Held", {"Held"}), ("CatchingUp", {"Uncertain", "CatchingUp"})):
        fleet = well_fleet(conditions=(condition_of("Available", reason),), engines=engines)
        assert set(findings(fleet, **more)) == names


def test_a_guard_that_is_silent_is_told_of_once() -> None:
    failed = FailedEngine(name=POD, reason="EngineUnreachable", message=f"does not answer: {WORDS}")
    version = make_version(2, phase=Phase.TRANSFERRING, progress=Progress(done=0, total=1, failed=(failed,)))
    answer = Answer[Any](POD, "p-1", error=WORDS)
    assert set(findings(well_fleet(), version, pods=(make_pod(),), answers=(answer,))) == {"Unreachable"}
    assert set(findings(well_fleet(), version, pods=(make_pod(),))) == {"EngineUnreachable"}


def test_an_engine_that_cannot_be_fenced_is_told_of_once() -> None:
    detail = EngineDetail(name=POD, ordinal=0, state="Unfenced", since=NOW, message=WORDS)
    failed = FailedEngine(name=POD, reason="CannotBeFenced", message=WORDS)
    version = make_version(2, phase=Phase.PREPARING, progress=Progress(done=0, total=1, failed=(failed,)))
    assert set(findings(well_fleet(engines=EnginesSummary(details=(detail,))), version)) == {"Unfenced"}


def test_what_several_engines_say_alike_is_printed_once() -> None:
    found = (
        *(Finding(f"Pod/qwen-{n}", "CheckpointNotFound", WORDS, "cause", "remedy") for n in range(2)),
        Finding("Pod/qwen-2", "CheckpointNotFound", "others", "cause", "remedy"),
    )
    out = PlainConsole(width=200, file=io.StringIO())
    out.print(render_diagnosis(look(None), found))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    told = [line.rstrip() for line in lines if line.startswith("Pod/")]
    assert told == [f"Pod/qwen-0, Pod/qwen-1: CheckpointNotFound: {WORDS}", "Pod/qwen-2: CheckpointNotFound: others"]


# --- the whole


def test_a_weight_version_whose_fleet_does_not_exist() -> None:
    found = findings(None, make_version(1))
    assert set(found) == {"EngineNotFound"}


def test_the_root_comes_first_and_nothing_twice() -> None:
    detail = EngineDetail(name=POD, ordinal=0, state="Broken", since=NOW, message=WORDS)
    fleet = make_fleet(
        conditions=(make_condition("Accepted"), condition_of("Available", "Broken")),
        engines=EnginesSummary(details=(detail,)),
    )
    ended = {"terminated": {"exitCode": 78, "message": WORDS}}
    pod = make_pod(container={"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}, conditions=[])
    found = diagnose(look(fleet, make_version(2, phase=Phase.PENDING), pods=(pod,)))
    assert [each.reason for each in found] == ["ExitCode78", "Broken", "Broken"]
    assert [each.subject for each in found] == [f"Pod/{POD}", f"Pod/{POD}", "RolloutEngine/qwen"]


def test_a_reason_that_is_not_known_is_still_told() -> None:
    fleet = well_fleet(conditions=(condition_of("Available", "FromTheFuture"),))
    found = findings(fleet)["FromTheFuture"]
    assert (found.words, found.remedy) == (WORDS, "see docs/troubleshooting.md")


def test_events_need_no_judgement() -> None:
    event = EventNote("Pod/x", "Warning", "Unhealthy", "probe failed", 3, NOW - timedelta(seconds=5))
    assert findings(well_fleet(), events=(event,)) == {}


def test_every_row_was_read() -> None:
    """A page that is written otherwise must not make the tests above empty."""
    assert len(rows_of("An update hangs or failed", "reason")) >= 20
    assert re.search(r"CheckpointNotFound", PAGE)
