"""What is recorded of an update: parts of WeightVersion.status."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel
from rollfleet_operator.api.records import Outcome
from rollfleet_protocol.state import DigestSource


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


class Target(ApiModel):
    """An engine of the update, frozen at Quiesced."""

    name: str
    """Its pod."""
    pod_uid: str = ""
    """metadata.uid of that pod: who calls the engine shows it a token for this pod."""
    incarnation: str
    """Process of the engine; new at each start."""
    url: str
    """Its control port."""
    rank_offset: int
    """First rank of its workers in a group with the trainer as rank 0."""
    world_size: int
    """Its workers."""


class SenderRecord(ApiModel):
    """The trainer of the update, frozen with the targets."""

    holder: str
    """holderIdentity of Lease <fleet>-sender: <ServiceAccount>/<instance>."""
    service_account_name: str
    """Its ServiceAccount, one of the fleet's spec.trainers."""
    uid: str
    """metadata.uid of that ServiceAccount."""


class FailedEngine(ApiModel):
    """An engine that holds the update up, in its own words."""

    name: str
    """Its pod."""
    reason: str
    """Cause, in CamelCase."""
    message: str
    """The engine's own text, naming file, tensor or layer."""


class Progress(ApiModel):
    """Engines done with the current step. Written at most once a second."""

    done: int = 0
    """Engines that finished the step."""
    total: int = 0
    """Engines that must."""
    failed: Annotated[tuple[FailedEngine, ...], Field(max_length=10)] = ()
    """Those that hold it up, ten at most."""
    time: datetime | None = None
    """When this was written."""


class FailedAttempt(ApiModel):
    """The attempt before the present one."""

    attempt: int
    """Its number."""
    reason: str
    """Cause, in CamelCase."""
    message: str = ""
    """Why it failed."""


class PhaseSeconds(ApiModel):
    """How long each phase took, in seconds as decimals; empty until it ended."""

    preparing: str = ""
    """While serving went on."""
    quiescing: str = ""
    """Closing and draining."""
    transferring: str = ""
    """Loading."""
    verifying: str = ""
    """Cache reset and probe, until the commit."""
    opening: str = ""
    """Until every gate was open."""


class HistoryEntry(ApiModel):
    """One ended update."""

    version: int
    """Version that was asked for."""
    engine_uid: str = ""
    """metadata.uid of the RolloutEngine: one that is made again under the name has no part in this."""
    step: str = ""
    """The trainer's label."""
    checkpoint: str = ""
    """Path below volumes.checkpoints; empty for what a trainer sent."""
    digest_source: DigestSource | None = None
    """Who vouches for the digest."""
    outcome: Outcome
    """How it ended."""
    digest: str = ""
    """Digest of the version, where it came so far."""
    time: datetime
    """When it ended."""
    paused_seconds: str = ""
    """How long the fleet answered nothing, in seconds; of one that Failed until then: it may have stayed closed."""
    max_abs_logprob_diff: str = ""
    """Largest difference between two engines' probes, or between one and spec.verify.probe.expectedLogprobs."""
    message: str = ""
    """Why, where it failed."""
