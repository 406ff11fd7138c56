"""Objects of ours with every field set."""

from datetime import UTC, datetime

from rollfleet_operator.api.members import Member
from rollfleet_operator.api.meta import Condition, ConditionStatus
from rollfleet_operator.api.rolloutengine import (
    Aftermath,
    Committed,
    EngineDetail,
    EnginesSummary,
    LastFinished,
    Outcome,
    Previous,
    RolloutEngineStatus,
)
from rollfleet_operator.api.weightversion import (
    Checkpoint,
    FailedAttempt,
    FailedEngine,
    HistoryEntry,
    Phase,
    PhaseSeconds,
    Progress,
    SenderRecord,
    Stored,
    Target,
    WeightVersionStatus,
)
from rollfleet_protocol.state import DigestSource

THEN = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
DIGEST = f"sha256:{'ab' * 32}"


def full_condition(of: str) -> Condition:
    return Condition(
        type=of,
        status=ConditionStatus.FALSE,
        reason="CheckpointIncomplete",
        message="qwen-0-0-abcde: model.safetensors is truncated",
        last_transition_time=THEN,
        observed_generation=3,
    )


def full_fleet_status() -> RolloutEngineStatus:
    detail = EngineDetail(name="qwen-0-0-abcde", ordinal=0, state="CatchingUp", since=THEN, message="reads step-42")
    return RolloutEngineStatus(
        observed_generation=7,
        replicas=4,
        ready_replicas=3,
        serving_replicas=2,
        selector="rollfleet.io/fleet=qwen,rollfleet.io/component=engine",
        endpoint="http://qwen.rl.svc:8000",
        epoch=9,
        ca_bundle="LS0tLS1CRUdJTi0tLS0t",
        committed=Committed(
            version=42,
            digest=DIGEST,
            checkpoint="step-42",
            weight_version_uid="0f3a",
            time=THEN,
            excluded=("5d1f",),
            previous=Previous(version=41, digest=DIGEST),
        ),
        last_finished=LastFinished(
            version=43,
            generation=5,
            weight_version_uid="0f3a",
            outcome=Outcome.FAILED,
            reason="CoverageFailed",
            message="renamed tensor",
            aftermath=Aftermath.REOPENED,
            retry_request="again",
        ),
        engines=EnginesSummary(counts={"Serving": 2, "CatchingUp": 1}, details=(detail,), time=THEN),
        members=(
            Member(
                name="qwen-0-0-abcde",
                uid="5d1f",
                ordinal=0,
                ip="198.51.100.7",
                node="node-1",
                grace_seconds=90,
                restarts=3,
                vanished_since=THEN,
                vanished_epoch=8,
            ),
        ),
        proven_template="0a1b2c3d4e5f6789",
        conditions=(full_condition("Accepted"), full_condition("Available")),
    )


def full_weight_version_status() -> WeightVersionStatus:
    entry = HistoryEntry(
        version=41,
        engine_uid="fleet-uid",
        step="2050",
        checkpoint="step-41",
        outcome=Outcome.ACTIVE,
        digest=DIGEST,
        digest_source=DigestSource.CHECKPOINT,
        time=THEN,
        paused_seconds="0.412",
        max_abs_logprob_diff="0.000",
        message="2 engines caught up later",
    )
    failed = FailedEngine(name="qwen-1-0-fghij", reason="CoverageFailed", message="model.norm.weight is missing")
    return WeightVersionStatus(
        observed_generation=5,
        phase=Phase.VERIFYING,
        version=42,
        engine_uid="fleet-uid",
        step="2100",
        checkpoint="step-42",
        stored=Stored(version=41, checkpoint=Checkpoint(path="copy-41")),
        committed_version=41,
        epoch=9,
        attempt=2,
        prepare_attempt=1,
        closed_epoch=8,
        last_attempt=FailedAttempt(attempt=1, reason="TransferFailed", message="boom"),
        retry_request="again",
        started_at=THEN,
        phase_started_at=THEN,
        paused_at=THEN,
        targets=(
            Target(
                name="qwen-0-0-abcde",
                incarnation="5d1f",
                url="https://198.51.100.7:8001",
                rank_offset=1,
                world_size=8,
            ),
        ),
        progress=Progress(done=1, total=2, failed=(failed,), time=THEN),
        engines="1/2",
        digest=DIGEST,
        digest_source=DigestSource.TRAINER,
        sender=SenderRecord(holder="grpo/7f3a", service_account_name="grpo", uid="account-uid"),
        phase_seconds=PhaseSeconds(
            preparing="1.204", quiescing="0.012", transferring="0.300", verifying="0.090", opening="0.004"
        ),
        paused_seconds="0.406",
        history=(entry,),
        conditions=(full_condition("Accepted"), full_condition("Verified")),
    )
