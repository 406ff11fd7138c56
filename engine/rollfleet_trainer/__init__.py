"""The trainer's side of a push: asks a fleet for a version, and sends its weights (docs/trainer.md).

Names are imported when they are used: a sender alone needs neither the kubernetes client nor what begins an update.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollfleet_trainer.blocking import BlockingFleet
    from rollfleet_trainer.checkpoints import Published
    from rollfleet_trainer.errors import (
        AnotherSender,
        ApiServerError,
        CheckpointExistsError,
        CheckpointNotReadyError,
        ConflictError,
        DeniedError,
        EngineProblem,
        FleetNeedsWeights,
        GuardRefusedError,
        NotFoundError,
        NotPossible,
        PublishError,
        SenderLost,
        Superseded,
        TrainerError,
        TransferError,
        UnauthorizedError,
        UnreachableError,
        UpdateFailed,
    )
    from rollfleet_trainer.fleet import RolloutFleet
    from rollfleet_trainer.host import TensorError
    from rollfleet_trainer.push import Push
    from rollfleet_trainer.rollout_errors import (
        BadAnswerError,
        ClosedError,
        NotServedError,
        OverdueError,
        RefusedError,
        RolloutError,
        RoutedExpertsError,
        TraceError,
        UnansweredError,
        VersionPassedError,
    )
    from rollfleet_trainer.updates import Progress, ProgressLine, Update

__all__ = [
    "AnotherSender",
    "ApiServerError",
    "BadAnswerError",
    "BlockingFleet",
    "CheckpointExistsError",
    "CheckpointNotReadyError",
    "ClosedError",
    "ConflictError",
    "DeniedError",
    "EngineProblem",
    "FleetNeedsWeights",
    "GuardRefusedError",
    "NotFoundError",
    "NotPossible",
    "NotServedError",
    "OverdueError",
    "Progress",
    "ProgressLine",
    "PublishError",
    "Published",
    "Push",
    "RefusedError",
    "RolloutError",
    "RolloutFleet",
    "RoutedExpertsError",
    "SenderLost",
    "Superseded",
    "TensorError",
    "TraceError",
    "TrainerError",
    "TransferError",
    "UnansweredError",
    "UnauthorizedError",
    "UnreachableError",
    "Update",
    "UpdateFailed",
    "VersionPassedError",
]
_MODULES = {
    "BlockingFleet": "blocking",
    "Published": "checkpoints",
    "RolloutFleet": "fleet",
    "TensorError": "host",
    "Push": "push",
    **dict.fromkeys(("Progress", "ProgressLine", "Update"), "updates"),
    **dict.fromkeys(
        (
            "BadAnswerError",
            "ClosedError",
            "NotServedError",
            "OverdueError",
            "RefusedError",
            "RolloutError",
            "RoutedExpertsError",
            "TraceError",
            "UnansweredError",
            "VersionPassedError",
        ),
        "rollout_errors",
    ),
}  # all others: errors

logging.getLogger("rollfleet.trainer").addHandler(logging.NullHandler())  # no output unless the program asks for it


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
