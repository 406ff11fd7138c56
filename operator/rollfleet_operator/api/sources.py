"""Where weights come from: parts of WeightVersion.spec."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel, ServiceAccountName
from rollfleet_operator.api.rules import discriminator_rule, rule, rules
from rollfleet_operator.api.volumes import CheckpointPath


class Checkpoint(ApiModel):
    """A directory of safetensors files."""

    path: CheckpointPath
    """Relative to volumes.checkpoints of the fleet."""


class SourceType(StrEnum):
    """Where the weights come from."""

    CHECKPOINT = "Checkpoint"
    TRAINER = "Trainer"


class Trainer(ApiModel):
    """Who sends the weights: the holder of Lease <fleet>-sender, once it offers this version."""

    service_account_name: ServiceAccountName | None = None
    """Only a process of this one of the fleet's spec.trainers; of any of them where absent."""


class Source(
    ApiModel,
    json_schema_extra=rules(
        discriminator_rule("spec.source", "Checkpoint", "checkpoint"),
        rule(
            "self.type == 'Trainer' || !has(self.trainer)",
            "spec.source.trainer is only for spec.source.type Trainer",
            field=".trainer",
            forbidden=True,
        ),
    ),
):
    """Discriminated union of sources."""

    type: SourceType
    """Which member is set."""
    checkpoint: Checkpoint | None = None
    """For type Checkpoint."""
    trainer: Trainer | None = None
    """For type Trainer; may be left out."""


class Recovery(ApiModel):
    """Where a version that a trainer sent is stored as well."""

    checkpoint: Checkpoint
    """A copy of exactly these weights: whoever reads it holds it against the committed digest."""


class Stored(ApiModel):
    """A version that a trainer sent before, and where it is stored."""

    version: Annotated[int, Field(ge=1, le=2**63 - 1)]
    """Whose weights these are."""
    checkpoint: Checkpoint
    """As spec.recovery.checkpoint had it."""
