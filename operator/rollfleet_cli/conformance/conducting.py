"""One run to its report: check by check over the engines that are asked, then what they have in common."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from importlib.metadata import version

from rollfleet_cli.asking import AT_ONCE, Way
from rollfleet_cli.bumping import Scene, look_at
from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS, FLEET_CHECKS, UPDATE_CHECKS
from rollfleet_cli.conformance.checks.check import Check, Fault, Held, Member
from rollfleet_cli.conformance.choosing import Chosen
from rollfleet_cli.conformance.reaching import Reached, Reacher, UnfitError, reacher
from rollfleet_cli.conformance.report import EngineRecord, Report, asked_for, facts_of, rows_of, spec_digest
from rollfleet_cli.conformance.running import CHECK_S, Result, Verdict, judged, run_check
from rollfleet_cli.conformance.updating import Tell, longest_s, move, told_by, why_not
from rollfleet_cli.errors import CommandError, NotPossibleError
from rollfleet_cli.snapshot import engine_pods, led_by
from rollfleet_cli.verifying import probe_of
from rollfleet_operator.clients.errors import RollfleetError
from rollfleet_operator.ports import NODES, Manifest

NOT_ASKED = "it closes the fleet for a moment and raises its version: --disruptive"
OUT_OF_TIME = "the time was over before it"
MOVED_ON = "an update was committed while engines were asked"
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
    records: dict[str, tuple[EngineRecord, Reached]] = field(default_factory=dict)  # by pod
    members: list[Member] = field(default_factory=list)
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

    @property
    def allowed(self) -> Decimal:
        """Largest difference of two probes that counts as agreement."""
        return Decimal(probe_of(self.scene.charge).max_abs_logprob_diff)

    def found(self, title: str, *verdicts: Verdict) -> None:
        """Note it, and say so."""
        self.verdicts += verdicts
        results = {verdict.result for verdict in verdicts}
        worst = next(each for each in (Result.FAILED, Result.PASSED, Result.SKIPPED) if each in results)
        why = next((verdict.skipped for verdict in verdicts if verdict.skipped), "") if worst is Result.SKIPPED else ""
        seconds = max(verdict.seconds for verdict in verdicts)
        self.tell(f"{worst.value:8}{verdicts[0].check}: {why or title} ({seconds:.1f} s)")

    async def look(self) -> None:
        """The objects as they are now."""
        self.scene = await asyncio.to_thread(look_at, self.cluster, self.order.namespace, self.order.name)


async def conduct(order: Order, cluster: Cluster, scene: Scene, tell: Tell) -> Report:
    """The whole; NotPossibleError where no engine can be asked."""
    run, pods = Run(order, cluster, scene, tell), order.chosen.pods
    async with reacher(order.access, scene.fleet, probe_of(scene.charge), order.way) as way:
        committed = None
        for first in range(0, len(pods), AT_ONCE):  # of a large fleet so many tunnels at once, and no more
            if len(pods) > AT_ONCE:
                tell(f"engines {first + 1} to {min(first + AT_ONCE, len(pods))} of {len(pods)}")
            async with AsyncExitStack() as stack:
                engines = await _reach(run, way, stack, pods[first : first + AT_ONCE])
                for check in ENGINE_CHECKS if engines else ():
                    run.found(check.title, *await _on_all(run, check, engines))
                if first == 0:
                    await run.look()
                    committed = run.scene.committed
                run.members += await asyncio.gather(*(told_by(each) for each in engines))
        if not run.records:
            told = "; ".join(f"{name}: {why}" for name, why in run.unreached.items())
            raise NotPossibleError(f"no engine can be asked: {told}")
        await run.look()
        _in_common(run, "" if run.scene.committed == committed else MOVED_ON)
        await _update(run, way)
    return await _report(run)


async def _reach(run: Run, way: Reacher, stack: AsyncExitStack, pods: Sequence[Manifest]) -> list[Reached]:
    """Those of them that can be asked; the others are told."""

    async def one(pod: Manifest) -> Reached | None:
        own = AsyncExitStack()
        stack.push_async_callback(own.aclose)
        try:
            return await way.reach(own, pod)
        except UnfitError as error:
            run.unreached[pod["metadata"]["name"]] = str(error)
            run.tell(f"{pod['metadata']['name']} could not be asked: {error}")
            return None

    reached = [each for each in await asyncio.gather(*(one(pod) for pod in pods)) if each is not None]
    for each in reached:
        if each.subject.pod not in run.records:
            run.records[each.subject.pod] = await asyncio.to_thread(_record, run, each), each
    return reached


async def _on_all(run: Run, check: Check, engines: Sequence[Reached]) -> Sequence[Verdict]:
    if run.left_s <= 0:
        late = Verdict(check.id, "", Result.SKIPPED, skipped=OUT_OF_TIME, late=True)
        return [replace(late, engine=each.subject.pod) for each in engines]
    return await asyncio.gather(*(_on_one(run, check, each) for each in engines))


async def _on_one(run: Run, check: Check, engine: Reached) -> Verdict:
    try:
        await engine.renew()
    except RollfleetError as error:
        faults = (Fault("no token could be had for the next check", str(error)),)
        return Verdict(check.id, engine.subject.pod, Result.FAILED, faults)
    return await run_check(check, engine.transport, engine.subject, min(CHECK_S, max(1.0, run.left_s)))


def _in_common(run: Run, why_not_compared: str) -> None:
    """Of all engines together, under one commit."""
    committed = run.scene.committed
    held = None if committed is None else Held(committed.version, committed.digest)
    for check in FLEET_CHECKS:
        verdict = Verdict(check.id, "", Result.SKIPPED, skipped=why_not_compared, late=True)
        if not why_not_compared:
            faults = judged(partial(check.judge, tuple(run.members), held, run.allowed))
            result = Result.FAILED if faults else Result.PASSED
            verdict = Verdict(check.id, "", result, faults, of=len(run.members))
        run.found(check.title, verdict)


async def _update(run: Run, way: Reacher) -> None:
    why = why_not(run.scene) if run.order.disruptive else NOT_ASKED
    charge, late = run.scene.charge, not why and run.left_s <= 0
    if why or late or charge is None:
        _skip_update(run, why or OUT_OF_TIME, late=late)
        return
    began, within_s = time.monotonic(), min(longest_s(charge), max(1.0, run.left_s))
    async with AsyncExitStack() as stack:
        engines = await _reach(run, way, stack, run.order.chosen.pods[:AT_ONCE])
        try:
            moved = await move(run.cluster, run.scene, engines, within_s, run.allowed, run.tell)
        except CommandError as error:  # nothing was asked for, or nobody knows: the fleet's status tells
            _skip_update(run, f"it could not be asked for: {error}", late=True)
            return
    await run.look()
    run.notes.append(f"the fleet was moved from version {moved.before} to {moved.wanted}, of the same checkpoint")
    run.notes.append(f"{len(moved.load)} requests were sent meanwhile, to {len(engines)} engines")
    for check in UPDATE_CHECKS:
        skipped = check.unless(moved)
        faults = () if skipped else judged(partial(check.judge, moved))
        result = Result.SKIPPED if skipped else Result.FAILED if faults else Result.PASSED
        seconds = time.monotonic() - began
        run.found(check.title, Verdict(check.id, "", result, faults, skipped, seconds=seconds, of=len(engines)))


def _skip_update(run: Run, why: str, *, late: bool) -> None:
    for check in UPDATE_CHECKS:
        run.found(check.title, Verdict(check.id, "", Result.SKIPPED, skipped=why, late=late))


async def _report(run: Run) -> Report:
    fleet, committed = run.scene.fleet, run.scene.committed
    any_engine = next(iter(run.records.values()))[1]
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
        asked_for=asked_for(any_engine.subject.config),
        engines_present=run.order.chosen.present,
        engines_chosen=run.order.chosen.how,
        engines=tuple(record for record, _ in run.records.values()),
        checks=rows_of(run.verdicts),
        unreached=run.unreached,
        notes=tuple(run.notes),
    )


def _record(run: Run, engine: Reached) -> EngineRecord:
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
        node_info=_node_info(run.cluster, node),
        followers=_followers(run, engine),
    )


def _followers(run: Run, engine: Reached) -> dict[str, str]:
    """The engine's further pods with their nodes; nothing where there are none, or pods may not be listed any more."""
    if engine.subject.config.nodes is None:
        return {}
    try:
        found = led_by(engine_pods(run.cluster, run.scene.fleet), engine.subject.pod)
    except CommandError:
        return {}
    return {str(pod["metadata"]["name"]): str(pod["spec"].get("nodeName", "")) for pod in found}


def _node_info(cluster: Cluster, name: str) -> dict[str, str]:
    """What the kubelet says of its machine; nothing where nodes may not be read."""
    try:
        node: Manifest = cluster.object(NODES, None, name)
    except CommandError:
        return {}
    told = (node.get("status") or {}).get("nodeInfo") or {}
    return {key: str(told[key]) for key in NODE_INFO if key in told}
