"""Engines of several pods: one leads, the others are led by exactly that pod, and are with it whatever becomes of it.

- Every leading pod of the newest template has one pod for each further node: made together with it, and made again
  where it is over or gone. Of an older template nobody could make one; such an engine is replaced as a whole.
- A pod whose leader is gone is deleted. While the leader is being deleted it stays: the leader drains, with workers.
  Past the leader's grace period it goes all the same: on a node that is dead a pod is being deleted for ever, and what
  the others hold on good nodes is what the engine in its place waits for.
- Where the leader is stopped for good, so are the others.

Places: the scheduler sees pods, not engines. Of several engines that each hold a place and wait for another none would
ever start. So of those that wait only the one of the lowest ordinal keeps what it has; the others give their places
back, and are not made again until it is complete. Between fleets nobody judges: the status says who holds what.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from datetime import timedelta

from rollfleet_operator.api.meta import ordinal_of
from rollfleet_operator.core.actions import CreatePod, DeletePod, StopPod
from rollfleet_operator.core.observed import ENDED_PHASES, PodView
from rollfleet_operator.core.plan_engine import SUFFIX, PodAction, Template
from rollfleet_operator.core.policies import PLACES_S
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import Engine, World


def with_peers(world: World, template: Template, actions: tuple[PodAction, ...], work: Work) -> tuple[PodAction, ...]:
    """The actions on leading pods, less those that must wait for places, and with what follows for the other pods."""
    if world.fleet.spec.parallelism.nodes == 1 and not world.strays and not any(each.peers for each in world.engines):
        return actions
    first = first_in_line(world)
    kept = tuple(action for action in actions if not _must_wait(action, first))
    going = {action.uid for action in kept if isinstance(action, DeletePod)}
    return (
        *kept,
        *_led_by_new(world, template, kept),
        *_given_back(world, first, going, work),
        *_strays(world),
        *(
            each
            for engine in world.engines
            if engine.pod.uid not in going
            for each in _of(world, engine, template, kept, work)
        ),
    )


def waits_for_a_place(engine: Engine) -> bool:
    """Whether the scheduler has none for one of its pods. One that answers has all that it needs."""
    pod = engine.pod
    if engine.answering is not None or pod.deleting or pod.vanished or pod.stopped or engine.ended:
        return False
    return any(each.unschedulable for each in (pod, *engine.peers) if not each.deleting)


def placed(engine: Engine) -> tuple[PodView, ...]:
    """Its pods that have a node."""
    return tuple(pod for pod in (engine.pod, *engine.peers) if pod.node)


def first_in_line(world: World) -> int | None:
    """The lowest ordinal that waits for a place; None where nobody does, or engines have one pod."""
    if world.fleet.spec.parallelism.nodes == 1:
        return None
    return min((engine.ordinal for engine in world.engines if waits_for_a_place(engine)), default=None)


def _must_wait(action: PodAction, first: int | None) -> bool:
    if first is None or not isinstance(action, CreatePod):
        return False
    return ordinal_of(action.manifest["metadata"]["labels"]) > first


def _given_back(world: World, first: int | None, going: set[str], work: Work) -> Iterator[DeletePod]:
    for engine in world.engines:
        if first is None or engine.ordinal <= first or engine.pod.uid in going:
            continue
        if not (waits_for_a_place(engine) and placed(engine)):
            continue
        due = engine.pod.created + timedelta(seconds=PLACES_S)
        if work.now < due:
            work.wake(due)
            continue
        why = f"it holds a place and lacks another: engine {first} of the fleet comes first"
        yield DeletePod(engine.name, engine.pod.uid, why)


def _led_by_new(world: World, template: Template, actions: Iterable[PodAction]) -> Iterator[CreatePod]:
    """Together with their leader: whoever schedules sees all of them."""
    for action in actions:
        if isinstance(action, CreatePod):
            metadata = action.manifest["metadata"]
            ordinal = ordinal_of(metadata["labels"])
            for node in range(1, world.fleet.spec.parallelism.nodes):
                yield _create(world, template, ordinal, node, metadata["name"], [])


def _create(
    world: World, template: Template, ordinal: int, node: int, leader: str, present: list[PodView]
) -> CreatePod:
    uids = sorted(pod.uid for pod in present)
    text = "\0".join((world.fleet.metadata.uid, leader, str(node), template.hash, *uids))
    digest = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()
    name = f"{world.fleet.metadata.name}-{ordinal}-{node}-{digest[:SUFFIX]}"
    return CreatePod(template.build_peer(ordinal, node, leader, name))


def _strays(world: World) -> Iterator[DeletePod]:
    for pod in world.strays:
        if not pod.deleting:
            yield DeletePod(pod.name, pod.uid, f"the pod that led it, {pod.leader}, is gone")


def _of(
    world: World, engine: Engine, template: Template, actions: Iterable[PodAction], work: Work
) -> Iterator[PodAction]:
    """What is to be done about the pods that one engine's leading pod leads."""
    pod = engine.pod
    stop = next((action for action in actions if isinstance(action, StopPod) and action.uid == pod.uid), None)
    why = pod.stopped or ("" if stop is None else stop.why)
    if pod.deleting or pod.vanished:
        yield from _let_go(engine, work)
        return
    if why:
        for peer in engine.peers:
            if not (peer.stopped or peer.deleting or peer.phase in ENDED_PHASES):
                yield StopPod(peer.name, peer.uid, f"{pod.name}, which leads it, is stopped: {why}")
        return
    if engine.ended or pod.template_hash != template.hash:
        return
    for node in range(1, world.fleet.spec.parallelism.nodes):
        yield from _of_node(world, engine, template, node)


def _let_go(engine: Engine, work: Work) -> Iterator[DeletePod]:
    """The pods of a leader that should be gone by now."""
    due = engine.pod.deleted_by
    if due is None or not engine.peers:
        return
    if work.now < due and not engine.node_off:
        work.wake(due)
        return
    for peer in engine.peers:
        if not peer.deleting:
            yield DeletePod(peer.name, peer.uid, f"{engine.name}, which leads it, should be gone since {due:%H:%M:%SZ}")


def _of_node(world: World, engine: Engine, template: Template, node: int) -> Iterator[PodAction]:
    present = [peer for peer in engine.peers if peer.node_index == node]
    live = [peer for peer in present if not peer.deleting and peer.phase not in ENDED_PHASES]
    for peer in present:
        if peer.phase in ENDED_PHASES and not peer.deleting:
            yield DeletePod(peer.name, peer.uid, f"the pod is {peer.phase}: {peer.message}".rstrip(": "))
    for peer in live[1:]:
        yield DeletePod(peer.name, peer.uid, f"{live[0].name} has its place")
    if not live:
        yield _create(world, template, engine.ordinal, node, engine.name, present)
