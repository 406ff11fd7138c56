"""Pods that vanished while they may run on: by a forced deletion, with their node, in a garbage collection."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rollfleet_operator.api.members import MAX_MEMBERS, Member
from rollfleet_operator.api.meta import ANNOTATION_FENCED
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.observed import NodeView
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.policies import KUBELET_S
from rollfleet_operator.core.vanished import to_follow
from rollfleet_protocol.commands import Arm, Close, Open
from rollfleet_protocol.state import Gate
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_state,
)
from tests.support.simulated_pods import NODE
from tests.support.simulated_updates import DEADLINES, bump, failed, make_world
from tests.support.simulated_world import World

FOR_EVER_S = 1e9
GRACE_S = 30
IN_UPDATE = (Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING)


def vanish(world: World, ordinal: int, *, partitioned: bool = True) -> str:
    """The pod's object goes. Partitioned: its engine serves on, where the operator can't reach it."""
    uid = world.uid_of(ordinal)
    world.vanish(uid)
    if partitioned:
        world.cut_off(uid, FOR_EVER_S)
    return uid


def unfenced(world: World) -> list[tuple[str, str]]:
    details = world.fleet.status.engines.details
    return [(each.name, each.message) for each in details if each.state == "Unfenced"]


def remembered(world: World) -> list[str]:
    return [member.uid for member in world.fleet.status.members if member.vanished_since is not None]


def replaced(world: World) -> bool:
    committed = world.fleet.status.committed
    return committed is not None and world.all_serve(committed.version)


def test_who_may_be_open_is_on_record_before_it_is_opened() -> None:
    world = World(make_fleet(replicas=2))
    while not world.all_serve(0):
        world.step()
        known = {member.uid for member in world.fleet.status.members}
        open_ones = {uid for uid, pod in world.pods.items() if pod.process and pod.process.state.gate is Gate.OPEN}
        assert open_ones <= known


def test_a_partitioned_engine_that_clients_still_reach_stops_every_transfer() -> None:
    world = make_world(replicas=3, version=1)
    uid = vanish(world, 1)
    ghost = world.ghosts[uid]
    assert world.run(30, lambda: replaced(world))
    bump(world, 2)
    assert world.run(200, lambda: world.ended(2))
    text = failed(world, 2, "CannotBeFenced")
    assert ghost.view.name in text
    assert f"kubectl taint nodes {NODE} node.kubernetes.io/out-of-service" in text
    assert ghost.process is not None
    assert ghost.process.state.gate is Gate.OPEN
    assert world.run(60, lambda: world.all_serve(1)), "untouched: version 1 goes on"


def test_the_fleets_status_names_it_its_node_and_the_cure() -> None:
    world = make_world(replicas=2)
    name = world.pods[world.uid_of(1)].view.name
    vanish(world, 1)
    assert world.run(30, lambda: replaced(world) and bool(unfenced(world)))
    assert world.run(10, lambda: world.fleet.status.serving_replicas == 2)
    ((told, text),) = unfenced(world)
    assert told == name
    assert "its pod is gone from the API server" in text
    assert f"kubectl taint nodes {NODE} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in text
    assert world.fleet.status.engines.counts == {"Serving": 2, "Unfenced": 1}
    assert world.fleet.status.replicas == 2


def test_its_successor_has_another_name() -> None:
    world = make_world(replicas=1)
    name = world.pods[world.uid_of(0)].view.name
    vanish(world, 0)
    assert world.run(30, lambda: replaced(world))
    assert world.pods[world.uid_of(0)].view.name != name


def test_an_operator_that_restarts_remembers_it() -> None:
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1)
    assert world.run(30, lambda: replaced(world))
    world.restart_operator(down_s=20)
    bump(world, 2)
    assert world.run(200, lambda: world.ended(2))
    failed(world, 2, "CannotBeFenced")
    assert remembered(world) == [uid]


def test_one_that_vanishes_while_the_operator_is_away_is_missed_when_it_is_back() -> None:
    world = make_world(replicas=2, version=1)
    world.restart_operator(down_s=20)
    uid = vanish(world, 1)
    assert world.run(60, lambda: replaced(world) and remembered(world) == [uid])


def test_one_whose_guard_answers_is_closed_and_armed_by_the_update_and_let_go() -> None:
    world = make_world(replicas=3, version=1)
    uid = vanish(world, 1, partitioned=False)
    assert world.run(30, lambda: replaced(world))
    assert remembered(world) == [uid]
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    process = world.ghosts[uid].process
    assert process is not None
    assert (process.state.gate, process.state.armed) == (Gate.CLOSED, True)
    assert world.run(15, lambda: remembered(world) == [])
    world.run(120)
    assert process.state.gate is Gate.CLOSED, "nobody opens it again"


def test_a_command_that_was_on_its_way_when_it_vanished_does_not_open_it_again() -> None:
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1, partitioned=False)
    assert world.run(30, lambda: replaced(world))
    process = world.ghosts[uid].process
    assert process is not None
    late = Open(
        incarnation=process.state.incarnation,
        epoch=world.fleet.status.epoch,
        version=1,
        digest=process.state.weights.digest,
    )
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and remembered(world) == [])
    assert process.command(late, world.time) is not None
    assert process.state.gate is Gate.CLOSED


def test_it_is_closed_and_armed_and_asked_for_nothing_else() -> None:
    world = make_world(replicas=3, version=1)
    uid = vanish(world, 1, partitioned=False)
    begun = len(world.decisions)
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    calls = [action for decision in world.decisions[begun:] for action in decision.actions]
    told = [type(a.command) for a in calls if isinstance(a, GuardCall) and a.pod_uid == uid]
    assert set(told) == {Close, Arm}


@pytest.mark.parametrize(("epoch", "armed", "is_let_go"), [(5, True, False), (6, True, True), (6, False, False)])
def test_only_under_a_later_epoch_nothing_that_was_on_its_way_opens_it(
    epoch: int, armed: bool, is_let_go: bool
) -> None:
    lost = Member(name="qwen-1-0-old", uid="gone", ordinal=1, ip="198.51.100.9", vanished_since=NOW, vanished_epoch=5)
    status = RolloutEngineStatus(epoch=6, committed=make_committed(0), members=(lost,))
    pod = make_pod(0)
    closed = make_guard(make_state(0, open=False, armed=armed, epoch=epoch))
    guards = {pod.uid: make_guard(make_state(0, epoch=6)), "gone": closed}
    write = plan(make_observed(make_fleet(status=status, replicas=1), pods=(pod,), guards=guards), NOW).fleet_status
    assert write is not None
    assert ("gone" not in [each.uid for each in write.status.members]) is is_let_go


def test_the_kubelet_stops_it_and_its_guard_says_so() -> None:
    """The common forced deletion, on a node that is well."""
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1, partitioned=False)
    world.step()
    process = world.ghosts[uid].process
    assert process is not None
    process.drain(world.time)
    assert world.run(15, lambda: remembered(world) == [])


def test_the_out_of_service_taint_is_a_word() -> None:
    world = make_world(replicas=2, version=1)
    vanish(world, 1)
    world.nodes[NODE] = NodeView(NODE)
    assert world.run(60, lambda: replaced(world) and bool(unfenced(world)))
    bump(world, 2)
    assert not world.run(20, lambda: world.ended(2))
    world.nodes[NODE] = NodeView(NODE, out_of_service=True)
    for ghost in world.ghosts.values():
        ghost.process = None  # the person tells the truth
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))
    assert remembered(world) == []


def test_the_kubelet_of_a_node_that_stays_ready_has_its_time() -> None:
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1)
    world.kill_ghost(uid)
    gone_at = world.time
    world.nodes[NODE] = NodeView(NODE, ready_since=NOW, heard=NOW + timedelta(seconds=gone_at + 100))
    assert world.run(20, lambda: remembered(world) == [uid])
    ((_, text),) = unfenced(world)
    assert f"node {NODE} is Ready: if its kubelet still reports, it has stopped it by 2026-11-29T12:0" in text
    assert world.run(KUBELET_S + GRACE_S + 30, lambda: remembered(world) == [])
    assert KUBELET_S + GRACE_S <= world.time - gone_at < KUBELET_S + GRACE_S + 15


def test_the_time_counts_from_when_the_node_came_back() -> None:
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1)
    world.run(KUBELET_S + GRACE_S + 60)
    assert remembered(world) == [uid], "a node that is not Ready fences nobody, however long it lasts"
    back = world.time
    then = NOW + timedelta(seconds=back)
    world.nodes[NODE] = NodeView(NODE, ready_since=then, heard=then)
    assert world.run(KUBELET_S + GRACE_S + 30, lambda: remembered(world) == [])
    assert world.time - back >= KUBELET_S + GRACE_S


def test_a_node_that_nobody_judges_is_not_believed_without_its_kubelets_word() -> None:
    """The controller that calls nodes not Ready is down: Ready says nothing, the kubelet's last report does."""
    world = make_world(replicas=2, version=1)
    world.nodes[NODE] = NodeView(NODE, ready_since=NOW, heard=world.now)
    world.run(1)
    uid = vanish(world, 1)
    world.run(KUBELET_S + GRACE_S + 60)
    assert remembered(world) == [uid]
    world.nodes[NODE] = NodeView(NODE, ready_since=NOW, heard=world.now)
    assert world.run(15, lambda: remembered(world) == [])


def test_a_node_that_is_gone_fences_nobody_but_a_persons_word_does() -> None:
    world = make_world(replicas=2, version=1)
    world.nodes[NODE] = NodeView(NODE, exists=False)
    uid = vanish(world, 1)
    world.run(KUBELET_S + GRACE_S + 60)
    ((_, text),) = unfenced(world)
    assert f"kubectl annotate roe qwen -n rl --overwrite {ANNOTATION_FENCED}={uid}" in text
    world.kill_ghost(uid)
    meta = world.fleet.metadata.model_copy(update={"annotations": {ANNOTATION_FENCED: f"other, {uid}"}})
    world.fleet = world.fleet.model_copy(update={"metadata": meta})
    assert world.run(15, lambda: remembered(world) == [])


def test_no_word_but_its_own_fences_an_engine_that_answers() -> None:
    world = make_world(replicas=2, version=1)
    later = NOW + timedelta(hours=1)
    world.nodes[NODE] = NodeView(NODE, ready_since=NOW, heard=later, out_of_service=True)
    uid = vanish(world, 1, partitioned=False)
    world.run(KUBELET_S + GRACE_S + 60)
    assert remembered(world) == [uid]
    ((_, text),) = unfenced(world)
    assert "its guard answers, gate Open" in text


def test_a_pod_that_is_back_was_never_gone() -> None:
    world = make_world(replicas=2, version=1)
    uid = vanish(world, 1)
    world.step()
    assert remembered(world) == [uid]
    world.ghosts[uid].cut_off_until = -1.0
    world.come_back(uid)
    world.step()
    assert remembered(world) == []
    bump(world, 2)
    assert world.run(60, lambda: world.ended(2) and world.all_serve(2))


def test_pods_that_ended_by_the_kubelets_word_leave_nothing_behind() -> None:
    world = make_world(replicas=3, version=1)
    for ordinal in (0, 1):
        world.delete_pod(world.uid_of(ordinal))
    assert world.run(30, lambda: replaced(world))
    world.run(5)
    assert remembered(world) == []
    assert {member.uid for member in world.fleet.status.members} == set(world.pods)


@pytest.mark.parametrize("phase", IN_UPDATE)
@pytest.mark.parametrize("partitioned", [True, False])
def test_one_that_vanishes_in_mid_update(phase: Phase, partitioned: bool) -> None:
    """Whenever it happens: the update ends, and nobody answers from two versions (checked at every step)."""
    world = make_world(replicas=3, version=1)
    bump(world, 2)
    assert world.run(30, lambda: world.in_phase(phase))
    vanish(world, 1, partitioned=partitioned)
    assert world.run(sum(DEADLINES.model_dump().values()) + 120, lambda: world.ended(2))
    version = world.fleet.status.committed
    assert version is not None
    assert world.run(120, lambda: world.all_serve(version.version))
    if phase in (Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING):
        assert version.version == 2, "it was armed: nobody opens it, so it holds nobody up"


def test_a_successor_at_its_address_does_not_speak_for_it() -> None:
    member = Member(name="qwen-0-0-old", uid="gone", ordinal=0, ip="198.51.100.1", node=NODE)
    status = RolloutEngineStatus(epoch=1, committed=make_committed(0), members=(member,))
    pod = make_pod(0)
    drained = make_guard(make_state(0, open=False, closed_reason="Draining"))
    given = make_observed(
        make_fleet(status=status, replicas=1), pods=(pod,), guards={pod.uid: make_guard(), "gone": drained}
    )
    write = plan(given, NOW).fleet_status
    assert write is not None
    assert [each.uid for each in write.status.members] == ["gone", "pod-0"]
    (told,) = write.status.engines.details
    assert "its address belongs to another engine now" in told.message


def test_nobody_is_asked_at_an_address_that_another_pod_has() -> None:
    lost, taken = (
        Member(name=f"qwen-{n}-0-old", uid=f"gone-{n}", ordinal=n, ip=f"198.51.100.{n}", node=NODE) for n in (9, 1)
    )
    pod = make_pod(0)
    assert pod.ip == taken.ip
    assert to_follow((pod,), (lost, taken)) == (pod, lost)


def member(**changes: object) -> Member:
    given = {"name": "qwen-0-0-abc0", "uid": "pod-0", "ordinal": 0, "ip": "198.51.100.1", "node": "node-1"}
    return Member(**(given | changes))  # type: ignore[arg-type]


def test_a_watch_that_lags_takes_nobodys_address_from_the_record() -> None:
    """Without it nobody could ask its guard or its node, should it vanish."""
    status = RolloutEngineStatus(epoch=2, committed=make_committed(), members=(member(),))
    as_it_was = make_pod(0, ip="", node="", phase="Pending", started=False, serving_label=False)
    decision = plan(make_observed(make_fleet(replicas=1, status=status), pods=(as_it_was,), guards={}), NOW)
    assert decision.fleet_status is not None
    (known,) = decision.fleet_status.status.members
    assert (known.ip, known.node) == ("198.51.100.1", "node-1")


def test_one_without_an_address_does_not_keep_the_status_from_telling_of_the_others() -> None:
    gone = member(uid="gone", name="qwen-0-0-gone", ip="", node="", vanished_since=NOW, vanished_epoch=2)
    status = RolloutEngineStatus(epoch=2, committed=make_committed(), members=(gone, member()))
    decision = plan(make_observed(make_fleet(replicas=1, status=status)), NOW)
    assert decision.fleet_status is not None
    assert decision.fleet_status.status.engines.counts == {"Serving": 1, "Unfenced": 1}


def test_where_the_record_is_full_nobody_else_is_opened() -> None:
    lost = tuple(
        Member(name=f"qwen-1-0-x{number}", uid=f"gone-{number}", ordinal=1, ip="198.51.100.9", node="node-2")
        for number in range(MAX_MEMBERS)
    )
    status = RolloutEngineStatus(epoch=1, committed=make_committed(0), members=lost)
    closed = make_guard(make_state(0, open=False, paused=False))
    given = make_observed(make_fleet(status=status, replicas=1), pods=(make_pod(0),), guards={"pod-0": closed})
    assert not [a for a in plan(given, NOW).actions if isinstance(a, GuardCall) and isinstance(a.command, Open)]
    some = make_fleet(status=status.model_copy(update={"members": lost[1:]}), replicas=1)
    opened = plan(replace(given, fleet=some), NOW)
    assert [a.pod_uid for a in opened.actions if isinstance(a, GuardCall) and isinstance(a.command, Open)] == ["pod-0"]


def test_a_fleet_at_rest_is_not_written_to_for_an_engine_that_cannot_be_fenced() -> None:
    world = make_world(replicas=2, version=1)
    vanish(world, 1)
    assert world.run(60, lambda: replaced(world) and bool(unfenced(world)))
    world.run(5)
    before = world.fleet_writes
    world.run(300)
    assert world.fleet_writes == before
