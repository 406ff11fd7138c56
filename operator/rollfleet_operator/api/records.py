"""What a fleet remembers of its weights: the commit, and the end of the newest update."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ProbeAnswer(ApiModel):
    """What an engine of the majority answered to the probe when the version was committed."""

    tokens: Annotated[tuple[Token, ...], Field(max_length=256)]
    """Token ids."""
    logprobs: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=256)]
    """Log-probabilities (natural) of the tokens after the first, of data-parallel rank 0; decimals."""
    template_hash: str = ""
    """Of the pod template it ran: an engine made in another way may compute a little differently."""


class Previous(ApiModel):
    """The version before, while a fleet rolls from it to the committed one."""

    version: int
    """Version."""
    digest: str | None = None
    """Digest of the version; absent for version 0 as loaded from model.path."""


class Committed(ApiModel):
    """THE commit record: which weights the fleet serves. Outlives the WeightVersion."""

    version: int
    """Version; 0 is model.path as loaded at start."""
    digest: str | None = None
    """Digest of the version; absent for version 0 as loaded from model.path."""
    checkpoint: str | None = None
    """Path below volumes.checkpoints; absent for version 0."""
    weight_version_uid: str | None = Field(default=None, alias="weightVersionUID")
    """UID of the WeightVersion that brought it."""
    time: datetime
    """When it was committed."""
    previous: Previous | None = None
    """What engines that have not moved yet may answer from, until strategy Rolling has come to its end."""
    excluded: Annotated[tuple[str, ...], Field(max_length=10)] = ()
    """Processes of engines (incarnations) whose answer to the probe was not that of the others: they stay closed."""
    probe: ProbeAnswer | None = None
    """An engine that joins while no other serves answers like this, or stays closed."""


class Outcome(StrEnum):
    """How an update ended."""

    ACTIVE = "Active"
    FAILED = "Failed"
    SUPERSEDED = "Superseded"


class Aftermath(StrEnum):
    """What becomes of the fleet after a failed update."""

    REOPENED = "Reopened"
    RESTORED = "Restored"
    HELD = "Held"
    LOST = "Lost"


class LastFinished(ApiModel):
    """The newest update that ended."""

    version: int
    """Version that was asked for."""
    generation: int
    """metadata.generation of the WeightVersion."""
    weight_version_uid: str | None = Field(default=None, alias="weightVersionUID")
    """UID of the WeightVersion."""
    outcome: Outcome
    """How it ended."""
    reason: str = ""
    """Cause in CamelCase, where it failed."""
    message: str = ""
    """Why, where it failed."""
    aftermath: Aftermath | None = None
    """Where it failed. Reopened: no weights were touched. Restored: touched engines load the committed version from
    where it is stored. Held: they stay closed as they are. Lost: nobody stores it."""
    retry_request: str = ""
    """spec.retryRequest as it was then: another one retries a version that failed."""
