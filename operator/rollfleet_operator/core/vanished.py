"""Pods that vanished while they may run on: by a forced deletion, with their Node object, or in a garbage collection.

The API server's silence stops no container. Whoever may be open is therefore recorded in the fleet's status before it
is opened, and a recorded pod that is gone without anybody's word that its containers ended stays an engine of the
fleet: not to be used, but to be fenced. Its guard is followed at its address and closed and armed like all others.

It is let go when
- its guard drained, or is closed for good: armed or unable to reopen by itself, under an epoch that began after the
  pod had vanished. Since then nobody sends it anything that opens, and a process that follows it is born closed;
- its node carries the out-of-service taint, a person's word that the node is switched off;
- its node has been Ready for so long that the kubelet, which stops pods that the API server does not know, has had
  its time (policies.KUBELET_S and the pod's grace period), and has reported meanwhile;
- a person says by annotation of the fleet that it does not run: the only word left where the Node object is gone;
- the pod is back (a watch was wrong).
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from rollfleet_operator.api.members import MAX_MEMBERS, Member
from rollfleet_operator.api.meta import ANNOTATION_FENCED
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.observed import Observed, PodView
from rollfleet_operator.core.policies import KUBELET_S, LOOK_AGAIN_S
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.restarts import has_succeeded
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import Engine, World, drained, refuses_for_good
from rollfleet_protocol.commands import Open

TAINT = "node.kubernetes.io/out-of-service"


def to_follow(observed_pods: tuple[PodView, ...], members: tuple[Member, ...]) -> tuple[PodView | Member, ...]:
    """Whose guards are asked. Where another pod has the address of one that vanished, nobody speaks for that one."""
    taken = {pod.ip for pod in observed_pods}
    leading = (pod for pod in observed_pods if pod.leads)
    return (*leading, *(member for member in members if member.ip not in taken))


def with_vanished(observed: Observed, now: datetime) -> Observed:
    """The snapshot with the pods that only the status remembers."""
    fleet = observed.fleet
    members = vanished(fleet, (pod.uid for pod in observed.pods), observed.terminated)
    gone = tuple(_view(member, fleet, now) for member in members)
    return replace(observed, pods=(*observed.pods, *gone)) if gone else observed


def vanished(fleet: RolloutEngine, present: Iterable[str], terminated: frozenset[str]) -> tuple[Member, ...]:
    """Members that the API server does not have any more, and of whose containers nobody said that they ended."""
    gone = {*present, *terminated}
    return tuple(member for member in fleet.status.members if member.uid not in gone)


def _view(member: Member, fleet: RolloutEngine, now: datetime) -> PodView:
    return PodView(
        name=member.name,
        uid=member.uid,
        ordinal=member.ordinal,
        created=fleet.metadata.creation_timestamp or now,
        template_hash="",
        serving_label=False,
        phase="Unknown",
        ip=member.ip,
        node=member.node,
        grace_s=member.grace_seconds,
        vanished_since=member.vanished_since or now,
        vanished_epoch=member.vanished_epoch if member.vanished_since else fleet.status.epoch,
    )


def suspect_nodes(observed: Observed) -> set[str]:
    """Nodes whose word may fence an engine that does not answer."""
    members = vanished(observed.fleet, (pod.uid for pod in observed.pods), observed.terminated)
    silent = {uid for uid, view in observed.guards.items() if not view.reachable}
    nodes = {pod.node for pod in observed.pods if not pod.halted and pod.uid in silent}
    return (nodes | {member.node for member in members}) - {""}


def remember(world: World, record: Record, template: str, work: Work) -> Record:
    """The record with its members as they are now, and the template if an engine of it has served."""
    present = {engine.pod.uid: engine for engine in world.engines}
    good = {engine.pod.uid for engine in world.engines if has_succeeded(engine, record.committed, work.now)}
    kept: list[Member] = []
    for member in record.members:
        engine = present.get(member.uid)
        if engine is None:
            continue  # its containers ended by the kubelet's word
        if engine.pod.vanished and is_over(engine, world, work.now):
            work.note(f"{engine.name} vanished and is over")
            continue
        kept.append(_member(engine, engine.pod.restarts if member.uid in good else member.restarts, member))
    known = {member.uid for member in kept}
    new = [engine for engine in world.engines if _may_be_opened(engine) and engine.pod.uid not in known]
    kept += [_member(engine, engine.pod.restarts if engine.pod.uid in good else 0) for engine in new]
    if any(engine.pod.vanished or _is_stuck(engine) for engine in world.engines):
        work.wake(work.now + timedelta(seconds=LOOK_AGAIN_S))
    proven = any(engine.pod.template_hash == template for engine in world.engines if engine.pod.uid in good)
    return replace(
        record,
        members=tuple(kept[:MAX_MEMBERS]),
        proven_template=template if proven else record.proven_template,
    )


def _may_be_opened(engine: Engine) -> bool:
    return engine.settled and not engine.ended and bool(engine.pod.ip)


def _member(engine: Engine, restarts: int, before: Member | None = None) -> Member:
    """Where it runs is never forgotten: a watch that lags may show the pod as it was before it had a place."""
    pod = engine.pod
    return Member(
        name=pod.name,
        uid=pod.uid,
        ordinal=engine.ordinal,
        ip=pod.ip or (before.ip if before else ""),
        node=pod.node or (before.node if before else ""),
        grace_seconds=pod.grace_s,
        restarts=restarts,
        vanished_since=pod.vanished_since,
        vanished_epoch=pod.vanished_epoch,
    )


def _is_stuck(engine: Engine) -> bool:
    return engine.answering is None and not engine.stopped


def only_to_members(record: Record, work: Work) -> None:
    """Nobody is opened who is not recorded: a list that is full opens nobody else."""
    known = {member.uid for member in record.members}
    work.calls[:] = [call for call in work.calls if not isinstance(call.command, Open) or call.pod_uid in known]


def is_over(engine: Engine, world: World, now: datetime) -> bool:
    """Whether a vanished pod certainly answers nobody any more, and never will."""
    state, pod = engine.state, engine.pod
    if state is not None and drained(state):
        return True
    answering = engine.answering
    if answering is not None:
        return answering.epoch > pod.vanished_epoch and answering.in_flight == 0 and refuses_for_good(answering)
    if pod.uid in said_to_be_over(world.fleet):
        return True
    return engine.node_off or _has_had_its_time(engine, now)


def _has_had_its_time(engine: Engine, now: datetime) -> bool:
    """Whether the kubelet stopped it. Its report since then says that it is there, even where nobody judges nodes."""
    due, since, heard = (
        kubelet_due(engine),
        engine.pod.vanished_since,
        None if engine.node is None else engine.node.heard,
    )
    return due is not None and now >= due and since is not None and heard is not None and heard >= since


def said_to_be_over(fleet: RolloutEngine) -> set[str]:
    """Uids that a person named in the annotation."""
    return {uid.strip() for uid in fleet.metadata.annotations.get(ANNOTATION_FENCED, "").split(",")}


def kubelet_due(engine: Engine) -> datetime | None:
    """When the kubelet of a Ready node has had its time; None where nobody knows that a kubelet is at work."""
    since, node = engine.pod.vanished_since, engine.node
    if since is None or node is None or node.ready_since is None:
        return None
    return max(since, node.ready_since) + timedelta(seconds=KUBELET_S + engine.pod.grace_s)


def is_unfenced(engine: Engine, now: datetime) -> bool:
    """Whether a pod that is being deleted and does not answer should be gone by now."""
    due = engine.pod.deleted_by
    return not engine.stopped and due is not None and now >= due


def unfenced_text(engine: Engine, fleet: RolloutEngine) -> str:
    """Why an engine that is not under control any more counts as one that may answer, and what a person can do."""
    pod = engine.pod
    what = "its pod is gone from the API server" if pod.vanished else "its pod is being deleted"
    error = engine.guard.error if engine.guard is not None and not engine.guard.reachable else ""
    told = f", its guard does not answer ({error})" if error else ""
    answers = f", its guard answers, gate {state.gate.value}" if (state := engine.answering) is not None else told
    text = f"{what}, nobody said that its containers ended{answers}: it may still answer clients at {pod.ip}"
    return f"{text}; {_cure(engine, fleet)}"


def _cure(engine: Engine, fleet: RolloutEngine) -> str:
    pod, node, due = engine.pod, engine.node, kubelet_due(engine)
    if due is not None:
        return f"node {pod.node} is Ready: if its kubelet still reports, it has stopped it by {due:%Y-%m-%dT%H:%M:%SZ}"
    taint = f"kubectl taint nodes {pod.node} {TAINT}=nodeshutdown:NoExecute"
    if node is not None and not node.exists:
        word = f"kubectl annotate roe {fleet.metadata.name} -n {fleet.metadata.namespace} --overwrite"
        return f"node {pod.node} does not exist: if its machine is switched off, {word} {ANNOTATION_FENCED}={pod.uid}"
    if node is not None and node.ready_since is not None:
        return f"node {pod.node} is Ready: its kubelet stops it"
    return f"if node {pod.node} is switched off: {taint}"
