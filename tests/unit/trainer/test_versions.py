"""Which number a version gets, and what is written."""

import re
from typing import Any

import numpy as np
import pytest

from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.versions import Wish, in_charge, is_under_way, label, logprob, plan


def engine(committed: int | None = 0, uid: str | None = None) -> dict[str, Any]:
    record = {} if committed is None else {"committed": {"version": committed, "weightVersionUID": uid}}
    return {"metadata": {"namespace": "rl", "name": "qwen"}, "spec": {}, "status": record}


def weight_version(version: int, source: str = "Trainer", **changes: Any) -> dict[str, Any]:
    metadata = {
        "name": "qwen-policy",
        "uid": "uid-1",
        "resourceVersion": "17",
        "generation": 3,
        "creationTimestamp": "2026-11-30T01:00:00Z",
    }
    spec = {"engineRef": {"name": "qwen"}, "version": version, "source": {"type": source}}
    status = {"version": version, "phase": "Active", "observedGeneration": 3}
    metadata |= changes.pop("metadata", {})
    return {"metadata": metadata, "spec": spec, "status": status | changes.pop("status", {})} | changes


def test_the_first_version_of_a_fleet_makes_an_object():
    planned = plan(engine(), None, Wish(step="10", pause="wait", drain_timeout_s=5, probe=[1, 2]))
    assert (planned.version, planned.creates, planned.name) == (1, True, "qwen-policy")
    assert planned.body is not None
    assert planned.body["spec"] == {
        "engineRef": {"name": "qwen"},
        "version": 1,
        "step": "10",
        "source": {"type": "Trainer", "trainer": {}},
        "pause": {"mode": "wait", "drainTimeoutSeconds": 5},
        "verify": {"probe": {"tokens": [1, 2]}},
    }


def test_a_bump_is_above_all_that_was_asked_for_or_committed_and_holds_for_what_was_read():
    for asked, committed, expected in ((4, 4, 5), (7, 4, 8), (4, 9, 10)):
        planned = plan(engine(committed), weight_version(asked), Wish(step="s"))
        assert planned.version == expected
        assert planned.body is not None
        assert planned.body["metadata"] == {"resourceVersion": "17", "uid": "uid-1"}


def test_a_bump_takes_back_what_was_true_of_the_version_before():
    body = plan(engine(1), weight_version(1, source="Checkpoint"), Wish()).body
    assert body is not None
    assert body["spec"]["source"] == {"type": "Trainer", "trainer": {}, "checkpoint": None}
    assert body["spec"]["recovery"] is None
    assert "pause" not in body["spec"]
    body = plan(engine(1), weight_version(1), Wish(recovery="step-2")).body
    assert body is not None
    assert body["spec"]["recovery"] == {"checkpoint": {"path": "step-2"}}


def test_a_bump_keeps_the_name_of_the_copy_of_the_version_before():
    """Whoever named it by hand may have done so a moment ago, and the operator may be away."""
    before = weight_version(4)
    before["spec"] |= {"recovery": {"checkpoint": {"path": "step-4"}}, "stored": "as the operator has seen it"}
    body = plan(engine(4), before, Wish(recovery="step-5")).body
    assert body is not None
    assert body["spec"]["stored"] == {"version": 4, "checkpoint": {"path": "step-4"}}
    assert body["spec"]["recovery"] == {"checkpoint": {"path": "step-5"}}
    for unheld in ({"phase": "Transferring"}, {"phase": "Failed"}, {"version": 3}):
        others = weight_version(4, status=unheld)
        others["spec"] |= {"recovery": {"checkpoint": {"path": "step-4"}}}
        body = plan(engine(3), others, Wish()).body
        assert body is not None
        assert "stored" not in body["spec"], "what it says of a version before is all that anybody knows"


@pytest.mark.parametrize("version", [0, 3, 4])
def test_a_number_that_was_used_is_refused(version: int):
    with pytest.raises(NotPossible, match=f"version {version} must exceed 4"):
        plan(engine(4), weight_version(4), Wish(version=version))


def test_a_version_that_waits_for_a_trainer_is_not_asked_for_again():
    for phase in ("Preparing", "Quiescing", "Transferring"):
        waiting = weight_version(5, status={"phase": phase})
        assert plan(engine(4), waiting, Wish(version=5)).body is None
        assert plan(engine(4), waiting, Wish()).version == 6
    for ended in ({"phase": "Failed"}, {"phase": "Active"}):
        with pytest.raises(NotPossible):
            plan(engine(4), weight_version(5, status=ended), Wish(version=5))
    assert not is_under_way(weight_version(5, source="Checkpoint", status={"phase": "Preparing"}))
    assert is_under_way(weight_version(5, status={"version": 4}))
    assert is_under_way(weight_version(5, status={"phase": "Failed", "observedGeneration": 2})), "it was asked again"


def test_who_sends_what_is_asked_for_already_cannot_ask_for_something_else_by_that():
    """A trainer that went back to an older step, or has its own check: it would be left out, and nobody would know."""
    asked = weight_version(5, status={"phase": "Preparing"})
    asked["spec"] |= {
        "step": "100",
        "pause": {"mode": "abort", "drainTimeoutSeconds": 60},
        "verify": {"digest": "Required", "probe": {"tokens": [1, 2], "expectedLogprobs": [logprob(-1.5)]}},
        "recovery": {"checkpoint": {"path": "step-100"}},
        "deadlines": {"transferSeconds": 600},
    }
    same: list[dict[str, Any]] = [
        {},
        {"step": "100", "pause": "abort", "drain_timeout_s": 60},
        {"probe": [1, 2], "probe_logprobs": [-1.5], "recovery": "step-100"},
        {"spec": {"deadlines": {"transferSeconds": 600}, "verify": {"digest": "Required"}}},
    ]
    for wish in same:
        assert plan(engine(4), asked, Wish(version=5, **wish)).body is None
    others: list[tuple[dict[str, Any], str]] = [
        ({"step": "90"}, "step"),
        ({"pause": "keep"}, "pause.mode"),
        ({"probe": [1, 2, 3]}, "verify.probe.tokens"),
        ({"probe": [1, 2], "probe_logprobs": [-2.0]}, "verify.probe.expectedLogprobs"),
        ({"recovery": "step-90", "step": "90"}, "recovery.checkpoint.path, step"),
        ({"spec": {"minServing": 2}}, "minServing"),
    ]
    for wish, fields in others:
        with pytest.raises(
            NotPossible, match=f"version 5 is asked for already, with another {re.escape(fields)}: leave"
        ):
            plan(engine(4), asked, Wish(version=5, **wish))


def test_of_several_objects_the_one_that_brought_the_commit_leads_else_the_oldest():
    older = weight_version(3, metadata={"uid": "uid-2", "creationTimestamp": "2026-11-29T00:00:00Z"})
    newer, foreign = weight_version(4), weight_version(9, metadata={"uid": "uid-3"})
    foreign["spec"]["engineRef"] = {"name": "llama"}
    going = weight_version(2, metadata={"uid": "uid-0", "creationTimestamp": "2026-11-01T00:00:00Z"})
    going["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    everybody = [foreign, newer, older, going]
    assert in_charge(everybody, engine()) is older
    assert in_charge(everybody, engine(4, "uid-1")) is newer
    assert in_charge([foreign, going], engine()) is None


def test_further_fields_go_along_but_not_those_that_arguments_set():
    wish = Wish(pause="abort", spec={"deadlines": {"transferSeconds": 30}, "pause": {"drainTimeoutSeconds": 9}})
    body = plan(engine(1), weight_version(1), wish).body
    assert body is not None
    assert body["spec"]["deadlines"] == {"transferSeconds": 30}
    assert body["spec"]["pause"] == {"mode": "abort", "drainTimeoutSeconds": 9}
    with pytest.raises(NotPossible, match="source, version"):
        Wish(spec={"version": 3, "source": {}})


@pytest.mark.parametrize("version", ["77", 7.0, True])
def test_a_version_is_a_whole_number(version: Any):
    with pytest.raises(NotPossible, match=f"version is {version!r}: must be a whole number, or left out"):
        Wish(version=version)


def test_numbers_of_other_libraries_are_numbers():
    wish = Wish(version=np.int64(7))  # type: ignore[arg-type]
    assert type(wish.version) is int
    assert (wish.version, label(np.int32(30)), label("epoch 3"), label("")) == (7, "30", "epoch 3", "")


@pytest.mark.parametrize("step", [None, 1.5, True, b"3"])
def test_a_step_is_a_text_or_a_whole_number(step: object):
    with pytest.raises(NotPossible, match=f"step is {step!r}: must be a text or a whole number"):
        label(step)


def test_a_fleet_that_is_being_deleted_is_asked_for_nothing():
    gone = engine()
    gone["metadata"]["deletionTimestamp"] = "2026-11-30T00:00:00Z"
    with pytest.raises(NotPossible, match="being deleted"):
        plan(gone, None, Wish())


def test_what_the_trainer_expects_of_the_probe_is_of_one_version():
    body = plan(engine(1), weight_version(1), Wish(probe=[3, 5, 7], probe_logprobs=[-1.5, -2e-7])).body
    assert body is not None
    assert body["spec"]["verify"] == {
        "probe": {
            "tokens": [3, 5, 7],
            "maxAbsLogprobDiff": None,
            "expectedLogprobs": ["-1.500000000000", "-0.000000200000"],
        }
    }
    body = plan(engine(1), weight_version(1), Wish()).body
    assert body is not None
    defaults = {"tokens": None, "maxAbsLogprobDiff": None, "expectedLogprobs": None}
    assert body["spec"]["verify"] == {"probe": defaults}, "what one run asks for is not asked of the next"
    given = {"verify": {"probe": {"maxAbsLogprobDiff": "0.05"}}}
    body = plan(engine(1), weight_version(1), Wish(probe=[1, 2], spec=given)).body
    assert body is not None
    assert body["spec"]["verify"] == {"probe": {**defaults, "tokens": [1, 2], "maxAbsLogprobDiff": "0.05"}}
    body = plan(engine(1), weight_version(1), Wish(spec={"verify": {"probe": {"tokens": [7, 8]}}})).body
    assert body is not None
    assert body["spec"]["verify"] == {"probe": {**defaults, "tokens": [7, 8]}}
    with pytest.raises(NotPossible, match="probe has 2 tokens, probe_logprobs 2 values"):
        Wish(probe=[1, 2], probe_logprobs=[-1.0, -1.0])
    with pytest.raises(NotPossible, match="probe has 0 tokens"):
        Wish(probe_logprobs=[-1.0])
    for bad in (0.5, float("nan"), float("-inf")):
        with pytest.raises(NotPossible, match="is no natural log-probability"):
            plan(engine(1), weight_version(1), Wish(probe=[1, 2], probe_logprobs=[bad]))
