"""What the fleet has committed, where no update says so: the first verification of a new fleet, and a lost record.

A new fleet verifies version 0, its model.path as loaded at start, under epoch 1, which is kept for that. It commits
as soon as every engine that is up has answered the probe, or had its time for it, and a majority agrees; one that does
not is named in the commit and never opens on it. Engines that come up later are late joiners.
One that is up and does not answer is waited for: where the status, the WeightVersion and its guard's word are lost
together, it may be open at a version that nobody remembers.
Waiting for all replicas would let one engine that finds no node keep the whole fleet from serving.

A lost record: whatever the open guards hold is committed, if they agree and every engine that may be open was asked.
Two versions are open where a fleet rolled: the higher one is the commit, since nobody opens before it is recorded.
Nobody open, but somebody has seen an epoch above 1 (or a WeightVersion remembers an update of this very fleet):
nobody can tell what was committed. The fleet stays closed and says that a higher WeightVersion decides. No command is
given meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from rollfleet_operator.api.rolloutengine import Committed, Outcome, Previous
from rollfleet_operator.api.weightversion import Deadlines, WeightVersion
from rollfleet_operator.core.probes import MAX_EXCLUDED, Disagreement, agree
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.references import to_record
from rollfleet_operator.core.rolling import behind
from rollfleet_operator.core.steps import verify_initial
from rollfleet_operator.core.work import Work, failed_operation
from rollfleet_operator.core.world import FIRST_EPOCH, Engine, Fence, World
from rollfleet_protocol.state import EngineState, Gate, OperationName, ProbeResult, Weights, WeightsState

CHECKPOINT = "checkpoint:"
MOST_OPEN = 2  # versions, while a fleet rolls from one to the next
Identity = tuple[int, str | None]  # version and digest


@dataclass(frozen=True)
class CommitPlan:
    """The record, and what is to be said about it. `first`: a new fleet that has not verified anything yet."""

    record: Record
    first: bool = False
    reason: Reason | None = None  # ProbesDisagree or CommitUnknown
    message: str = ""


def plan_commit(world: World, record: Record, weight_versions: tuple[WeightVersion, ...], work: Work) -> CommitPlan:
    """Find out what is committed, where the record does not say."""
    if record.committed is not None:
        return CommitPlan(_follow(world, record))
    if _is_new(world, record, weight_versions):
        return _first(world, record, work)
    return _recover(world, record, weight_versions, work)


def _follow(world: World, record: Record) -> Record:
    """Guards that are ahead of the record would refuse everything: allot an epoch above theirs.

    The version before goes from the record of a fleet that rolls as soon as nobody may answer from it.
    """
    committed = record.committed
    if committed is not None and committed.previous is not None and not behind(world, committed, record.epoch):
        record = replace(record, committed=committed.model_copy(update={"previous": None}))
    if world.guards_epoch <= record.epoch:
        return record
    return replace(record, epoch=world.guards_epoch + 1)


def _is_new(world: World, record: Record, weight_versions: tuple[WeightVersion, ...]) -> bool:
    if max(record.epoch, world.guards_epoch) > FIRST_EPOCH:
        return False
    return not any(_remembers(weight_version, world) for weight_version in weight_versions)


def _remembers(weight_version: WeightVersion, world: World) -> bool:
    """Whether an update succeeded on this fleet, not on one of the same name that was deleted before."""
    ends = [entry for entry in weight_version.status.history if entry.outcome is Outcome.ACTIVE]
    return any(world.is_of_this_fleet(entry.engine_uid, entry.time) for entry in ends)


def _first(world: World, record: Record, work: Work) -> CommitPlan:
    if record.epoch < FIRST_EPOCH:
        # Nothing to verify yet: the epoch waits too, so that an empty fleet is not written to.
        return CommitPlan(replace(record, epoch=FIRST_EPOCH) if world.usable else record, first=True)
    verified: list[tuple[Engine, ProbeResult | None]] = []
    pending = False
    for engine, state in world.usable:
        if state.weights.state is WeightsState.VERIFIED and state.weights.version == 0:
            verified.append((engine, state.probe))
        elif state.weights.state is WeightsState.INITIAL:
            verify_initial(world, record.epoch, engine, state, world.settings.probe_tokens, work)
            pending = pending or _is_waited_for(world, record, engine, state, work)
    if pending or not verified:
        return CommitPlan(record, first=True)
    silent = _silent(world, record)
    if silent and _may_yet_be_met(world, record, work):
        return CommitPlan(record, first=True)
    if silent:
        unclear = f"{silent} may be open and does not answer: nobody can tell that this fleet is new"
        text = f"{unclear} before it does, or was deleted and its container has ended"
        return CommitPlan(record, first=True, reason=Reason.COMMIT_UNKNOWN, message=text)
    answers = [(engine.name, probe) for engine, probe in verified]
    odd = agree(answers, Decimal(str(world.settings.probe_tolerance)), MAX_EXCLUDED)
    if isinstance(odd, Disagreement):
        return CommitPlan(record, first=True, reason=Reason.PROBES_DISAGREE, message=odd.text)
    work.note(f"version 0 is committed: {len(verified) - len(odd)} engines verified")
    excluded = tuple(state.incarnation for engine, state in world.usable if engine.name in odd)
    probe = to_record(verified, odd)
    committed = Committed(version=0, time=work.now, excluded=excluded, probe=probe)
    return CommitPlan(replace(record, committed=committed), first=False)


def _is_waited_for(world: World, record: Record, engine: Engine, state: EngineState, work: Work) -> bool:
    """Whether it may still answer the probe in its time: one that never does must not keep the others from serving."""
    if failed_operation(state, OperationName.VERIFY, record.epoch, 0) is not None:
        return False
    due = engine.pod.created + timedelta(seconds=world.fleet.spec.startup.timeout_seconds + Deadlines().verify_seconds)
    if work.now >= due:
        return False
    work.wake(due)
    return True


def _recover(world: World, record: Record, weight_versions: tuple[WeightVersion, ...], work: Work) -> CommitPlan:
    silent = _silent(world, record)
    if silent:
        lost = f"the record of the committed version is lost, and {silent} may be open and does not answer"
        text = f"{lost}: it is waited for until it does, or was deleted and its container has ended"
        return CommitPlan(record, reason=Reason.COMMIT_UNKNOWN, message=text)
    open_ones = {_identity(state.weights): (engine, state.weights) for engine, state in _open(world)}
    versions = {version for version, _ in open_ones}
    if 1 <= len(open_ones) <= MOST_OPEN and len(versions) == len(open_ones):
        committed = _found({each: weights for each, (_, weights) in open_ones.items()}, weight_versions, work.now)
        told = " and ".join(f"version {version}" for version in sorted(versions))
        work.note(f"the lost record is found again: version {committed.version}; open: {told}")
        return CommitPlan(_follow(world, replace(record, committed=committed)))
    told = ", ".join(f"{engine.name} at {_told(weights)}" for engine, weights in open_ones.values())
    seen = f"engines are open at different weights ({told})" if open_ones else "no engine is open"
    cure = "create a WeightVersion, or raise spec.version of the present one, with the checkpoint that shall be served"
    text = f"the record of the committed version is lost and {seen}: {cure}"
    return CommitPlan(_follow(world, record), reason=Reason.COMMIT_UNKNOWN, message=text)


def _silent(world: World, record: Record) -> str:
    """Engines that may be open, and of which nobody knows at which version; empty where there are none."""
    return ", ".join(engine.name for engine in _unknown(world, record)[:3])


def _unknown(world: World, record: Record) -> list[Engine]:
    return [engine for engine in world.engines if engine.fence(record.epoch) is Fence.UNKNOWN]


def _may_yet_be_met(world: World, record: Record, work: Work) -> bool:
    """Whether all of them came up so lately that their guards are only about to be met: no cause for alarm."""
    ups = [engine.pod.ready_since or engine.pod.running_since for engine in _unknown(world, record)]
    known = [up for up in ups if up is not None]
    first = min(known, default=work.now) + timedelta(seconds=world.settings.operator_silence_s)
    if len(known) < len(ups) or first <= work.now:
        return False
    work.wake(first)
    return True


def _open(world: World) -> list[tuple[Engine, EngineState]]:
    return [
        (engine, state)
        for engine in world.engines
        if (state := engine.answering) is not None
        and state.gate is Gate.OPEN
        and state.weights.state is WeightsState.VERIFIED
    ]


def _identity(weights: Weights) -> Identity:
    """Version 0 is model.path, loaded at the start or read again since: only the latter knows a digest."""
    return weights.version or 0, weights.digest if weights.version else None


def _told(weights: Weights) -> str:
    return f"{weights.version} ({weights.digest})" if weights.version else "0"


def _found(held: Mapping[Identity, Weights], weight_versions: tuple[WeightVersion, ...], now: datetime) -> Committed:
    """The higher one is the commit: no engine opens at a version that is not recorded. The lower one still rolls."""
    newest, *older = sorted(held, key=lambda identity: identity[0], reverse=True)
    weights, (version, digest) = held[newest], newest
    uid = next((each.metadata.uid for each in weight_versions if each.spec.version == version), None)
    path = weights.source.removeprefix(CHECKPOINT) if weights.source.startswith(CHECKPOINT) else None
    return Committed(
        version=version,
        digest=digest,
        checkpoint=path,
        weight_version_uid=uid if version else None,
        time=now,
        previous=Previous(version=older[0][0], digest=older[0][1]) if older else None,
    )
