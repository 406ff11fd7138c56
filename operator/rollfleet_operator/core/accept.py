"""What is valid, and which WeightVersion is in charge.

The API server's rules are checked again: its CRDs may be older than we are.
A message names the field, says what is wrong, and what to do.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain

from rollfleet_operator.api.rolloutengine import Committed, RolloutEngine, WhenClosedType
from rollfleet_operator.api.volumes import VolumeSource
from rollfleet_operator.api.weightversion import FailureType, PauseMode, SourceType, StrategyType, WeightVersion
from rollfleet_operator.core.objects.pod import engine_config
from rollfleet_operator.core.observed import Settings
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.steps import source_of
from rollfleet_protocol.launch_rules import faults
from rollfleet_protocol.launch_variables import variable_faults

RESERVED_ENV = (
    *("ROLLFLEET_ENGINE_CONFIG", "ROLLFLEET_DEVICES", "ROLLFLEET_POD_UID", "ROLLFLEET_PLACE"),
    *("PYTHONPATH", "PYTHONHOME"),
    *("ASCEND_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
)
# Of each of vLLM's own JSON settings: they go to the pod in its environment. The longest in vLLM-Ascend's docs has 400.
MAX_SETTINGS_BYTES = 16 * 1024
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Verdict:
    """Whether something is accepted, and why not."""

    accepted: bool
    reason: Reason = Reason.ACCEPTED
    message: str = ""


ACCEPTED = Verdict(True)


def _refused(reason: Reason, message: str) -> Verdict:
    return Verdict(False, reason, message)


def judge_fleet(fleet: RolloutEngine, settings: Settings) -> Verdict:
    """Whether engines may be made from this."""
    for field, text in chain(_faults(fleet), _launch_faults(fleet, settings)):
        return _refused(Reason.INVALID_SPEC, f"{field} {text}")
    if not settings.host_path_allowed:
        for field, source in _sources(fleet):
            if source.host_path is not None:
                cure = "use a persistentVolumeClaim, or set the chart's hostPathVolumes.allowed"
                return _refused(Reason.HOST_PATH_NOT_ALLOWED, f"{field}.hostPath is not allowed here: {cure}")
    return ACCEPTED


def _sources(fleet: RolloutEngine) -> Iterator[tuple[str, VolumeSource]]:
    volumes = fleet.spec.volumes
    yield "spec.volumes.model", volumes.model
    if volumes.checkpoints is not None:
        yield "spec.volumes.checkpoints", volumes.checkpoints
    for extra in volumes.extra:
        yield f"spec.volumes.extra[{extra.name}].source", extra.source


def _faults(fleet: RolloutEngine) -> Iterator[tuple[str, str]]:
    spec = fleet.spec
    text = path_fault(spec.model.path, dot=True)
    if text:
        yield "spec.model.path", text
    for field, source in _sources(fleet):
        given = [
            member for member in (source.persistent_volume_claim, source.host_path, source.csi) if member is not None
        ]
        if len(given) != 1:
            yield field, "must have exactly one of persistentVolumeClaim, hostPath, csi"
    yield from _repeated("spec.volumes.extra", "name", [extra.name for extra in spec.volumes.extra])
    yield from _repeated("spec.volumes.extra", "mountPath", [extra.mount_path for extra in spec.volumes.extra])
    yield from _repeated("spec.env", "name", [variable.name for variable in spec.env])
    for variable in spec.env:
        if variable.name in RESERVED_ENV:
            yield f"spec.env[{variable.name}]", "is set by operator and image: remove it"
    when_closed = spec.router.when_closed
    if (when_closed.type is WhenClosedType.HOLD) != (when_closed.hold is not None):
        yield "spec.router.whenClosed.hold", "must be set if, and only if, spec.router.whenClosed.type is Hold"
    for kind in ("limits", "requests"):
        if spec.accelerator.resource in ((spec.resources or {}).get(kind) or {}):
            yield (
                f"spec.resources.{kind}",
                f"must not name {spec.accelerator.resource}: set spec.accelerator.perPod",
            )
    if spec.accelerator.profile is not None and not spec.accelerator.per_pod:
        yield "spec.accelerator.profile", "needs spec.accelerator.perPod above 0"


def _launch_faults(fleet: RolloutEngine, settings: Settings) -> Iterator[tuple[str, str]]:
    """What a launcher would refuse whatever its release, before a pod is made for it."""
    spec = fleet.spec
    for name, value in (
        ("additionalConfig", spec.engine.additional_config),
        ("compilationConfig", spec.engine.compilation_config),
    ):
        if len(json.dumps(value)) > MAX_SETTINGS_BYTES:
            yield f"spec.engine.{name}", f"must not be longer than {MAX_SETTINGS_BYTES} bytes as JSON"
    devices, nodes = spec.parallelism.workers, spec.parallelism.nodes
    if 0 < spec.accelerator.per_pod * nodes < devices:
        text = f"asks for {devices} devices (tensor x pipeline x data), more than spec.accelerator.perPod"
        of_nodes = f" x {nodes} nodes" if nodes > 1 else ""
        yield "spec.parallelism", f"{text} ({spec.accelerator.per_pod}{of_nodes})"
    config = engine_config(fleet, settings)
    yield from faults(config)
    yield from variable_faults(config, {variable.name: variable.value for variable in spec.env})


def _repeated(field: str, key: str, values: list[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        if values.count(value) > 1:
            yield field, f"has two entries with {key} {value!r}: keep one"
            return


def path_fault(path: str, *, dot: bool = False) -> str:
    """What is wrong with a path that must stay below a volume; empty where nothing is."""
    if path.startswith("/"):
        return f"{path!r} must be relative to the volume"
    segments = path.split("/")
    if ".." in segments:
        return f'{path!r} must not hold a ".." segment'
    if dot and path == ".":
        return ""
    if "" in segments or "." in segments:
        return f'{path!r} must not hold empty or "." segments'
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return f"{path!r} must not hold control characters"
    return ""


def in_charge(weight_versions: tuple[WeightVersion, ...], committed: Committed | None) -> WeightVersion | None:
    """The one that brought the committed version, else the oldest that is not being deleted."""
    present = [each for each in weight_versions if each.metadata.deletion_timestamp is None]
    uid = None if committed is None else committed.weight_version_uid
    oldest = min(present, key=_age, default=None)
    return next((each for each in present if each.metadata.uid == uid), oldest)


def _age(weight_version: WeightVersion) -> tuple[datetime, str]:
    return weight_version.metadata.creation_timestamp or LONG_AGO, weight_version.metadata.uid


def judge_weight_version(
    weight_version: WeightVersion, fleet: RolloutEngine, charge: WeightVersion | None, committed: Committed | None
) -> Verdict:
    """Whether this WeightVersion may lead the fleet."""
    if charge is not None and charge.metadata.uid != weight_version.metadata.uid:
        cure = f"raise spec.version of {charge.metadata.name!r}, or delete it"
        who = f"WeightVersion {charge.metadata.name!r} is in charge of {fleet.metadata.name!r}"
        text = f"spec.engineRef.name: {who}: {cure}"
        return _refused(Reason.ANOTHER_WEIGHT_VERSION, text)
    if weight_version.unreadable:
        return _refused(Reason.INVALID_SPEC, weight_version.unreadable)
    return (
        _judge_source(weight_version, fleet)
        or _judge_pause(weight_version)
        or _judge_version(weight_version, committed)
        or _judge_rollback(weight_version, committed)
        or ACCEPTED
    )


def _judge_source(weight_version: WeightVersion, fleet: RolloutEngine) -> Verdict | None:
    spec, fleet_name = weight_version.spec, fleet.metadata.name
    pushed = spec.source.type is SourceType.TRAINER
    if spec.stored is not None and (fault := path_fault(spec.stored.checkpoint.path)):
        return _refused(Reason.INVALID_SPEC, f"spec.stored.checkpoint.path {fault}")
    checkpoint, field = spec.source.checkpoint, "spec.source.checkpoint"
    if pushed:
        fault = _push_fault(weight_version, fleet)
        if fault:
            return _refused(Reason.INVALID_SPEC, fault)
        checkpoint, field = None if spec.recovery is None else spec.recovery.checkpoint, "spec.recovery.checkpoint"
    if checkpoint is None:
        return None if pushed else _refused(Reason.INVALID_SPEC, f"{field} is missing for type Checkpoint")
    if fault := path_fault(checkpoint.path):
        return _refused(Reason.INVALID_SPEC, f"{field}.path {fault}")
    if fleet.spec.volumes.checkpoints is None:
        cure = "set it to the volume that holds the checkpoints"
        text = f"{field} needs spec.volumes.checkpoints of RolloutEngine {fleet_name!r}: {cure}"
        return _refused(Reason.INVALID_SPEC, text)
    return None


def _push_fault(weight_version: WeightVersion, fleet: RolloutEngine) -> str:
    """Why nobody may push this; empty where somebody may."""
    who = f"RolloutEngine {fleet.metadata.name!r}"
    if not fleet.spec.trainers:
        return f"spec.source.type Trainer needs spec.trainers of {who}: name the trainer's ServiceAccount there"
    if fleet.spec.weight_transfer is None:
        return f"spec.source.type Trainer needs spec.weightTransfer of {who}: it says by which backend trainers push"
    if weight_version.spec.strategy.type is not StrategyType.ATOMIC:
        return "spec.strategy.type Rolling is only for spec.source.type Checkpoint: a trainer sends once to all engines"
    return ""


def _judge_pause(weight_version: WeightVersion) -> Verdict | None:
    pause, deadlines = weight_version.spec.pause, weight_version.spec.deadlines
    if pause.mode is not PauseMode.WAIT or pause.drain_timeout_seconds < deadlines.quiesce_seconds:
        return None
    text = f"must be less than spec.deadlines.quiesceSeconds ({deadlines.quiesce_seconds})"
    return _refused(Reason.INVALID_SPEC, f"spec.pause.drainTimeoutSeconds {text}")


def _judge_rollback(weight_version: WeightVersion, committed: Committed | None) -> Verdict | None:
    """Rollback is a promise: what it goes back to must be stored."""
    if weight_version.spec.on_failure.type is not FailureType.ROLLBACK or committed is None:
        return None
    if committed.version == weight_version.spec.version or source_of(committed) is not None:
        return None
    cure = "set type to Retry or Hold"
    text = f"spec.onFailure.type is Rollback, and the committed version {committed.version} is stored nowhere: {cure}"
    return _refused(Reason.VERSION_NOT_STORED, text)


def _judge_version(weight_version: WeightVersion, committed: Committed | None) -> Verdict | None:
    version = weight_version.spec.version
    if committed is None or version > committed.version:
        return None
    if version == committed.version and committed.weight_version_uid == weight_version.metadata.uid:
        return None
    text = f"spec.version {version} must exceed {committed.version}, which the fleet has committed"
    return _refused(Reason.VERSION_NOT_HIGHER, text)


def judge_orphan(weight_version: WeightVersion) -> Verdict:
    """A WeightVersion whose fleet does not exist."""
    text = f"spec.engineRef.name: there is no RolloutEngine {weight_version.spec.engine_ref.name!r} in this namespace"
    return _refused(Reason.ENGINE_NOT_FOUND, text)
