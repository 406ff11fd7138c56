"""The fleet's pods: one live pod for each ordinal below spec.replicas, made from the template that is asked for.

From Quiescing to the end of Opening nothing is created, replaced or removed, and while a later attempt of an update
prepares only what is gone is made again: changes of the spec wait for the end. Otherwise:
- A pod that is over (evicted), being deleted, or gone with its node is replaced under another name: the name is a
  function of the fleet, the ordinal, the template and the uids of the pods that the ordinal still has, so that a
  repeated create is harmless.
- An outdated pod that certainly serves nobody is replaced at once; one that may serve only as long as no more than
  updateStrategy.maxUnavailable engines do not serve, itself among them.
- An outdated pod that lets everybody in (see GuardView.unguarded) is replaced at once: it may serve, but not for us.
- A pod that was stopped (see core.restarts) keeps its place until the template changes or somebody deletes it.
- An outdated pod whose guard obeys another operator (our ServiceAccount was made anew) tells us nothing and can't be
  cured: such pods go one by one, each while every pod that is not like it serves. Where the committed version is stored
  nowhere, they stay: they may be all that holds it, and their successors could not load it.
- Scaling down removes the highest ordinals first; they drain by themselves.
"""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.core.actions import CreatePod, DeletePod, LabelPod, StopPod
from rollfleet_operator.core.observed import ENDED_PHASES
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.restarts import plan_stops
from rollfleet_operator.core.steps import source_of
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import Gate

SUFFIX = 6  # characters

PodAction = CreatePod | DeletePod | StopPod
BuildPod = Callable[[int, str], dict[str, Any]]  # (ordinal, name) -> manifest
BuildPeer = Callable[[int, int, str, str], dict[str, Any]]  # (ordinal, node, name of the leader, name) -> manifest


@dataclass(frozen=True)
class Template:
    """What pods are made from."""

    hash: str
    build: BuildPod
    build_peer: BuildPeer


def pod_name(world: World, ordinal: int, template_hash: str, present: list[Engine]) -> str:
    """The name of the pod that shall take this ordinal's place, given those that it still has."""
    uids = sorted(engine.pod.uid for engine in present)
    text = "\0".join((world.fleet.metadata.uid, str(ordinal), template_hash, *uids))
    digest = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()
    return f"{world.fleet.metadata.name}-{ordinal}-0-{digest[:SUFFIX]}"


def plan_pods(world: World, template: Template, record: Record, *, first: bool) -> tuple[PodAction, ...]:
    """Creates, deletes and stops of this pass. `first`: the fleet has not verified its first version yet."""
    replicas, committed = world.fleet.spec.replicas, record.committed
    by_ordinal: dict[int, list[Engine]] = {}
    for engine in world.engines:
        by_ordinal.setdefault(engine.ordinal, []).append(engine)
    actions: list[PodAction] = [
        _delete(engine, f"scaled down to {replicas}")
        for ordinal in sorted(by_ordinal, reverse=True)
        for engine in by_ordinal[ordinal]
        if ordinal >= replicas and not (engine.pod.deleting or engine.pod.vanished)
    ]
    for ordinal in range(replicas):
        actions += _plan_ordinal(world, ordinal, by_ordinal.get(ordinal, []), template, committed)
    actions += _replace(world, by_ordinal, template, committed, first=first)
    going = {action.uid for action in actions if isinstance(action, DeletePod)}
    return (*actions, *(stop for stop in plan_stops(world, record) if stop.uid not in going))


def plan_gone(world: World, template: Template, committed: Committed | None) -> tuple[PodAction, ...]:
    """Only what a later attempt may wait for: a pod in the place of each that is over or gone."""
    actions: list[PodAction] = []
    for ordinal in range(world.fleet.spec.replicas):
        engines = [engine for engine in world.engines if engine.ordinal == ordinal]
        if not _live(engines):
            actions += _plan_ordinal(world, ordinal, engines, template, committed)
    return tuple(actions)


def _delete(engine: Engine, why: str) -> DeletePod:
    return DeletePod(engine.name, engine.pod.uid, why)


def _live(engines: list[Engine]) -> list[Engine]:
    return [
        engine
        for engine in engines
        if not (engine.pod.deleting or engine.pod.vanished) and engine.pod.phase not in ENDED_PHASES
    ]


def _keeps_place(engine: Engine, template: Template) -> bool:
    """Stopped, and another pod of the same template would end alike."""
    return bool(engine.pod.stopped) and engine.pod.template_hash == template.hash and not engine.pod.deleting


def _plan_ordinal(
    world: World, ordinal: int, engines: list[Engine], template: Template, committed: Committed | None
) -> list[PodAction]:
    actions: list[PodAction] = [
        _delete(engine, f"the pod is {engine.pod.phase}: {engine.pod.message}".rstrip(": "))
        for engine in engines
        if engine.pod.phase in ENDED_PHASES and not engine.pod.deleting and not _keeps_place(engine, template)
    ]
    live = _live(engines)
    kept = max(live, key=lambda engine: _worth(engine, template, committed), default=None)
    actions += [
        _delete(engine, f"{kept.name} has its place") for engine in live if kept is not None and engine is not kept
    ]
    if kept is None and any(_keeps_place(engine, template) for engine in engines):
        return actions
    if kept is None:
        name = pod_name(world, ordinal, template.hash, engines)
        actions.append(CreatePod(template.build(ordinal, name)))
    elif kept.pod.template_hash != template.hash and kept.unguarded:
        actions.append(_delete(kept, "the template changed and it lets everybody in"))
    elif kept.pod.template_hash != template.hash and _certainly_serves_nobody(kept):
        actions.append(_delete(kept, "the template changed and it serves nobody"))
    return actions


def _worth(engine: Engine, template: Template, committed: Committed | None) -> tuple[bool, bool, float, str]:
    age = -engine.pod.created.timestamp()
    return engine.serves(committed), engine.pod.template_hash == template.hash, age, engine.name


def _certainly_serves_nobody(engine: Engine) -> bool:
    """Not a word from the guard is no certainty: an operator that has just started has heard of nobody."""
    state = engine.answering
    if state is not None:
        return state.gate is Gate.CLOSED and state.in_flight == 0
    return engine.stopped


def _replace(
    world: World, by_ordinal: dict[int, list[Engine]], template: Template, committed: Committed | None, *, first: bool
) -> tuple[PodAction, ...]:
    live = {ordinal: _live(by_ordinal.get(ordinal, [])) for ordinal in range(world.fleet.spec.replicas)}
    if any(len(engines) > 1 for engines in live.values()):
        return ()
    engines = [each[0] for each in live.values() if each]
    outdated = [engine for engine in engines if engine.pod.template_hash != template.hash]
    disowned = [engine for engine in outdated if engine.disowned]
    if disowned and len(engines) == len(live):
        return _replace_disowned(engines, disowned, committed, first=first)
    serving = {engine.name for engine in engines if engine.serves(committed)}
    out = world.fleet.spec.replicas - len(serving)
    chosen: list[DeletePod] = []
    for engine in reversed(outdated):
        out += engine.name in serving
        if out > world.fleet.spec.update_strategy.max_unavailable:
            break
        if not (engine.unguarded or _certainly_serves_nobody(engine)):  # else it is replaced already
            chosen.append(_delete(engine, "the template changed"))
    return tuple(chosen)


def _replace_disowned(
    engines: list[Engine], disowned: list[Engine], committed: Committed | None, *, first: bool
) -> tuple[PodAction, ...]:
    if committed is None and not first:
        return ()  # what they hold open may be the only trace of the lost record
    if committed is not None and source_of(committed) is None:
        return ()
    if any(not engine.serves(committed) for engine in engines if engine not in disowned):
        return ()
    return (_delete(disowned[-1], "its guard obeys another operator"),)


def plan_labels(world: World, committed: Committed | None, *, update_runs: bool) -> tuple[LabelPod, ...]:
    """The serving label follows membership, never an ordinary update. No promise rests on it."""
    wanted = [(engine, _wanted_label(engine, committed, update_runs=update_runs)) for engine in world.engines]
    return tuple(
        LabelPod(engine.name, engine.pod.uid, serving)
        for engine, serving in wanted
        if serving is not None and serving is not engine.pod.serving_label and not (engine.pod.vanished or engine.ended)
    )


def _wanted_label(engine: Engine, committed: Committed | None, *, update_runs: bool) -> bool | None:
    """None: leave it as it is."""
    state = engine.answering
    if engine.serves(committed):
        return True
    if engine.pod.deleting or engine.quarantined or (engine.stopped and not engine.open):
        return False
    if state is None:
        return None
    if not state.alive or state.closed_reason == ClosedReason.STARTING.value:
        return False
    if update_runs:
        return None
    return None if state.gate is Gate.CLOSED and holds(state, committed) else False
