"""How a fleet moves to a version, and what follows a failure: parts of WeightVersion.spec."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel
from rollfleet_operator.api.rules import rule, rules

DEFAULT_ATTEMPTS = 3


class StrategyType(StrEnum):
    """How the fleet moves."""

    ATOMIC = "Atomic"
    ROLLING = "Rolling"


class Rolling(ApiModel):
    """How fast a fleet rolls."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Engines that are moved at once; never so many that fewer than spec.minServing serve."""


class Strategy(
    ApiModel,
    json_schema_extra=rules(
        rule(
            "self.type == 'Rolling' || !has(self.rolling)",
            "spec.strategy.rolling is only for spec.strategy.type Rolling",
            field=".rolling",
            forbidden=True,
        )
    ),
):
    """Discriminated union of strategies."""

    type: StrategyType = StrategyType.ATOMIC
    """Atomic: the fleet serves the old version, then nothing, then the new one; never both. Rolling: engines move batch
    by batch and both versions answer meanwhile (condition MixedVersions); each answer says which."""
    rolling: Rolling | None = None
    """For type Rolling."""

    @property
    def max_unavailable(self) -> int:
        """Engines that are moved at once."""
        return (self.rolling or Rolling()).max_unavailable


class FailureType(StrEnum):
    """What follows a failure after weights were touched."""

    RETRY = "Retry"
    ROLLBACK = "Rollback"
    HOLD = "Hold"


class OnFailure(
    ApiModel,
    json_schema_extra=rules(
        rule(
            "self.type == 'Retry' || !has(self.maxAttempts)",
            "spec.onFailure.maxAttempts is only for spec.onFailure.type Retry",
            field=".maxAttempts",
            forbidden=True,
        )
    ),
):
    """Discriminated union: what follows a failure after weights were touched. Before that the old version reopens."""

    type: FailureType = FailureType.RETRY
    """Retry: again from Preparing with the members that are there then, the fleet closed meanwhile, after a wait that
    doubles from 1 s to 30 s and is part of prepareSeconds; after the last attempt the committed version is restored if
    it is stored. CoverageFailed of a push is not tried again: the same tensors would not fit the model either. Nor are
    weights that all engines agree upon, and answer the probe under unlike what the trainer expects.
    Rollback: Failed at once, the committed version is restored from its checkpoint; accepted only if it has one, or is
    version 0. Hold: Failed, and what was touched stays as it is, closed, until a higher version, a new retryRequest or
    the deletion of this object."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    """For type Retry: attempts in all; 3 where absent."""

    @property
    def attempts(self) -> int:
        """Attempts in all."""
        if self.type is not FailureType.RETRY:
            return 1
        return DEFAULT_ATTEMPTS if self.max_attempts is None else self.max_attempts
