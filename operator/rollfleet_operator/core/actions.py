"""What a pass wants done: plain data, carried out by the runtime in the order of the fields of Decision."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersionStatus
from rollfleet_protocol.commands import Command


@dataclass(frozen=True)
class ApplyObject:
    """Server-side apply of a child (not a pod): the complete object."""

    manifest: dict[str, Any]
    content_hash: str


@dataclass(frozen=True)
class DeleteObject:
    """Delete a child that is no longer wanted."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True)
class CreatePod:
    """Create an engine's pod; AlreadyExists means that it was done before."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod (precondition on the uid)."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True)
class StopPod:
    """Let exactly this pod run no more, and keep it for diagnosis."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True)
class LabelPod:
    """Set or remove the serving label."""

    name: str
    uid: str
    serving: bool


@dataclass(frozen=True)
class GuardCall:
    """Send a command to the guard of this pod. Calls of one pass are sent at once, concurrently."""

    pod: str
    pod_uid: str
    command: Command


@dataclass(frozen=True)
class EngineStatusWrite:
    """Replace RolloutEngine.status, with the resourceVersion that was observed."""

    status: RolloutEngineStatus


@dataclass(frozen=True)
class WeightVersionStatusWrite:
    """Replace WeightVersion.status, with the resourceVersion that was observed."""

    name: str
    status: WeightVersionStatus


@dataclass(frozen=True)
class Event:
    """A change worth telling a person; recorded once per (object, reason, message)."""

    kind: str  # RolloutEngine | WeightVersion
    name: str
    type: str  # Normal | Warning
    reason: str
    message: str


Action = ApplyObject | DeleteObject | CreatePod | DeletePod | StopPod | LabelPod | GuardCall


@dataclass(frozen=True)
class Decision:
    """The outcome of `plan`.

    The runtime writes the fleet's status first and goes on only if that write won (it is the fence between operators);
    a fleet status that is unchanged is None. Then actions, then the WeightVersions' status, then events. `wake_at` is
    when to look again if nothing happens before; None means never (the resync looks anyway).
    """

    fleet_status: EngineStatusWrite | None = None
    actions: tuple[Action, ...] = ()
    weight_version_statuses: tuple[WeightVersionStatusWrite, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: datetime | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)  # one line each: why; for the log
