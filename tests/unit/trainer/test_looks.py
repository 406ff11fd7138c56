"""What a WeightVersion says, judged for who sends it."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from rollfleet_protocol.refusals import RefusalReason
from rollfleet_trainer.errors import (
    AnotherSender,
    EngineProblem,
    FleetNeedsWeights,
    GuardRefusedError,
    SenderLost,
    Superseded,
    TrainerError,
    UpdateFailed,
)
from rollfleet_trainer.looks import GRACE_S, Asked, Attempt, Look, Patience, Standing, attempt_of, judge
from tests.support.memory_api import conditions

ASKED = Asked("rl", "qwen", "qwen-policy", "uid-1", version=7, generation=3)
HOLDER = "grpo/me"
TARGET = {"name": "qwen-0-0-a", "incarnation": "i0", "url": "https://10.0.0.1:8001", "rankOffset": 1, "worldSize": 2}
STEPS = {"Accepted": True, "Quiesced": False, "Transferred": False, "Verified": False, "Active": False}


def seen(version: int = 7, **status: Any) -> dict[str, Any]:
    told = {"observedGeneration": 3, "version": 7, "phase": "Preparing", "epoch": 12, "attempt": 1}
    told |= {"conditions": conditions(**(STEPS | status.pop("holds", {})))}
    return {"metadata": {}, "spec": {"version": version}, "status": told | status}


def look(version: int = 7, **status: Any) -> Look:
    return judge(seen(version, **status), ASKED, HOLDER)


def error_of(version: int = 7, **status: Any) -> TrainerError:
    found = look(version, **status)
    assert found.standing is Standing.ENDED
    assert found.error is not None
    return found.error


READY = {"phase": "Transferring", "holds": {"Quiesced": True}, "sender": {"holder": HOLDER}, "targets": [TARGET]}


def test_until_the_status_speaks_of_this_write_nothing_in_it_counts():
    active = {"Quiesced": False, "Transferred": True, "Active": True}
    assert look(observedGeneration=2, holds=active).standing is Standing.WAITING
    told = seen(holds=active)
    told["status"]["version"] = 6
    assert judge(told, ASKED, HOLDER).standing is Standing.WAITING
    assert judge({"metadata": {}, "spec": {"version": 7}}, ASKED, HOLDER).standing is Standing.WAITING


def test_all_closed_and_armed_for_us_is_when_we_send():
    found = look(**READY)
    assert (found.standing, found.epoch, found.attempt) == (Standing.READY, 12, 1)
    [seat] = found.seats
    assert (seat.name, seat.incarnation, seat.rank_offset, seat.world_size) == ("qwen-0-0-a", "i0", 1, 2)
    assert (
        look(**{**READY, "phase": "Verifying", "holds": {"Quiesced": True, "Transferred": True}}).standing
        is Standing.TAKEN
    )
    assert look(phase="Opening", holds={"Transferred": True, "Verified": True}).standing is Standing.TAKEN
    assert look(phase="Active", holds={"Transferred": True, "Active": True}).standing is Standing.ACTIVE


@pytest.mark.parametrize("sender", [None, {"holder": "grpo/another"}])
def test_a_push_that_is_another_s_is_none_of_ours(sender: dict[str, str] | None):
    error = error_of(**{**READY, "sender": sender})
    assert isinstance(error, SenderLost)
    assert "this process is 'grpo/me'" in str(error)


@pytest.mark.parametrize("before", [HOLDER, "grpo/another", ""])
def test_an_attempt_from_before_this_call_is_neither_ours_nor_our_end(before: str):
    """Who asks for the same version again meets the status of the sender that was."""
    old = seen(**{**READY, "sender": {"holder": before}})
    passed = attempt_of(old)
    assert passed == Attempt(12, before)
    again = replace(ASKED, passed=passed)
    assert judge(old, again, HOLDER).standing is Standing.WAITING
    assert judge(seen(**{**READY, "epoch": 13}), again, HOLDER).standing is Standing.READY
    assert judge(seen(**{**READY, "sender": {"holder": HOLDER}}), ASKED, HOLDER).standing is Standing.READY
    lost = seen(**{**READY, "phase": "Failed", "holds": {"Active": "SenderLost: it is gone"}})
    assert isinstance(judge(lost, again, HOLDER).error, SenderLost)


def test_only_an_attempt_that_waits_for_its_sender_has_one():
    assert attempt_of(seen()) is None
    assert attempt_of(seen(**{**READY, "holds": {"Quiesced": True, "Transferred": True}})) is None
    assert attempt_of(seen(8, **READY)) is None, "it is of the version before"


def test_what_is_not_accepted_ends_with_the_operator_s_words():
    error = error_of(holds={"Accepted": "VersionNotHigher: version 7 must exceed 9"})
    assert isinstance(error, UpdateFailed)
    assert error.reason == "VersionNotHigher"
    assert "version 7 must exceed 9" in str(error)


def test_a_failure_carries_reason_and_the_engines_own_text():
    problems = [{"name": "qwen-1-0-b", "reason": "CoverageFailed", "message": "model.norm.weight\x1b[1m is missing"}]
    progress = {"done": 1, "total": 2, "failed": problems}
    error = error_of(phase="Failed", progress=progress, holds={"Active": "CoverageFailed: attempt 3: qwen-1-0-b"})
    assert isinstance(error, UpdateFailed)
    assert not isinstance(error, FleetNeedsWeights)
    assert error.reason == "CoverageFailed"
    assert error.engines == (EngineProblem("qwen-1-0-b", "CoverageFailed", "model.norm.weight\\x1b[1m is missing"),)
    assert "qwen-1-0-b: CoverageFailed: model.norm.weight" in str(error)


def test_a_fleet_that_has_lost_its_weights_says_what_to_do():
    error = error_of(phase="Failed", holds={"Active": "WeightsLost: version 6 is stored nowhere"})
    assert isinstance(error, FleetNeedsWeights)
    assert "stored nowhere" in str(error)
    assert "send a version by update" in str(error)


def test_a_push_that_failed_for_its_sender_names_it():
    error = error_of(phase="Failed", holds={"Active": "SenderLost: trainer 'grpo/me' has not renewed Lease"})
    assert isinstance(error, SenderLost)
    assert "has not renewed" in str(error)


def test_a_higher_version_supersedes_unless_ours_was_committed_before_it():
    error = error_of(8)
    assert isinstance(error, Superseded)
    assert "asks for 8 now" in str(error)
    entry = {"version": 7, "outcome": "Active"}
    assert look(8, history=[{"version": 6, "outcome": "Failed"}, entry]).standing is Standing.ACTIVE
    opening = look(8, phase="Opening", committedVersion=7, history=[{"version": 6, "outcome": "Failed"}])
    assert (opening.standing, opening.error) == (Standing.TAKEN, None), "it is served already: not superseded"
    assert isinstance(error_of(8, history=[{"version": 7, "outcome": "Superseded", "message": ""}]), Superseded)
    failed = error_of(8, history=[{"version": 7, "outcome": "Failed", "message": "probe: 0.3"}])
    assert isinstance(failed, UpdateFailed)
    assert "probe: 0.3" in str(failed)


def test_each_phase_is_waited_for_as_the_spec_says_and_anew_in_each_attempt():
    spec = {
        "version": 7,
        "deadlines": {"prepareSeconds": 30, "quiesceSeconds": 20, "transferSeconds": 40, "verifySeconds": 10},
    }
    patience = Patience({"spec": spec}, {"spec": {"startup": {"timeoutSeconds": 100}}}, 1000.0)
    assert patience.transfer_s == 40
    now = 1000.0
    for phase, seconds in (
        ("Pending", 130),
        ("Preparing", 30),
        ("Quiescing", 20),
        ("Transferring", 40),
        ("Verifying", 10),
    ):
        at = Look(Standing.WAITING, phase=phase, attempt=1, epoch=12)
        assert patience.left_s(at, now) == seconds + GRACE_S
        assert patience.left_s(at, now + 5) == seconds + GRACE_S - 5
        now += 7
    again = Look(Standing.WAITING, phase="Preparing", attempt=2, epoch=13)
    assert patience.left_s(again, now) == 30 + GRACE_S
    assert patience.left_s(again, now + 30 + GRACE_S) == 0
    error = patience.over(again, ASKED, "the API server: no answer")
    assert error.reason == "OperatorSilent"
    assert "Preparing for 90 s" in str(error)
    assert "no answer" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        UpdateFailed("CoverageFailed", "text", [EngineProblem("a", "b", "c")]),
        FleetNeedsWeights("WeightsLost", "text"),
        GuardRefusedError("engine-0: no", RefusalReason.FORBIDDEN),
        AnotherSender("held", "grpo/a"),
        SenderLost("lost"),
    ],
)
def test_errors_go_to_other_ranks_as_they_are(error: TrainerError):
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))
