"""What a guard tells about its engine (design section 4)."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_protocol.base import Answer
from rollfleet_protocol.sleep import Sleeping
from rollfleet_protocol.words import Words

# As far as commands go: what a guard says beyond them, no command could answer.
Epoch = Annotated[int, Field(ge=0, le=2**62)]
Version = Annotated[int, Field(ge=0, le=2**63 - 1)]
# They go into statuses, which hold 1.5 MB in all.
Digest = Annotated[str, Field(max_length=128)]
Incarnation = Annotated[str, Field(max_length=128)]
Workers = Annotated[int, Field(ge=0, le=1_000_000)]
Path = Annotated[str, Field(max_length=4096)]


ProbeTokens = Annotated[tuple[int, ...], Field(max_length=4096)]
Logprobs = Annotated[tuple[float, ...], Field(max_length=4096)]


class Gate(StrEnum):
    """Whether inference is admitted."""

    OPEN = "Open"
    CLOSED = "Closed"


class WeightsState(StrEnum):
    """What is known of the weights that the engine holds now."""

    INITIAL = "Initial"  # as loaded from model.path at start, not verified yet
    ABSENT = "Absent"  # dropped by sleep level 2, and not loaded since
    UPDATING = "Updating"  # a transfer has begun; the old tensors may be gone
    LOADED = "Loaded"  # transferred, digest and coverage hold, not verified yet
    VERIFIED = "Verified"  # caches reset, scheduler resumed, probe answered
    UNCERTAIN = "Uncertain"  # a step after the first touched tensor failed: only a full reload cures it


class OperationName(StrEnum):
    """Commands of a guard that take time; at most one runs at once."""

    PREPARE = "Prepare"
    CLOSE = "Close"
    TRANSFER = "Transfer"
    VERIFY = "Verify"
    SLEEP = "Sleep"
    WAKE = "Wake"
    REOPEN = "Reopen"  # the guard's own: resume and open on untouched weights, after Cancel or silence


class OperationStatus(StrEnum):
    """How far an operation is."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class FailureReason(StrEnum):
    """Cause of a failed operation, as shown in conditions and events."""

    CHECKPOINT_NOT_FOUND = "CheckpointNotFound"
    CHECKPOINT_INCOMPLETE = "CheckpointIncomplete"  # half-written, truncated, absent shard
    CHECKPOINT_INVALID = "CheckpointInvalid"  # malformed header, path escapes the root
    CHECKPOINT_CHANGED = "CheckpointChanged"  # files differ from what was staged
    COVERAGE_FAILED = "CoverageFailed"  # renamed, missing, superfluous, wrong shape or dtype, layer not fully loaded
    DIGEST_MISMATCH = "DigestMismatch"
    PAUSE_FAILED = "PauseFailed"
    TRANSFER_FAILED = "TransferFailed"
    SLEEP_FAILED = "SleepFailed"  # falling asleep, or waking up
    CACHE_RESET_FAILED = "CacheResetFailed"
    PROBE_FAILED = "ProbeFailed"
    ENGINE_DEAD = "EngineDead"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    CANCELLED = "Cancelled"


class Failure(Answer):
    """Why an operation failed: cause, and the engine's own text naming file, tensor or layer."""

    reason: FailureReason
    message: Words


class Operation(Answer):
    """The newest operation of this incarnation."""

    name: OperationName
    epoch: Epoch
    version: Version
    status: OperationStatus
    seconds: float = 0.0  # duration so far, or in all
    progress: Words = ""
    pushed: bool = False  # of a Transfer: a trainer sends, and a newer epoch does not wait for it
    failure: Failure | None = None


class Host(Answer):
    """What the launcher saw of its container before it started the engine; empty where nobody told the guard."""

    platform: Words = ""  # "CPU" | "Ascend"
    # Versions by name: packages as pip knows them, "CANN", "driver".
    software: Annotated[dict[Words, Words], Field(max_length=32)] = Field(default_factory=dict)
    chip: Words = ""  # that the plug-in was built for, as it writes it: A2, A3, _310P, A5
    npus: Annotated[tuple[int, ...], Field(max_length=64)] = ()  # N of each /dev/davinci<N>


class Facts(Answer):
    """What does not change while the process lives."""

    guard_version: Words
    engine: Words  # "vllm" | "simulator"
    engine_version: Words
    model: Words
    world_size: Workers = 1  # workers of this engine over all of TP, PP and DP
    data_parallel_size: Workers = 1
    vocabulary: Annotated[int, Field(ge=0, le=2**31)] = 0  # tokens of the model, from 0 on; 0: not known
    capabilities: Annotated[
        tuple[Words, ...], Field(max_length=256)
    ] = ()  # for example "source/Checkpoint", "pause/abort"
    host: Host = Host()


class Weights(Answer):
    """The weights held now."""

    state: WeightsState
    version: Version | None = None  # None until somebody has said which version they are
    digest: Digest | None = None  # "sha256:<hex>" of the version digest; None for Initial weights
    source: Annotated[str, Field(max_length=4200)] = ""  # "model", "checkpoint:<relative path>" or "trainer:<subject>"


class Staged(Answer):
    """A checkpoint opened, checked and hashed, ready to be read again from the same open files."""

    epoch: int
    version: int
    path: Path
    digest: Digest
    tensors: int
    bytes: int
    seconds: float


class DigestSource(StrEnum):
    """Who vouches for a transfer's digest."""

    CHECKPOINT = "Checkpoint"  # the staged files
    TRAINER = "Trainer"  # it said what it sent
    ENGINES_ONLY = "EnginesOnly"  # the workers agree among themselves, and nobody else has said anything


class Transferred(Answer):
    """What the workers received and applied."""

    epoch: int
    version: int
    digest: Digest
    tensors: int
    bytes: int
    layers: int  # layers whose loaded elements were compared with the first load
    seconds: float
    phase_seconds: dict[str, float]  # vLLM's four phases: init, start, update, finish
    digest_source: DigestSource = DigestSource.CHECKPOINT


class ProbeResult(Answer):
    """Log-probabilities of the probe tokens under the weights held now (natural log, one per token after the first)."""

    epoch: int
    version: int
    tokens: ProbeTokens
    logprobs: Logprobs  # of data-parallel rank 0
    other_ranks: Annotated[
        tuple[Logprobs, ...], Field(max_length=1024)
    ] = ()  # of ranks 1, 2, ... of a data-parallel engine
    seconds: float

    @property
    def by_rank(self) -> tuple[tuple[float, ...], ...]:
        """Of every data-parallel rank, in their order."""
        return (self.logprobs, *self.other_ranks)


class ProbeReport(Answer):
    """Answer of commands.PROBE_PATH: what an engine that may be serving says to the probe tokens now.

    `weights` held from the first token to the last: a probe that an update interrupts has no report.
    """

    incarnation: Incarnation
    epoch: Epoch
    gate: Gate
    weights: Weights
    tokens: tuple[int, ...]
    by_rank: tuple[tuple[float, ...], ...]  # natural log, one per token after the first, of every data-parallel rank
    seconds: float


class EngineState(Answer):
    """The whole answer of GET /rollfleet/v1/state.

    `sequence` rises with every change but `in_flight`, `kept` and `held`: a long poll with `after=sequence` returns at
    the next change, so that load alone wakes nobody.
    """

    sequence: int
    incarnation: Incarnation  # new at each process start
    pod_uid: Annotated[str, Field(max_length=128)] = ""  # whose address this is; empty outside of a pod
    facts: Facts
    alive: bool  # the engine core lives
    gate: Gate
    closed_reason: Words = ""  # one of refusals.ClosedReason where the gate is closed
    ready: bool = False  # what /readyz says: belongs to the serving set
    armed: bool = False
    paused: bool = False
    sleep: Sleeping = Sleeping()
    epoch: Epoch = 0
    weights: Weights
    in_flight: int = 0  # admitted and not finished, without those that are kept
    kept: int = 0  # frozen by a Close in mode keep: nobody hears of them until the gate opens
    held: int = 0  # not admitted yet: they wait for the gate to open (router.whenClosed)
    staged: Staged | None = None
    transferred: Transferred | None = None
    probe: ProbeResult | None = None
    operation: Operation | None = None
