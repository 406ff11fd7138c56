"""What can be said for certain about an engine, and which epoch counts."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.observed import ContainerState, GuardView, NodeView
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.world import Engine, Fence, build_world, holds, judge_epochs
from rollfleet_protocol.commands import Open
from rollfleet_protocol.state import Gate, WeightsState
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_state,
    make_weights,
)

EPOCH = 5
CLOSED: dict[str, Any] = {"open": False, "epoch": EPOCH}


def gone(state: Any = None) -> GuardView:
    return GuardView(state=state, reachable=False, last_contact=NOW, error="timed out")


FENCES: dict[str, tuple[dict[str, Any], GuardView | None, Fence]] = {
    "open": ({}, make_guard(make_state(epoch=EPOCH)), Fence.LOOSE),
    "closed under this epoch, not armed": ({}, make_guard(make_state(**CLOSED)), Fence.CLOSED),
    "armed": ({}, make_guard(make_state(armed=True, **CLOSED)), Fence.HELD),
    "armed under an older epoch": ({}, make_guard(make_state(armed=True, open=False, epoch=4)), Fence.LOOSE),
    "closed, still draining": ({}, make_guard(make_state(in_flight=1, armed=True, **CLOSED)), Fence.LOOSE),
    "never opened, told the epoch": ({}, make_guard(make_state(closed_reason="Starting", **CLOSED)), Fence.HELD),
    "never opened, not told the epoch": (
        {},
        make_guard(make_state(closed_reason="Starting", open=False, epoch=4)),
        Fence.LOOSE,
    ),
    "unknown to us": ({}, None, Fence.UNKNOWN),
    "silent since it was open": ({}, gone(make_state(epoch=EPOCH)), Fence.UNKNOWN),
    "silent since it was closed": ({}, gone(make_state(**CLOSED)), Fence.UNKNOWN),
    "silent since it was armed": ({}, gone(make_state(armed=True, **CLOSED)), Fence.HELD),
    "silent since it was armed under an older epoch": (
        {},
        gone(make_state(armed=True, open=False, epoch=4)),
        Fence.UNKNOWN,
    ),
    "container terminated": ({"container": ContainerState.TERMINATED}, gone(), Fence.HELD),
    "container waiting": ({"container": ContainerState.WAITING}, gone(), Fence.HELD),
    "container never up": ({"started": False}, gone(), Fence.HELD),
    "not scheduled": ({"phase": "Pending", "container": ContainerState.UNKNOWN}, None, Fence.HELD),
    "evicted": ({"phase": "Failed", "container": ContainerState.TERMINATED}, gone(), Fence.HELD),
    "never taken by the kubelet": ({"phase": "Failed", "container": ContainerState.UNKNOWN}, gone(), Fence.HELD),
    "called Failed by the control plane, since its node is gone": ({"phase": "Failed"}, gone(), Fence.UNKNOWN),
    "terminated by an old word, open by its own": (
        {"container": ContainerState.TERMINATED},
        make_guard(make_state(epoch=EPOCH)),
        Fence.LOOSE,
    ),
    "up by its own word, and closed by an update": ({"started": False}, make_guard(make_state(**CLOSED)), Fence.CLOSED),
    "up by its own word, and never opened": (
        {"started": False},
        make_guard(make_state(open=False, closed_reason="Starting")),
        Fence.HELD,
    ),
    "being deleted, open": ({"deleting": True}, make_guard(make_state(epoch=EPOCH)), Fence.LOOSE),
    "being deleted, drained": (
        {"deleting": True},
        make_guard(make_state(open=False, epoch=1, closed_reason="Draining")),
        Fence.HELD,
    ),
    "being deleted, its hook not run": ({"deleting": True}, make_guard(make_state(open=False, epoch=1)), Fence.LOOSE),
    "being deleted, silent": ({"deleting": True}, gone(), Fence.UNKNOWN),
    "silent since it drained": ({}, gone(make_state(open=False, closed_reason="Draining")), Fence.HELD),
    "silent since it drained all but one": (
        {},
        gone(make_state(open=False, closed_reason="Draining", in_flight=1)),
        Fence.UNKNOWN,
    ),
}


OFF: dict[str, tuple[GuardView | None, Fence]] = {
    "silent": (gone(), Fence.HELD),
    "unknown to us": (None, Fence.HELD),
    "open by its own word": (make_guard(make_state(epoch=EPOCH)), Fence.LOOSE),
}


@pytest.mark.parametrize("case", OFF)
def test_a_node_that_a_person_calls_switched_off_holds_no_engine_that_answers(case: str) -> None:
    guard, expected = OFF[case]
    node = NodeView("node-1", out_of_service=True)
    assert Engine(make_pod(deleting=True), guard, 0, node=node).fence(EPOCH) is expected


def test_a_taint_left_over_on_a_node_that_is_ready_again_says_nothing() -> None:
    """Engines that tolerate every taint start there anew, and may be open."""
    node = NodeView("node-1", out_of_service=True, ready_since=NOW, heard=NOW)
    assert Engine(make_pod(), gone(), 0, node=node).fence(EPOCH) is Fence.UNKNOWN


@pytest.mark.parametrize("case", FENCES)
def test_how_certain_it_is_that_an_engine_answers_nobody(case: str) -> None:
    pod, guard, expected = FENCES[case]
    assert Engine(make_pod(**pod), guard, 0).fence(EPOCH) is expected


QUARANTINED: dict[str, tuple[dict[str, Any], Fence]] = {
    "open": ({}, Fence.LOOSE),
    "closed, and the operator's silence would open it": ({"open": False}, Fence.LOOSE),
    "closed and armed": ({"open": False, "armed": True}, Fence.HELD),
    "closed and uncertain": ({"open": False, "closed_reason": "Uncertain"}, Fence.HELD),
}


@pytest.mark.parametrize("case", QUARANTINED)
def test_a_quarantined_guard_is_held_only_while_nothing_can_open_it(case: str) -> None:
    state, expected = QUARANTINED[case]
    guard = make_guard(make_state(**{"epoch": 10**9} | state))
    assert Engine(make_pod(), guard, 0, quarantined=True).fence(EPOCH) is expected


EPOCHS: dict[str, tuple[int, dict[str, int], set[str], int]] = {
    "all behind": (7, {"a": 6, "b": 0}, set(), 7),
    "ahead of a lost record": (0, {"a": 41, "b": 42}, set(), 42),
    "a lost record of a long life": (0, {"a": 50_000, "b": 50_001, "c": 0}, set(), 50_001),
    "an absurd jump": (7, {"a": 8, "b": 2**61}, {"b"}, 8),
    "just not absurd": (7, {"a": 1007}, set(), 1007),
    "just absurd": (7, {"a": 1008}, {"a"}, 7),
    "absurd beside a lost record": (0, {"a": 3, "b": 5000}, {"b"}, 3),
    "no fleet has come so far": (0, {"a": 0, "b": 2**53 + 1}, {"b"}, 0),
    "nobody": (0, {}, set(), 0),
}


@pytest.mark.parametrize("case", EPOCHS)
def test_absurd_epochs_are_not_followed(case: str) -> None:
    recorded, told, absurd, highest = EPOCHS[case]
    assert judge_epochs(recorded, told) == (frozenset(absurd), highest)


def test_at_an_address_that_was_given_away_only_its_new_owner_speaks() -> None:
    """The pod of a node that is cut off is still there, and may be open; the network has forgotten it."""
    old, new = make_pod(0), make_pod(1, ip=make_pod(0).ip, created=NOW + timedelta(minutes=5))
    said = make_guard(make_state(armed=True, **CLOSED))
    world = build_world(make_observed(pods=(new, old), guards={old.uid: said, new.uid: said}))
    assert [engine.fence(EPOCH) for engine in world.engines] == [Fence.UNKNOWN, Fence.HELD]
    assert "belongs to another engine" in (world.engines[0].guard or said).error


INVENTED: dict[str, tuple[int, int, int, bool, int]] = {  # recorded, told, vouched; quarantined, highest
    "as recorded": (7, 7, 7, False, 7),
    "the record was lost": (0, 9, 9, False, 9),
    "the record was lost while it was followed": (3, 9, 9, False, 9),
    "one more than anybody gave it": (7, 8, 7, True, 7),
    "one more than when it was met": (0, 9, 8, True, 0),
}


@pytest.mark.parametrize("case", INVENTED)
def test_an_epoch_that_nobody_gave_is_not_followed(case: str) -> None:
    recorded, told, vouched, absurd, highest = INVENTED[case]
    assert judge_epochs(recorded, {"a": told}, {"a": vouched}) == (frozenset("a" if absurd else ""), highest)


def test_a_guard_that_raises_its_epoch_by_itself_holds_nobody_up() -> None:
    status = RolloutEngineStatus(epoch=EPOCH, committed=make_committed(0))
    liar = make_guard(make_state(epoch=EPOCH + 1, incarnation="liar"), vouched=EPOCH)
    late = make_guard(make_state(epoch=EPOCH, incarnation="late", open=False), vouched=EPOCH)
    decision = plan(make_observed(make_fleet(status=status), guards={"pod-0": liar, "pod-1": late}), NOW)
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.epoch == EPOCH
    calls = [action for action in decision.actions if isinstance(action, GuardCall)]
    assert [(call.pod_uid, type(call.command)) for call in calls] == [("pod-1", Open)]


def test_the_committed_weights_are_told_by_version_and_digest() -> None:
    assert holds(make_state(3), make_committed(3))
    assert not holds(make_state(3), make_committed(4))
    assert not holds(make_state(3), make_committed(3, digest="sha256:other"))
    assert not holds(make_state(3, weights=make_weights(3, WeightsState.LOADED)), make_committed(3))
    assert not holds(make_state(3), None)


def test_version_zero_counts_with_and_without_a_digest() -> None:
    reloaded = make_weights(0).model_copy(update={"digest": "sha256:model"})
    assert holds(make_state(0), make_committed(0))
    assert holds(make_state(0, weights=reloaded), make_committed(0))


def test_a_pod_whose_label_was_tampered_with_is_still_an_engine() -> None:
    router = replace(make_pod(2), ordinal=-1, name="qwen-router-6b5f-x2x4z")
    pods = (replace(make_pod(1), ordinal=-1), make_pod(0), router)
    world = build_world(make_observed(pods=pods, guards={}))
    assert [engine.ordinal for engine in world.engines] == [0, 1]


def test_an_engine_serves_only_in_every_respect() -> None:
    committed = make_committed(3)

    def serves(pod: dict[str, Any] | None = None, **state: Any) -> bool:
        return Engine(make_pod(**(pod or {})), make_guard(make_state(3, **state)), 0).serves(committed)

    assert serves()
    assert not serves(gate=Gate.CLOSED)
    assert not serves(alive=False)
    assert not serves(weights=make_weights(2))
    assert not serves(pod={"deleting": True})
    assert not Engine(make_pod(), gone(make_state(3)), 0).serves(committed)
