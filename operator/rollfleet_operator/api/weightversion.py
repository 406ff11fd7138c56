"""WeightVersion: which weights a fleet must hold (design section 2), with the fields that are built."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel, Conditions, ObjectMeta
from rollfleet_operator.api.rolloutengine import Outcome


class EngineRef(ApiModel):
    """The fleet, in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


class Checkpoint(ApiModel):
    """A directory of safetensors files."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]  # relative to volumes.checkpoints, no ".."


class SourceType(StrEnum):
    """Where the weights come from."""

    CHECKPOINT = "Checkpoint"


class Source(ApiModel):
    """Discriminated union of sources."""

    type: SourceType
    checkpoint: Checkpoint | None = None


class PauseMode(StrEnum):
    """vLLM's words."""

    ABORT = "abort"


class Pause(ApiModel):
    """What happens to requests in flight."""

    mode: PauseMode = PauseMode.ABORT


class StrategyType(StrEnum):
    """How the fleet moves."""

    ATOMIC = "Atomic"


class Strategy(ApiModel):
    """Discriminated union of strategies."""

    type: StrategyType = StrategyType.ATOMIC


class Probe(ApiModel):
    """Fixed tokens whose log-probabilities all engines must agree on."""

    tokens: Annotated[tuple[Annotated[int, Field(ge=0, le=2**31 - 1)], ...], Field(min_length=2, max_length=256)] = (
        1,
        2,
        3,
        5,
        7,
        11,
    )
    max_abs_logprob_diff: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?$", max_length=32)] = "0.001"


class VerifySpec(ApiModel):
    """Checks before the commit. Digest and coverage are always required."""

    probe: Probe = Probe()


class Deadlines(ApiModel):
    """Seconds that each phase may take, counted while operator and API server are up."""

    prepare_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    quiesce_seconds: Annotated[int, Field(ge=1, le=86400)] = 120
    transfer_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    verify_seconds: Annotated[int, Field(ge=1, le=86400)] = 120


class WeightVersionSpec(ApiModel):
    """Desired weights."""

    engine_ref: EngineRef
    version: Annotated[int, Field(ge=1, le=2**63 - 1)]
    step: Annotated[str, Field(max_length=253)] = ""
    source: Source
    pause: Pause = Pause()
    verify: VerifySpec = VerifySpec()
    strategy: Strategy = Strategy()
    deadlines: Deadlines = Deadlines()


class Phase(StrEnum):
    """A print of the conditions, in the order of an update."""

    PENDING = "Pending"
    PREPARING = "Preparing"
    QUIESCING = "Quiescing"
    TRANSFERRING = "Transferring"
    VERIFYING = "Verifying"
    OPENING = "Opening"
    ACTIVE = "Active"
    FAILED = "Failed"
    SUPERSEDED = "Superseded"


class Target(ApiModel):
    """An engine of the update, frozen at Quiesced."""

    name: str  # pod
    incarnation: str
    url: str  # of the control port
    rank_offset: int
    world_size: int


class FailedEngine(ApiModel):
    """An engine that holds the update up, in its own words."""

    name: str
    reason: str
    message: str


class Progress(ApiModel):
    """Engines done with the current step. Written at most once a second."""

    done: int = 0
    total: int = 0
    failed: Annotated[tuple[FailedEngine, ...], Field(max_length=10)] = ()


class PhaseSeconds(ApiModel):
    """How long each phase took."""

    preparing: str = ""
    quiescing: str = ""
    transferring: str = ""
    verifying: str = ""
    opening: str = ""


class HistoryEntry(ApiModel):
    """One ended update."""

    version: int
    step: str = ""
    checkpoint: str = ""
    outcome: Outcome
    digest: str = ""
    time: datetime
    paused_seconds: str = ""
    max_abs_logprob_diff: str = ""
    message: str = ""


class WeightVersionStatus(ApiModel):
    """Observed update."""

    observed_generation: int = 0
    phase: Phase = Phase.PENDING
    version: int = 0  # of the update that epoch, attempt and the rest speak of
    committed_version: int | None = None  # of the fleet, for the column
    epoch: int = 0
    attempt: int = 0
    started_at: datetime | None = None
    phase_started_at: datetime | None = None
    targets: Annotated[tuple[Target, ...], Field(max_length=1000)] = ()
    progress: Progress = Progress()
    engines: str = ""  # "n/m" for the column
    digest: str = ""
    phase_seconds: PhaseSeconds = PhaseSeconds()
    paused_seconds: str = ""
    history: Annotated[tuple[HistoryEntry, ...], Field(max_length=10)] = ()
    conditions: Conditions = ()


class WeightVersion(ApiModel):
    """Which weights a fleet must hold."""

    metadata: ObjectMeta
    spec: WeightVersionSpec
    status: WeightVersionStatus = WeightVersionStatus()
