"""The errors of a trainer's dealings with a fleet.

TrainerError
├── TransferError            the engines did not take the weights
│   └── GuardRefusedError    one guard refused one call, with its reason
├── UpdateFailed             the operator ended the update without the version; names engines and their words
│   └── FleetNeedsWeights    and no engine holds the version before: the fleet stays closed until it gets weights
├── Superseded               a higher version was asked for meanwhile
├── SenderLost               this process is no longer the one that sends
├── AnotherSender            another process holds the fleet's sender Lease, and renews it
├── NotPossible              what was asked for cannot be; nothing was done
├── PublishError             no checkpoint was published, or none can be adopted
└── ApiServerError           the API server refused, or gave no answer
    ├── UnreachableError     no answer, or one that says to come again
    ├── NotFoundError        no such object
    ├── ConflictError        somebody else wrote first
    └── DeniedError          this process may not
        └── UnauthorizedError its token or certificate is not accepted

Messages name cause and remedy and carry the other side's own words. All of them can be pickled, for sharded trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollfleet_protocol.refusals import RefusalReason


class TrainerError(Exception):
    """Anything that ends what a trainer wanted of a fleet."""


class TransferError(TrainerError):
    """The weights were not taken. The message names the engine and the phase, and tells its own words."""


class GuardRefusedError(TransferError):
    """A guard refused a call."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class EngineProblem:
    """An engine that does not hold the version, in its own words."""

    name: str  # its pod
    reason: str  # in CamelCase
    message: str


class UpdateFailed(TrainerError):  # noqa: N818 - the contract's name
    """The update ended without the version. `reason` is the operator's, in CamelCase."""

    def __init__(self, reason: str, message: str, engines: Sequence[EngineProblem] = ()) -> None:
        super().__init__(reason, message, tuple(engines))
        self.reason = reason
        self.message = message
        self.engines = tuple(engines)

    def __str__(self) -> str:
        told = "".join(f"\n  {each.name}: {each.reason}: {each.message}" for each in self.engines)
        return f"{self.reason}: {self.message}{told}"


class FleetNeedsWeights(UpdateFailed):
    """No engine holds the version before, and it is stored nowhere: send a version, or name a checkpoint."""


class Superseded(TrainerError):  # noqa: N818 - the contract's name
    """A higher version was asked for before this one was committed."""


class SenderLost(TrainerError):  # noqa: N818 - the contract's name
    """This process is no longer the fleet's sender: its Lease was not renewed in time, or is another's."""


class AnotherSender(TrainerError):  # noqa: N818 - named by cause
    """Another process holds the Lease and renews it. `holder` is <ServiceAccount>/<instance>."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message, holder)
        self.holder = holder

    def __str__(self) -> str:
        return str(self.args[0])


class NotPossible(TrainerError):  # noqa: N818 - named by cause
    """What was asked for cannot be. Nothing was done."""


class ApiServerError(TrainerError):
    """What the API server made of a request."""


class UnreachableError(ApiServerError):
    """No answer, or one that says to come again."""


class NotFoundError(ApiServerError):
    """No such object."""


class ConflictError(ApiServerError):
    """Somebody else wrote first."""


class DeniedError(ApiServerError):
    """This process may not."""


class UnauthorizedError(DeniedError):
    """The API server does not accept this process's token or certificate (HTTP 401). No matter of rights."""


class PublishError(TrainerError):
    """No checkpoint was published; the message names the file or tensor, the cause, and where known the cure.

    Nothing that readers could take for a checkpoint is left behind.
    """


class CheckpointExistsError(PublishError):
    """There is another checkpoint of that name. It is never overwritten: engines may be reading it."""


class CheckpointNotReadyError(PublishError):
    """A directory that another trainer writes did not become whole in time."""
