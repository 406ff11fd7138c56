"""WeightVersion.status: the record of the update, with conditions, columns and progress written from it."""

from dataclasses import dataclass

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import (
    PauseMode,
    Phase,
    Progress,
    SourceType,
    WeightVersion,
    WeightVersionStatus,
)
from rollfleet_operator.core.accept import Verdict
from rollfleet_operator.core.conditions import Claim, claim, find, merge
from rollfleet_operator.core.ending import UpdatePlan, withdrawn
from rollfleet_operator.core.moves import causes, tell
from rollfleet_operator.core.policies import attempt_wait_s
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.rolling import TOLD, behind
from rollfleet_operator.core.status import may_write_progress
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import World
from rollfleet_protocol.state import WeightsState

ORDER = (
    Phase.PENDING,
    Phase.PREPARING,
    Phase.QUIESCING,
    Phase.TRANSFERRING,
    Phase.VERIFYING,
    Phase.OPENING,
    Phase.ACTIVE,
)
REASON_OF = {
    Phase.PENDING: Reason.PENDING,
    Phase.PREPARING: Reason.PREPARING,
    Phase.QUIESCING: Reason.QUIESCING,
    Phase.TRANSFERRING: Reason.TRANSFERRING,
    Phase.VERIFYING: Reason.VERIFYING,
    Phase.OPENING: Reason.OPENING,
    Phase.ACTIVE: Reason.ACTIVE,
    Phase.FAILED: Reason.UPDATE_FAILED,
}


@dataclass(frozen=True)
class Subject:
    """A WeightVersion and what a pass found out about it."""

    weight_version: WeightVersion
    verdict: Verdict
    update: UpdatePlan | None  # None: it is not in charge
    committed: Committed | None


def weight_status(subject: Subject, world: World | None, work: Work) -> WeightVersionStatus:
    """The new status."""
    weight_version, old = subject.weight_version, subject.weight_version.status
    record = old if subject.update is None or subject.update.status is None else subject.update.status
    if subject.update is None:
        record = withdrawn(record)
    claims = _claims(subject, record, world)
    generation = weight_version.metadata.generation
    told = record.model_copy(
        update={
            "observed_generation": generation,
            "committed_version": None if subject.committed is None else subject.committed.version,
            "conditions": merge(old.conditions, claims, generation, work.now),
            "engines": old.engines if world is None or subject.update is None else _engines(world, weight_version),
            "progress": old.progress,
        }
    )
    return _with_progress(old, told, record.progress, work)


def _with_progress(
    old: WeightVersionStatus, told: WeightVersionStatus, new: Progress, work: Work
) -> WeightVersionStatus:
    """Progress goes along with every other change; alone it is written at most once a second."""
    bare = told.model_copy(update={"engines": old.engines})
    stamped = new.model_copy(update={"time": old.progress.time})
    if stamped == old.progress and told.engines == old.engines:
        return told
    if bare == old and not may_write_progress(old.progress.time, work):
        return old
    return told.model_copy(update={"progress": new.model_copy(update={"time": work.now})})


def _engines(world: World, weight_version: WeightVersion) -> str:
    """How many engines hold this version, of all that are asked for."""
    held = sum(
        state.weights.version == weight_version.spec.version
        and state.weights.state in (WeightsState.LOADED, WeightsState.VERIFIED)
        for _, state in world.usable
    )
    return f"{held}/{world.fleet.spec.replicas}"


def _claims(subject: Subject, record: WeightVersionStatus, world: World | None) -> tuple[Claim, ...]:
    verdict = subject.verdict
    accepted = claim("Accepted", verdict.accepted, verdict.reason, verdict.message)
    if subject.update is None or not verdict.accepted:
        rest = tuple(claim(kind, False, Reason.NOT_REACHED, "") for kind in ("Quiesced", "Transferred", "Verified"))
        return (accepted, *rest, claim("Active", False, verdict.reason, verdict.message))
    steps = (_quiesced(record), *_reached(subject, record), _active(subject, record))
    return (accepted, *steps, *_spans_versions(subject.weight_version, record), *_mixed_versions(subject, world))


def _mixed_versions(subject: Subject, world: World | None) -> tuple[Claim, ...]:
    """There from the first update that rolls on."""
    committed = subject.committed
    if committed is not None and committed.previous is not None:
        text = f"engines answer from version {committed.previous.version} and from version {committed.version}"
        if world is not None and (left := behind(world, committed, world.fleet.status.epoch)):
            names = ", ".join(engine.name for engine in left[:TOLD])
            text += f"; {len(left)} may answer from the older one: {names}{', ...' if left[TOLD:] else ''}"
        return (claim("MixedVersions", True, Reason.ROLLING, text),)
    told_before = find(subject.weight_version.status.conditions, "MixedVersions") is not None
    return (claim("MixedVersions", False, Reason.ONE_VERSION),) if told_before else ()


def _spans_versions(weight_version: WeightVersion, record: WeightVersionStatus) -> tuple[Claim, ...]:
    """There from the first update that keeps requests on."""
    quiesced = record.phase in (Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING, Phase.ACTIVE)
    if weight_version.spec.pause.mode is PauseMode.KEEP and quiesced:
        return (claim("SpansVersions", True, Reason.REQUESTS_KEPT),)
    told_before = find(weight_version.status.conditions, "SpansVersions") is not None
    return (claim("SpansVersions", False, Reason.NONE_KEPT),) if told_before else ()


def _quiesced(record: WeightVersionStatus) -> Claim:
    phase = record.phase
    if phase in (Phase.TRANSFERRING, Phase.VERIFYING):
        return claim("Quiesced", True, Reason.QUIESCED)
    if phase in (Phase.OPENING, Phase.ACTIVE):
        return claim("Quiesced", False, Reason.OPENED)
    return claim("Quiesced", False, REASON_OF[phase])


def _reached(subject: Subject, record: WeightVersionStatus) -> tuple[Claim, Claim]:
    if record.phase is Phase.FAILED:
        reached = {kind: find(record.conditions, kind) for kind in ("Transferred", "Verified")}
        return (
            _keep_or_fail(
                reached["Transferred"] is not None and reached["Transferred"].status == "True", "Transferred"
            ),
            claim("Verified", False, Reason.UPDATE_FAILED),
        )
    at = ORDER.index(record.phase)
    transferred = at > ORDER.index(Phase.TRANSFERRING)
    verified = at > ORDER.index(Phase.VERIFYING)
    return (
        claim("Transferred", transferred, Reason.TRANSFERRED if transferred else REASON_OF[record.phase]),
        claim("Verified", verified, Reason.VERIFIED if verified else REASON_OF[record.phase]),
    )


def _keep_or_fail(kept: bool, kind: str) -> Claim:
    return claim(kind, kept, Reason.TRANSFERRED if kept else Reason.UPDATE_FAILED)


def _active(subject: Subject, record: WeightVersionStatus) -> Claim:
    phase, plan = record.phase, subject.update
    if plan is not None and plan.reason:
        return Claim("Active", False, plan.reason, plan.message)
    if phase is Phase.ACTIVE:
        return claim("Active", True, Reason.ACTIVE)
    old = find(record.conditions, "Active")
    if phase is Phase.FAILED and old is not None:
        return Claim("Active", False, old.reason, old.message)
    words = (_tried_again(subject, record), _again(subject, record))
    told = " ".join(text for text in words if text)
    return claim("Active", False, REASON_OF[phase], told or _sentence(subject.weight_version, record))


def _tried_again(subject: Subject, record: WeightVersionStatus) -> str:
    """Why the checkpoint is read again: nobody should have to wait for the deadline to learn it."""
    found = causes(record.progress.failed)
    if record.phase is not Phase.PREPARING or not found:
        return ""
    seconds = subject.weight_version.spec.deadlines.prepare_seconds
    return f"{found[0].reason}: {tell(found)}; it is tried for up to {seconds} s (spec.deadlines.prepareSeconds)."


def _sentence(weight_version: WeightVersion, record: WeightVersionStatus) -> str:
    """What is done in this phase: a push has no checkpoint to be read."""
    if record.phase is not Phase.PREPARING:
        return REASON_OF[record.phase].sentence
    again = record.last_attempt is not None  # weights were touched: engines are closed
    if weight_version.spec.source.type is SourceType.TRAINER:
        return "Engines stay closed until a trainer sends the version." if again else Reason.PREPARING.sentence
    return f"Engines read and check the checkpoint {'again' if again else 'while they serve'}."


def _again(subject: Subject, record: WeightVersionStatus) -> str:
    """What is to be said while a later attempt runs."""
    last, sentence = record.last_attempt, _sentence(subject.weight_version, record)
    if last is None or record.phase is Phase.FAILED:
        return ""
    if not last.attempt:
        return f"{sentence} Attempt {record.attempt}; {last.reason}: {last.message}"
    wait = attempt_wait_s(record.attempt, subject.weight_version.spec.deadlines.prepare_seconds)
    begun = f"Attempt {record.attempt}, {wait:g} s after the one before"
    return f"{sentence} {begun}; attempt {last.attempt} failed: {last.reason}: {last.message}"
