"""What to do next about one fleet: a pure function of what is seen and of the time.

Nothing is remembered between passes but what the two statuses carry, so an operator that is replaced at any moment
goes on where the one before it was. A pass either changes the fleet's record (epoch, committed, lastFinished) or
commands engines: the write is the fence between two operators, and what it allows is done by the pass that sees it
written.
"""

from dataclasses import replace
from datetime import datetime
from functools import partial

from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.accept import Verdict, in_charge, judge_fleet, judge_orphan, judge_weight_version
from rollfleet_operator.core.actions import (
    Action,
    Decision,
    EngineStatusWrite,
    Event,
    WeightVersionStatusWrite,
)
from rollfleet_operator.core.catch_up import CatchUp, Joiner, build_catch_up
from rollfleet_operator.core.changes import fleet_events, weight_version_events
from rollfleet_operator.core.commit import CommitPlan, plan_commit
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.ending import UpdatePlan
from rollfleet_operator.core.engine_states import Scene, describe
from rollfleet_operator.core.groups import with_peers
from rollfleet_operator.core.lost import weights_lost
from rollfleet_operator.core.objects.peer_pod import build_peer
from rollfleet_operator.core.objects.pod import build_pod, template_hash
from rollfleet_operator.core.observed import Observed
from rollfleet_operator.core.plan_children import plan_children
from rollfleet_operator.core.plan_engine import PodAction, Template, plan_gone, plan_labels, plan_pods
from rollfleet_operator.core.plan_weights import plan_weights
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.references import confirmed
from rollfleet_operator.core.restarts import is_spared
from rollfleet_operator.core.status import Findings, fleet_status
from rollfleet_operator.core.vanished import only_to_members, remember, with_vanished
from rollfleet_operator.core.weight_status import Subject, weight_status
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import World, build_world


def plan(observed: Observed, now: datetime) -> Decision:
    """The next decision."""
    fleet = observed.fleet
    if fleet.metadata.deletion_timestamp is not None:
        return Decision()  # the garbage collector takes the children by their owner references
    world, work = build_world(with_vanished(observed, now)), Work(now)
    before = Record.of(fleet)
    charge = in_charge(observed.weight_versions, before.committed)
    commit = plan_commit(world, before, observed.weight_versions, work)
    update = _plan_update(world, before, commit, charge, work)
    catch_up = _catch_up(world, before, update, charge, work)
    if catch_up is not None and catch_up.burn and not update.under_way:
        update = replace(update, record=replace(update.record, epoch=update.record.epoch + 1))
    if update.record != before:
        work.calls.clear()
        work.wake(now)
    made_from = template_hash(observed.fleet, observed.settings)
    record = remember(world, update.record, made_from, work)
    update = replace(update, record=replace(record, committed=confirmed(world, record.committed, work)))
    only_to_members(update.record, work)
    verdict = judge_fleet(fleet, observed.settings)
    of_fleet = (observed.fleet, observed.settings)
    template = Template(made_from, partial(build_pod, *of_fleet), partial(build_peer, *of_fleet))
    pods = _plan_pods(world, template, update, work, first=commit.first) if verdict.accepted else ()
    stuck = {} if catch_up is None else catch_up.stuck
    findings = Findings(
        world=world,
        record=update.record,
        verdict=verdict,
        commit=commit,
        update=update,
        weight_version=charge,
        notes=describe(_scene(world, update, stuck), work),
        lost=_lost(world, update, catch_up),
        ca_bundle=observed.ca_bundle,
        changing_pods=bool(pods),
        rejected=observed.rejected,
    )
    return _decide(observed, findings, pods, work)


def plan_orphan(weight_version: WeightVersion, now: datetime) -> Decision:
    """A WeightVersion whose RolloutEngine does not exist."""
    work = Work(now)
    subject = Subject(weight_version, judge_orphan(weight_version), None, None)
    status = weight_status(subject, None, work)
    if status == weight_version.status:
        return Decision()
    name = weight_version.metadata.name
    events = weight_version_events(name, weight_version.status, status)
    return Decision(weight_version_statuses=(WeightVersionStatusWrite(name, status),), events=events)


def _plan_update(
    world: World, before: Record, commit: CommitPlan, charge: WeightVersion | None, work: Work
) -> UpdatePlan:
    if commit.record != before:  # recorded first; the update goes on in the next pass
        status = None if charge is None else charge.status
        return UpdatePlan(commit.record, status, None)
    accepted = charge is not None and _judge(world, charge, charge, commit.record).accepted
    return plan_weights(world, commit.record, charge, work, first=commit.first, accepted=accepted)


def _judge(world: World, weight_version: WeightVersion, charge: WeightVersion | None, record: Record) -> Verdict:
    return judge_weight_version(weight_version, world.fleet, charge, record.committed)


def _catch_up(
    world: World, before: Record, update: UpdatePlan, charge: WeightVersion | None, work: Work
) -> CatchUp | None:
    """Lead late joiners on, unless they must wait."""
    committed, epoch = update.record.committed, update.catch_up_epoch
    if committed is None or epoch is None or epoch < 1 or update.record != before:
        return None
    catch_up = build_catch_up(world, committed, epoch, charge, work, update)
    catch_up.run(update_under_way=update.under_way)
    return catch_up


def _lost(world: World, update: UpdatePlan, catch_up: CatchUp | None) -> str:
    """Whether the committed version can't be restored; only while that is tried."""
    if catch_up is None or update.under_way or update.held:
        return ""
    available = find(world.fleet.status.conditions, "Available")
    told = available is not None and available.reason == Reason.WEIGHTS_LOST
    return weights_lost(world, update.record.committed, catch_up.stuck, told=told)


def _plan_pods(
    world: World, template: Template, update: UpdatePlan, work: Work, *, first: bool
) -> tuple[PodAction, ...]:
    """From Quiescing to Opening pods stay as they are; while a later attempt prepares, the spec of the fleet waits."""
    if update.closed:
        return ()
    if update.again:
        return with_peers(world, template, plan_gone(world, template, update.record.committed), work)
    return with_peers(world, template, plan_pods(world, template, update.record, first=first), work)


def _scene(world: World, update: UpdatePlan, stuck: dict[str, Joiner]) -> Scene:
    targets = () if update.status is None or not (update.closed or update.under_way) else update.status.targets
    return Scene(
        world=world,
        committed=update.record.committed,
        stuck=stuck,
        under_way=update.under_way,
        targets=frozenset(target.name for target in targets),
        spared=frozenset(engine.name for engine in world.engines if is_spared(world, update.record, engine)),
    )


def _decide(observed: Observed, findings: Findings, pods: tuple[PodAction, ...], work: Work) -> Decision:
    fleet, update = observed.fleet, findings.update
    status = fleet_status(findings, work)
    events = list(fleet_events(fleet.metadata.name, fleet.status, status))
    writes: list[WeightVersionStatusWrite] = []
    for weight_version in observed.weight_versions:
        write, told = _tell(findings, weight_version, work)
        writes += write
        events += told
    children = plan_children(observed) if findings.verdict.accepted else ()
    labels = plan_labels(findings.world, update.record.committed, update_runs=update.closed or update.under_way)
    actions: tuple[Action, ...] = (*children, *pods, *labels, *work.calls)
    return Decision(
        fleet_status=None if status == fleet.status else EngineStatusWrite(status),
        actions=actions,
        weight_version_statuses=tuple(writes),
        events=tuple(events),
        wake_at=work.next_wake(),
        notes=tuple(work.notes),
    )


def _tell(
    findings: Findings, weight_version: WeightVersion, work: Work
) -> tuple[list[WeightVersionStatusWrite], tuple[Event, ...]]:
    """The status of a WeightVersion, whether it is in charge or not."""
    charge = findings.weight_version
    leads = charge is not None and charge.metadata.uid == weight_version.metadata.uid
    verdict = _judge(findings.world, weight_version, charge, findings.record)
    subject = Subject(weight_version, verdict, findings.update if leads else None, findings.record.committed)
    status = weight_status(subject, findings.world, work)
    if weight_version.metadata.deletion_timestamp is not None or status == weight_version.status:
        return [], ()
    name = weight_version.metadata.name
    old = weight_version.status
    if (old.phase, old.version) != (status.phase, status.version):
        work.wake(work.now)
    return [WeightVersionStatusWrite(name, status)], weight_version_events(name, old, status)
