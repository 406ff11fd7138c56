"""One run to its report: check by check over all engines that are asked, then what they have in common."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version

from rollfleet_cli.asking import Way
from rollfleet_cli.bumping import Scene, look_at
from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS, FLEET_CHECKS, UPDATE_CHECKS
from rollfleet_cli.conformance.checks.check import Check, Fault, Held, Member
from rollfleet_cli.conformance.choosing import Chosen
from rollfleet_cli.conformance.reaching import Reached, Reacher, UnfitError, reacher
from rollfleet_cli.conformance.report import EngineRecord, Report, asked_for, facts_of, rows_of, spec_digest
from rollfleet_cli.conformance.running import CHECK_S, Result, Verdict, run_check
from rollfleet_cli.conformance.updating import Tell, longest_s, move, told_by, why_not
from rollfleet_cli.errors import CommandError, NotPossibleError
from rollfleet_cli.verifying import probe_of
from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.clients.errors import RollfleetError
from rollfleet_operator.ports import NODES, Manifest

LOOKS = 3  # at what all have in common, where updates are committed meanwhile
NOT_ASKED = "it closes the fleet for a moment and raises its version: --disruptive"
OUT_OF_TIME = "the time was over before it"
NODE_INFO = ("architecture", "kernelVersion", "osImage", "kubeletVersion", "containerRuntimeVersion")


@dataclass(frozen=True)
class Order:
    """What is to be done."""

    access: Access
    namespace: str
    name: str
    chosen: Chosen
    way: Way
    within_s: float
    disruptive: bool


@dataclass
class Run:
    """What was found so far."""

    order: Order
    cluster: Cluster
    scene: Scene
    tell: Tell
    engines: list[Reached] = field(default_factory=list)
    unreached: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = datetime.now(UTC)
        self._ends = time.monotonic() + self.order.within_s

    @property
    def left_s(self) -> float:
        """Until the whole is given up."""
        return self._ends - time.monotonic()

    def found(self, title: str, *verdicts: Verdict) -> None:
        """Note it, and say so."""
        self.verdicts += verdicts
        results = {verdict.result for verdict in verdicts}
        worst = next(each for each in (Result.FAILED, Result.PASSED, Result.SKIPPED) if each in results)
        why = next((verdict.skipped for verdict in verdicts if verdict.skipped), "") if worst is Result.SKIPPED else ""
        seconds = max(verdict.seconds for verdict in verdicts)
        self.tell(f"{worst.value:8}{verdicts[0].check}: {why or title} ({seconds:.1f} s)")


async def conduct(order: Order, cluster: Cluster, scene: Scene, tell: Tell) -> Report:
    """The whole; NotPossibleError where no engine can be asked."""
    run = Run(order, cluster, scene, tell)
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(reacher(order.access, scene.fleet, probe_of(scene.charge), order.way))
        await _reach(run, way, stack)
        for check in ENGINE_CHECKS:
            run.found(check.title, *await _on_all(run, check))
        await _in_common(run)
        await _update(run)
        return await _report(run)


async def _reach(run: Run, way: Reacher, stack: AsyncExitStack) -> None:
    for pod in run.order.chosen.pods:  # one by one: a stack takes what is opened in order, and they are few
        try:
            run.engines.append(await way.reach(stack, pod))
        except UnfitError as error:
            run.unreached[pod["metadata"]["name"]] = str(error)
    if not run.engines:
        told = "; ".join(f"{name}: {why}" for name, why in run.unreached.items())
        raise NotPossibleError(f"no engine can be asked: {told}")
    for name, why in run.unreached.items():
        run.tell(f"{name} could not be asked: {why}")


async def _on_all(run: Run, check: Check) -> Sequence[Verdict]:
    if run.left_s <= 0:
        return [
            Verdict(check.id, each.subject.pod, Result.SKIPPED, skipped=OUT_OF_TIME, late=True) for each in run.engines
        ]
    return await asyncio.gather(*(_on_one(run, check, each) for each in run.engines))


async def _on_one(run: Run, check: Check, engine: Reached) -> Verdict:
    try:
        await engine.renew()
    except RollfleetError as error:
        faults = (Fault("no token could be had for the next check", str(error)),)
        return Verdict(check.id, engine.subject.pod, Result.FAILED, faults)
    return await run_check(check, engine.transport, engine.subject, min(CHECK_S, max(1.0, run.left_s)))


async def _in_common(run: Run) -> None:
    """Of all engines at once, under one commit."""
    if run.left_s <= 0:
        for check in FLEET_CHECKS:
            run.found(check.title, Verdict(check.id, "", Result.SKIPPED, skipped=OUT_OF_TIME, late=True))
        return
    began = time.monotonic()
    members: tuple[Member, ...] = ()
    for _ in range(LOOKS):
        before = run.scene.committed
        members = tuple(await asyncio.gather(*(told_by(each) for each in run.engines)))
        run.scene = await asyncio.to_thread(look_at, run.cluster, run.order.namespace, run.order.name)
        if run.scene.committed == before:
            break
    held, allowed = _held(run.scene.committed), _allowed(run)
    for check in FLEET_CHECKS:
        faults = check.judge(members, held, allowed)
        result = Result.FAILED if faults else Result.PASSED
        run.found(check.title, Verdict(check.id, "", result, faults, seconds=time.monotonic() - began))


async def _update(run: Run) -> None:
    why = why_not(run.scene) if run.order.disruptive else NOT_ASKED
    late = not why and run.left_s <= 0
    if why or late or run.scene.charge is None:
        _skip_update(run, why or OUT_OF_TIME, late=late)
        return
    began = time.monotonic()
    within_s = min(longest_s(run.scene.charge), max(1.0, run.left_s))
    try:
        moved = await move(run.cluster, run.scene, run.engines, within_s, _allowed(run), run.tell)
    except CommandError as error:  # nothing was asked for, or nobody knows: the next look tells
        _skip_update(run, f"it could not be asked for: {error}", late=True)
        return
    run.scene = await asyncio.to_thread(look_at, run.cluster, run.order.namespace, run.order.name)
    run.notes.append(f"the fleet was moved from version {moved.before} to {moved.wanted}, of the same checkpoint")
    run.notes.append(f"{len(moved.load)} requests were sent meanwhile")
    for check in UPDATE_CHECKS:
        skipped = check.unless(moved)
        faults = () if skipped else check.judge(moved)
        result = Result.SKIPPED if skipped else Result.FAILED if faults else Result.PASSED
        seconds = time.monotonic() - began
        run.found(check.title, Verdict(check.id, "", result, faults, skipped, seconds=seconds))


def _skip_update(run: Run, why: str, *, late: bool) -> None:
    for check in UPDATE_CHECKS:
        run.found(check.title, Verdict(check.id, "", Result.SKIPPED, skipped=why, late=late))


def _held(committed: Committed | None) -> Held | None:
    return None if committed is None else Held(committed.version, committed.digest)


def _allowed(run: Run) -> Decimal:
    return run.engines[0].subject.allowed


async def _report(run: Run) -> Report:
    fleet, committed = run.scene.fleet, run.scene.committed
    records = [await asyncio.to_thread(_record, run.cluster, each) for each in run.engines]
    return Report(
        rollfleet=version("rollfleet"),
        started=run.started,
        ended=datetime.now(UTC),
        complete=not run.unreached and not any(verdict.late for verdict in run.verdicts),
        namespace=run.order.namespace,
        fleet=run.order.name,
        fleet_uid=fleet.metadata.uid,
        generation=fleet.metadata.generation,
        spec_sha256=spec_digest(fleet),
        committed=None if committed is None else committed.dump(),
        asked_for=asked_for(run.engines[0].subject.config),
        engines_present=run.order.chosen.present,
        engines_chosen=run.order.chosen.how,
        engines=tuple(records),
        checks=rows_of(run.verdicts),
        unreached=run.unreached,
        notes=tuple(run.notes),
    )


def _record(cluster: Cluster, engine: Reached) -> EngineRecord:
    pod, state = engine.pod, engine.subject.state
    node = str(pod["spec"].get("nodeName", ""))
    container = pod["spec"]["containers"][0]
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ours: Manifest = next((each for each in statuses if each["name"] == container["name"]), {})
    return EngineRecord(
        pod=pod["metadata"]["name"],
        node=node,
        image=str(container.get("image", "")),
        image_id=str(ours.get("imageID", "")),
        incarnation=state.incarnation,
        facts=facts_of(state.facts),
        node_info=_node_info(cluster, node),
    )


def _node_info(cluster: Cluster, name: str) -> dict[str, str]:
    """What the kubelet says of its machine; nothing where nodes may not be read."""
    try:
        node: Manifest = cluster.object(NODES, None, name)
    except CommandError:
        return {}
    told = (node.get("status") or {}).get("nodeInfo") or {}
    return {key: str(told[key]) for key in NODE_INFO if key in told}
