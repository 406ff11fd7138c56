"""RolloutEngine.status, written from what was derived. Equal to what is there unless something changed."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from rollfleet_operator.api.meta import LABEL_COMPONENT, LABEL_FLEET, LABEL_NODE
from rollfleet_operator.api.rolloutengine import EnginesSummary, RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.accept import Verdict
from rollfleet_operator.core.commit import CommitPlan
from rollfleet_operator.core.conditions import Claim, claim, find, merge
from rollfleet_operator.core.ending import UpdatePlan
from rollfleet_operator.core.engine_states import JOINING, UNWELL, Doing, EngineNote, summarise
from rollfleet_operator.core.objects.launch import launch_settings
from rollfleet_operator.core.policies import PROGRESS_S
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import World

SERVING_PORT = 8000


@dataclass(frozen=True)
class Findings:
    """What a pass found out about the fleet."""

    world: World
    record: Record
    verdict: Verdict
    commit: CommitPlan
    update: UpdatePlan
    weight_version: WeightVersion | None  # in charge
    notes: tuple[EngineNote, ...]
    ca_bundle: str
    changing_pods: bool
    lost: str  # why the committed version can't be restored
    rejected: str  # by the API server, in its own words

    @property
    def serving(self) -> int:
        """Engines that serve the committed version."""
        return sum(note.doing is Doing.SERVING for note in self.notes)

    def count(self, doing: Doing) -> int:
        """Engines that do this."""
        return sum(note.doing is doing for note in self.notes)


def fleet_status(findings: Findings, work: Work) -> RolloutEngineStatus:
    """The new status."""
    fleet, record = findings.world.fleet, findings.record
    old = fleet.status
    name, namespace = fleet.metadata.name, fleet.metadata.namespace
    known = _everybody_was_asked(findings.world)
    claims = (*(_claims(findings) if known else (_accepted(findings),)), *_ignored(findings))
    status = old.model_copy(
        update={
            "observed_generation": fleet.metadata.generation,
            "selector": f"{LABEL_FLEET}={name},{LABEL_COMPONENT}=engine{_leading(fleet.spec.parallelism.nodes)}",
            "endpoint": f"http://{name}.{namespace}.svc:{SERVING_PORT}",
            "epoch": record.epoch,
            "committed": record.committed,
            "last_finished": record.last_finished,
            "members": record.members,
            "proven_template": record.proven_template,
            "ca_bundle": findings.ca_bundle,
            "conditions": merge(old.conditions, claims, fleet.metadata.generation, work.now),
        }
    )
    return _with_counts(findings, status, work) if known else status


def _leading(nodes: int) -> str:
    """One pod for each engine: what the scale subresource counts."""
    return f",!{LABEL_NODE}" if nodes > 1 else ""


def _everybody_was_asked(world: World) -> bool:
    """An operator that has just started knows less than the status tells: it leaves the summary until it has asked."""
    return all(
        engine.tried or engine.stopped or engine.pod.deleting or not engine.pod.ip  # there is nobody to ask
        for engine in world.engines
    )


def _with_counts(findings: Findings, status: RolloutEngineStatus, work: Work) -> RolloutEngineStatus:
    old = findings.world.fleet.status
    engines = [note.engine for note in findings.notes]
    present = [each for each in engines if not (each.pod.deleting or each.pod.vanished or each.ended)]
    counted = status.model_copy(
        update={
            "replicas": len(present),
            "ready_replicas": sum(engine.usable is not None for engine in present),
            "serving_replicas": findings.serving,
            "engines": summarise(findings.notes, old.engines, work.now),
        }
    )
    if counted == status:
        return status
    if status == old and not may_write_progress(old.engines.time, work):
        return status
    stamped = EnginesSummary(counts=counted.engines.counts, details=counted.engines.details, time=work.now)
    return counted.model_copy(update={"engines": stamped})


def may_write_progress(last: datetime | None, work: Work) -> bool:
    """Whether the last write that told nothing but progress is long enough ago; else the pass is woken when it is.

    One in the future was written by another clock, and says nothing about how often we write.
    """
    if last is None or abs(work.now - last) >= timedelta(seconds=PROGRESS_S):
        return True
    work.wake(last + timedelta(seconds=PROGRESS_S))
    return False


def _accepted(findings: Findings) -> Claim:
    return claim("Accepted", findings.verdict.accepted, findings.verdict.reason, findings.verdict.message)


def _claims(findings: Findings) -> tuple[Claim, ...]:
    return (
        _accepted(findings),
        _available(findings),
        _progressing(findings),
        _weights_current(findings),
        _degraded(findings),
    )


def _ignored(findings: Findings) -> tuple[Claim, ...]:
    """Only where something is ignored, or was."""
    fleet = findings.world.fleet
    flags = launch_settings(fleet.spec)["rl_config"].ignored_flags
    if flags:
        names = ", ".join(f"spec.rlConfig.{name}" for name in flags)
        text = f"{names} without effect: spec.rlConfig.enabled is false. Set it to true, or remove them"
        return (claim("SettingsIgnored", True, Reason.RL_CONFIG_DISABLED, text),)
    told_before = find(fleet.status.conditions, "SettingsIgnored") is not None
    return (claim("SettingsIgnored", False, Reason.NOTHING_IGNORED),) if told_before else ()


def _available(findings: Findings) -> Claim:
    if findings.serving:
        committed = findings.record.committed
        engines = f"{findings.serving} of {findings.world.fleet.spec.replicas} engines serve"
        version = f"version {committed.version if committed else '?'}"
        if committed is not None and committed.previous is not None:
            version += f" or, until the roll ends, version {committed.previous.version}"
        return claim("Available", True, Reason.SERVING, f"{engines} {version}")
    reason, message = _why_unavailable(findings)
    return claim("Available", False, reason, message)


def _why_unavailable(findings: Findings) -> tuple[Reason, str]:  # noqa: PLR0911 - one answer per case
    if not findings.verdict.accepted:
        return findings.verdict.reason, findings.verdict.message
    if findings.world.fleet.spec.replicas == 0:
        return Reason.SCALED_TO_ZERO, ""
    if findings.commit.reason is not None:
        return findings.commit.reason, findings.commit.message
    if findings.update.closed or findings.update.under_way:
        return Reason.UPDATING, ""
    if findings.update.held:
        return Reason.HELD, findings.update.held
    if findings.lost:
        return Reason.WEIGHTS_LOST, findings.lost
    if findings.rejected and not findings.notes:
        return Reason.APPLY_FAILED, findings.rejected
    for doing, reason in (
        (Doing.CATCHING_UP, Reason.CATCHING_UP),
        (Doing.WAITING_FOR_WEIGHTS, Reason.WAITING_FOR_WEIGHTS),
        (Doing.STARTING, Reason.STARTING),
        (Doing.UNSCHEDULABLE, Reason.UNSCHEDULABLE),
    ):
        note = next((note for note in findings.notes if note.doing is doing), None)
        if note is not None:
            return reason, f"{note.engine.name}: {note.text}" if note.text else ""
    broken = next((note for note in findings.notes if note.doing in UNWELL), None)
    if broken is not None:
        stopped = next(
            (r for r in (Reason.RESTART_BUDGET_SPENT, Reason.CANNOT_START) if broken.text.startswith(r)), None
        )
        return stopped or Reason.BROKEN, f"{broken.engine.name}: {broken.text}"
    return Reason.STARTING, ""


def _progressing(findings: Findings) -> Claim:
    if findings.update.closed:
        return claim("Progressing", True, Reason.UPDATING)
    if findings.update.under_way:
        return claim("Progressing", True, Reason.PREPARING)
    if findings.changing_pods:
        return claim("Progressing", True, Reason.REPLACING)
    for doing, reason in (
        (Doing.CATCHING_UP, Reason.CATCHING_UP),
        (Doing.WAITING_FOR_WEIGHTS, Reason.WAITING_FOR_WEIGHTS),
        (Doing.STARTING, Reason.STARTING),
        (Doing.UPDATING, Reason.UPDATING),
        (Doing.TERMINATING, Reason.REPLACING),
    ):
        if findings.count(doing):
            return claim("Progressing", True, reason)
    return claim("Progressing", False, Reason.STEADY)


def _weights_current(findings: Findings) -> Claim:
    committed, weight_version = findings.record.committed, findings.weight_version
    if committed is None:
        reason = findings.commit.reason or Reason.STARTING
        return claim("WeightsCurrent", False, reason, findings.commit.message)
    if weight_version is not None and weight_version.spec.version > committed.version:
        return _behind(findings, weight_version, committed.version)
    if findings.serving < findings.world.fleet.spec.replicas or committed.previous is not None:
        return claim("WeightsCurrent", False, Reason.NOT_ALL_CURRENT)
    return claim("WeightsCurrent", True, Reason.CURRENT, f"all engines serve version {committed.version}")


def _behind(findings: Findings, weight_version: WeightVersion, version: int) -> Claim:
    asked = weight_version.spec.version
    last = findings.record.last_finished
    if last is not None and (last.version, last.weight_version_uid) == (asked, weight_version.metadata.uid):
        text = f"version {asked} failed, version {version} stays committed: {last.message}"
        return claim("WeightsCurrent", False, Reason.UPDATE_FAILED, text)
    reason = Reason.UPDATING if findings.update.closed or findings.update.under_way else Reason.UPDATE_PENDING
    return claim("WeightsCurrent", False, reason, f"version {asked} is asked for, version {version} is committed")


def _degraded(findings: Findings) -> Claim:
    if findings.commit.reason is not None:
        return claim("Degraded", True, findings.commit.reason, findings.commit.message)
    if findings.rejected:
        return claim("Degraded", True, Reason.APPLY_FAILED, findings.rejected)
    if findings.lost:
        return claim("Degraded", True, Reason.WEIGHTS_LOST, findings.lost)
    unwell = [note for note in findings.notes if note.unwell]
    if not unwell:
        return claim("Degraded", False, Reason.ALL_WELL, "no engine is broken or out of reach")
    text = "; ".join(f"{note.engine.name} is {note.doing.value}: {_words(note)}".rstrip(": ") for note in unwell[:3])
    return claim("Degraded", True, Reason.ENGINES_NOT_WELL, text)


def _words(note: EngineNote) -> str:
    """Its own, or that what failed is being tried again."""
    return note.text or ("it is tried again" if note.doing in JOINING else "")
