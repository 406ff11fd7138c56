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
        FleetNeedsWeights,
        NotPossible,
        SenderLost,
        Superseded,
        TrainerError,
        TransferError,
        UpdateFailed,
    )
    from rollfleet_trainer.fleet import RolloutFleet
    from rollfleet_trainer.push import Push
    from rollfleet_trainer.updates import Progress, ProgressLine, Update

__all__ = [
    "AnotherSender",
    "BlockingFleet",
    "FleetNeedsWeights",
    "NotPossible",
    "Progress",
    "ProgressLine",
    "Published",
    "Push",
    "RolloutFleet",
    "SenderLost",
    "Superseded",
    "TrainerError",
    "TransferError",
    "Update",
    "UpdateFailed",
]
_MODULES = {
    "BlockingFleet": "blocking",
    "Published": "checkpoints",
    "RolloutFleet": "fleet",
    **dict.fromkeys(("Progress", "ProgressLine", "Update"), "updates"),
    "Push": "push",
}

logging.getLogger("rollfleet.trainer").addHandler(logging.NullHandler())  # no output unless the program asks for it


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
