"""Engines whose control port lets everybody in: never opened, named, and replaced when there is another template."""

from typing import Any

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.core.actions import DeletePod, GuardCall
from rollfleet_operator.core.observed import GuardView, Observed, PodView
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.commands import Open
from tests.support.builders import NOW, make_committed, make_fleet, make_guard, make_observed, make_pod, make_state

WORDS = "guard of qwen-0-0-abcde answered HTTP 200 to a command without identity"


def unguarded(**changes: Any) -> GuardView:
    """What the follower makes of it, whatever it said before."""
    return GuardView(reachable=False, last_contact=None, error=WORDS, unguarded=True, **({"state": None} | changes))


def observed(*engines: tuple[PodView, GuardView], committed: bool = True) -> Observed:
    status = RolloutEngineStatus(epoch=1, committed=make_committed(0) if committed else None)
    fleet = make_fleet(status=status, replicas=len(engines))
    return make_observed(fleet, pods=tuple(pod for pod, _ in engines), guards={pod.uid: view for pod, view in engines})


def well(ordinal: int) -> tuple[PodView, GuardView]:
    return make_pod(ordinal), make_guard(make_state(0, incarnation=f"inc-{ordinal}"))


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("before", [None, make_state(0, open=False, incarnation="inc-0")])
def test_it_is_sent_nothing_and_its_words_are_told(before: Any, *, committed: bool) -> None:
    decision = plan(observed((make_pod(0), unguarded(state=before)), committed=committed), NOW)
    assert not [action for action in decision.actions if isinstance(action, GuardCall)]
    assert decision.fleet_status is not None
    (detail,) = decision.fleet_status.status.engines.details
    assert (detail.state, detail.message) == ("Broken", WORDS)


def test_the_others_are_not_held_up_while_nothing_changes() -> None:
    decision = plan(observed((make_pod(0), unguarded()), well(1)), NOW)
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.engines.counts == {"Broken": 1, "Serving": 1}
    assert not [a for a in decision.actions if isinstance(a, GuardCall) and isinstance(a.command, Open)]


def test_another_template_replaces_all_of_them_at_once() -> None:
    """Each may answer clients, and none for us: to wait for one another would only keep them longer."""
    old = [(make_pod(ordinal, template_hash="old"), unguarded()) for ordinal in range(3)]
    actions = plan(observed(*old), NOW).actions
    assert sorted(action.uid for action in actions if isinstance(action, DeletePod)) == ["pod-0", "pod-1", "pod-2"]
    same = [(make_pod(ordinal), unguarded()) for ordinal in range(3)]
    assert not [action for action in plan(observed(*same), NOW).actions if isinstance(action, DeletePod)]
