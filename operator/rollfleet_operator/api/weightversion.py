"""WeightVersion: which weights a fleet must hold (design section 2), with the fields that are built."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel, Conditions, ObjectMeta
from rollfleet_operator.api.records import Token
from rollfleet_operator.api.rules import rule, rules
from rollfleet_operator.api.sources import Checkpoint, Recovery, Source, SourceType, Stored, Trainer
from rollfleet_operator.api.update_policies import FailureType, OnFailure, Rolling, Strategy, StrategyType
from rollfleet_operator.api.update_records import (
    FailedAttempt,
    FailedEngine,
    HistoryEntry,
    Phase,
    PhaseSeconds,
    Progress,
    SenderRecord,
    Target,
)
from rollfleet_protocol.state import DigestSource

__all__ = [
    "Checkpoint",
    "FailedAttempt",
    "FailedEngine",
    "FailureType",
    "HistoryEntry",
    "OnFailure",
    "Phase",
    "PhaseSeconds",
    "Progress",
    "Recovery",
    "Rolling",
    "SenderRecord",
    "Source",
    "SourceType",
    "Stored",
    "Strategy",
    "StrategyType",
    "Target",
    "Trainer",
    "WeightVersion",
    "WeightVersionSpec",
    "WeightVersionStatus",
]


class EngineRef(ApiModel):
    """The fleet, in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the RolloutEngine."""


class PauseMode(StrEnum):
    """vLLM's words."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Pause(ApiModel):
    """What happens to requests in flight."""

    mode: PauseMode = PauseMode.ABORT
    """abort: they end at once with what they have, finish_reason "abort". wait: they may end by themselves for
    drainTimeoutSeconds, then as with abort. keep: they are frozen, go on under the new weights, and tell the versions
    of their tokens; those that demand one version by X-Weight-Version-Required are aborted."""
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    """For mode wait: seconds from closing the gates until requests that still run are aborted."""


ONE_LINE = r"^[^\x00-\x1f\x7f]*$"  # no control characters: labels are shown in tables and logs


Logprob = Annotated[str, Field(pattern=r"^(-[0-9]+(\.[0-9]+)?|0(\.0+)?)$", max_length=32)]


class Probe(
    ApiModel,
    json_schema_extra=rules(
        rule(
            "!has(self.expectedLogprobs) || self.expectedLogprobs.size() in [0, self.tokens.size() - 1]",
            "spec.verify.probe.expectedLogprobs has one value for each of spec.verify.probe.tokens after the first",
            field=".expectedLogprobs",
        )
    ),
):
    """Fixed tokens whose log-probabilities all engines must agree on."""

    tokens: Annotated[tuple[Token, ...], Field(min_length=2, max_length=256)] = (1, 2, 3, 5, 7, 11)
    """Token ids, all within the model's vocabulary."""
    max_abs_logprob_diff: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?$", max_length=32)] = "0.001"
    """Largest difference between two engines' log-probabilities (natural) that counts as agreement; a decimal."""
    expected_logprobs: Annotated[tuple[Logprob, ...], Field(max_length=255)] = ()
    """Log-probabilities (natural) of the tokens after the first as the trainer computes them for this very version;
    decimals. An engine whose answer differs is left out as by a failed check of its own; where all do the update fails.
    Give those of the new version with it, or take them out."""

    @property
    def expected(self) -> tuple[float, ...]:
        """expectedLogprobs as numbers."""
        return tuple(float(value) for value in self.expected_logprobs)


class VerifySpec(ApiModel):
    """Checks before the commit. Digest and coverage are always required."""

    probe: Probe = Probe()
    """Answered by every engine under the new weights before any of them opens, and compared between engines: a fleet of
    one has nobody to compare with. Late joiners are compared with those that serve, or with the recorded answer."""


class Deadlines(ApiModel):
    """Seconds that each phase may take, counted while operator and API server are up."""

    prepare_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Reading and checking the checkpoint on every engine, while serving goes on."""
    quiesce_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    """Closing all gates and ending the requests in flight."""
    transfer_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """Loading the weights."""
    verify_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    """Cache reset and probe."""


class WeightVersionSpec(
    ApiModel,
    json_schema_extra=rules(
        rule(
            "self.source == oldSelf.source || self.version > oldSelf.version",
            "spec.source changes only together with a higher spec.version",
            field=".source",
            forbidden=True,
        ),
        rule(
            "self.source.type == 'Trainer' || !has(self.recovery)",
            "spec.recovery is only for spec.source.type Trainer: a checkpoint is its own copy",
            field=".recovery",
            forbidden=True,
        ),
        rule(
            "!has(self.stored) || self.stored.version <= self.version",
            "spec.stored.version must not exceed spec.version: it is of a version that was sent already",
            field=".stored.version",
        ),
        rule(
            "self.source.type != 'Trainer' || self.strategy.type == 'Atomic'",
            "spec.strategy.type Rolling is only for spec.source.type Checkpoint: a trainer sends once to all engines",
            field=".strategy.type",
        ),
        rule(
            "self.pause.mode != 'wait' || self.pause.drainTimeoutSeconds < self.deadlines.quiesceSeconds",
            "spec.pause.drainTimeoutSeconds must be less than spec.deadlines.quiesceSeconds: what still runs then is "
            "aborted within the rest",
            field=".pause.drainTimeoutSeconds",
        ),
    ),
):
    """Desired weights."""

    engine_ref: Annotated[
        EngineRef,
        Field(
            json_schema_extra=rules(
                rule(
                    "self == oldSelf",
                    "spec.engineRef cannot change: make another WeightVersion for another fleet",
                    forbidden=True,
                )
            )
        ),
    ]
    """The fleet. One WeightVersion per fleet; a second one is not Accepted."""
    version: Annotated[
        int,
        Field(
            ge=1,
            le=2**63 - 1,
            json_schema_extra=rules(
                rule(
                    "self >= oldSelf",
                    "spec.version only rises; to go back, give an older checkpoint a higher version",
                )
            ),
        ),
    ]
    """Number of the version. It only rises, and must exceed the fleet's committed version."""
    step: Annotated[str, Field(max_length=253, pattern=ONE_LINE)] = ""
    """Free label of the trainer, such as its training step."""
    source: Source
    """Where the weights come from. Changes only together with version."""
    recovery: Recovery | None = None
    """For source.type Trainer: a stored copy, which late joiners and a rollback read. Without one they wait for the
    next push. May be set later, at the same version, once the copy is complete."""
    stored: Stored | None = None
    """What recovery said of a version, for when the spec has gone on before any operator has looked. Who names a copy
    (the trainer's publish) or raises the version (its update, rollfleet bump) writes it; leave it there."""
    pause: Pause = Pause()
    """What happens to requests in flight."""
    verify: VerifySpec = VerifySpec()
    """Checks before the commit."""
    strategy: Strategy = Strategy()
    """How the fleet moves."""
    on_failure: OnFailure = OnFailure()
    """What follows a failure after weights were touched."""
    min_serving: Annotated[int, Field(ge=1, le=1000)] = 1
    """Engines that must hold the version, verified, before it is committed. An engine whose own check fails (coverage,
    digest, cache reset, probe) or whose process is gone is left out and joins later, as long as so many are left."""
    deadlines: Deadlines = Deadlines()
    """Seconds that each phase may take. With onFailure Retry each attempt has them anew."""
    retry_request: Annotated[str, Field(max_length=253, pattern=ONE_LINE)] = ""
    """Any new string retries a version that failed; attempts then count from 1."""


class WeightVersionStatus(ApiModel):
    """Observed update."""

    observed_generation: int = 0
    """metadata.generation that this status speaks of."""
    phase: Phase = Phase.PENDING
    """A print of the conditions, for people; programs read the conditions."""
    version: int = 0
    """Version of the update that epoch, attempt and the rest speak of."""
    engine_uid: str = ""
    """metadata.uid of the RolloutEngine that it was begun on."""
    step: str = ""
    """spec.step of that version; it outlives a spec that has gone on."""
    checkpoint: str = ""
    """Its checkpoint, below the checkpoints volume."""
    stored: Stored | None = None
    """The spec.stored that was seen last; the fleet's commit was written before this."""
    committed_version: int | None = None
    """Version that the fleet serves."""
    epoch: int = 0
    """A print of the fleet's epoch."""
    attempt: int = 0
    """Attempts at this version, as onFailure counts them."""
    prepare_attempt: int = 0
    """Tries at reading and checking the checkpoint in this attempt."""
    last_attempt: FailedAttempt | None = None
    """Why the attempt before this one failed."""
    closed_epoch: int = 0
    """Epoch since which all engines are closed and armed by this update and its earlier attempts; 0 before that."""
    retry_request: str = ""
    """The spec.retryRequest that was followed or seen last."""
    started_at: datetime | None = None
    """When work on this version began."""
    phase_started_at: datetime | None = None
    """Start of the phase. Its deadline counts from here, without the time in which operator or API server was away."""
    paused_at: datetime | None = None
    """When the first gate was seen closed."""
    targets: Annotated[tuple[Target, ...], Field(max_length=1000)] = ()
    """Engines of the update, frozen at Quiesced."""
    sender: SenderRecord | None = None
    """Of a source of type Trainer: who sends, from Quiesced on. It alone may use the engines' transfer routes."""
    progress: Progress = Progress()
    """Engines done with the current step."""
    engines: str = ""
    """Engines that hold this version of all, as n/m."""
    digest: str = ""
    """Digest of the version, on which all engines agree."""
    digest_source: DigestSource | None = None
    """Who vouches for it. Checkpoint: the files. Trainer: it said what it sent. EnginesOnly: nobody but the engines."""
    phase_seconds: PhaseSeconds = PhaseSeconds()
    """How long each phase took."""
    paused_seconds: str = ""
    """How long the fleet answered nothing, in seconds; of one that Failed until then: it may have stayed closed."""
    history: Annotated[tuple[HistoryEntry, ...], Field(max_length=10)] = ()
    """The last ten ended updates, newest last."""
    conditions: Conditions = ()
    """Accepted, Quiesced, Transferred, Verified, Active, MixedVersions, SpansVersions."""


class WeightVersion(ApiModel):
    """Which weights a fleet of rollout engines must hold."""

    metadata: ObjectMeta
    spec: WeightVersionSpec
    """Desired weights."""
    status: WeightVersionStatus = WeightVersionStatus()
    """Observed update."""
    unreadable: str = ""
    """Never written: what this program cannot read of the object. The spec is then a stand-in that leads nowhere."""
