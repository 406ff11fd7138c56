"""Builders of what decisions look at: each gives a whole, valid value, and takes what a test is about."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rollfleet_operator.api.meta import ObjectMeta
from rollfleet_operator.api.rolloutengine import (
    Accelerator,
    Committed,
    Model,
    RolloutEngine,
    RolloutEngineSpec,
    RolloutEngineStatus,
)
from rollfleet_operator.api.volumes import Volumes, VolumeSource
from rollfleet_operator.api.weightversion import (
    Checkpoint,
    EngineRef,
    Source,
    SourceType,
    WeightVersion,
    WeightVersionSpec,
    WeightVersionStatus,
)
from rollfleet_operator.core.fitness import NEEDED
from rollfleet_operator.core.objects.pod import template_hash
from rollfleet_operator.core.observed import ContainerState, GuardView, Observed, PodView, Settings
from rollfleet_protocol.state import (
    EngineState,
    Facts,
    Gate,
    Operation,
    OperationName,
    OperationStatus,
    ProbeResult,
    Weights,
    WeightsState,
)

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
FLEET = "qwen"
NAMESPACE = "rl"
FLEET_UID = "fleet-uid"
WEIGHT_VERSION = "qwen-policy"
WEIGHT_VERSION_UID = "wv-uid"
TOKENS = (1, 2, 3, 5, 7, 11)
LOGPROBS = (-1.0, -2.0, -0.5, -3.0, -0.25)
FACTS = Facts(
    guard_version="0.1.0",
    engine="simulator",
    engine_version="0.1.0",
    model="/rollfleet/model/Qwen3",
    world_size=1,
    capabilities=(
        "source/Checkpoint",
        "source/Trainer",
        "backend/gloo",
        *NEEDED,
        "pause/abort",
        "pause/wait",
        "pause/keep",
    ),
)


def digest_of(path: str) -> str:
    """The digest that a checkpoint of this path has in tests."""
    return f"sha256:{path}"


def make_settings(**changes: Any) -> Settings:
    """An operator."""
    settings = Settings(
        operator_subject="system:serviceaccount:rollfleet:rollfleet-operator",
        operator_uid="operator-uid",
        router_image="registry.example/vllm-router:0.1.17",
        host_path_allowed=False,
    )
    return replace(settings, **changes)


def make_claim(name: str) -> VolumeSource:
    """A volume."""
    return VolumeSource(persistent_volume_claim={"claimName": name})


def make_fleet(*, status: RolloutEngineStatus | None = None, generation: int = 1, **spec: Any) -> RolloutEngine:
    """A fleet of two engines with both volumes."""
    given: dict[str, Any] = {
        "replicas": 2,
        "image": "registry.example/engine:1",
        "model": Model(path="Qwen3", served_name="policy"),
        "volumes": Volumes(model=make_claim("models"), checkpoints=make_claim("checkpoints")),
        "accelerator": Accelerator(per_pod=1),
    }
    return RolloutEngine(
        metadata=ObjectMeta(
            name=FLEET,
            namespace=NAMESPACE,
            uid=FLEET_UID,
            generation=generation,
            resource_version="1",
            creation_timestamp=NOW,
        ),
        spec=RolloutEngineSpec(**(given | spec)),
        status=status or RolloutEngineStatus(),
    )


def make_committed(version: int = 0, **changes: Any) -> Committed:
    """The commit record of a version; its checkpoint is step-<version>."""
    path = f"step-{version}" if version else None
    given: dict[str, Any] = {
        "version": version,
        "digest": digest_of(path) if path else None,
        "checkpoint": path,
        "weight_version_uid": WEIGHT_VERSION_UID if version else None,
        "time": NOW,
    }
    return Committed(**(given | changes))


def make_weight_version(
    version: int = 1,
    *,
    path: str | None = None,
    name: str = WEIGHT_VERSION,
    uid: str = WEIGHT_VERSION_UID,
    created: datetime = NOW,
    status: WeightVersionStatus | None = None,
    **spec: Any,
) -> WeightVersion:
    """A WeightVersion of the fleet; its checkpoint is step-<version>."""
    source = Source(type=SourceType.CHECKPOINT, checkpoint=Checkpoint(path=path or f"step-{version}"))
    return WeightVersion(
        metadata=ObjectMeta(
            name=name, namespace=NAMESPACE, uid=uid, generation=1, resource_version="1", creation_timestamp=created
        ),
        spec=WeightVersionSpec(**({"engine_ref": EngineRef(name=FLEET), "version": version, "source": source} | spec)),
        status=status or WeightVersionStatus(),
    )


def make_pod(ordinal: int = 0, **changes: Any) -> PodView:
    """A pod whose engine runs, in the serving set."""
    given: dict[str, Any] = {
        "name": f"{FLEET}-{ordinal}-0-abc{ordinal}",
        "uid": f"pod-{ordinal}",
        "ordinal": ordinal,
        "created": NOW,
        "template_hash": template_hash(make_fleet(), make_settings()),
        "serving_label": True,
        "phase": "Running",
        "ip": f"198.51.100.{ordinal + 1}",
        "node": "node-1",
        "ready": True,
        "container": ContainerState.RUNNING,
        "started": True,
    }
    return PodView(**(given | changes))


def make_weights(version: int | None = 0, state: WeightsState = WeightsState.VERIFIED) -> Weights:
    """Weights of a version as its checkpoint gives them."""
    if not version:
        return Weights(state=state, version=version, source="model")
    path = f"step-{version}"
    return Weights(state=state, version=version, digest=digest_of(path), source=f"checkpoint:{path}")


def make_probe(version: int, epoch: int = 1, logprobs: tuple[float, ...] = LOGPROBS) -> ProbeResult:
    """An answer to the probe."""
    return ProbeResult(epoch=epoch, version=version, tokens=TOKENS, logprobs=logprobs, seconds=0.01)


def make_operation(name: OperationName, status: OperationStatus, **changes: Any) -> Operation:
    """The newest operation of a guard."""
    return Operation(**({"name": name, "epoch": 1, "version": 0, "status": status, "seconds": 1.0} | changes))


def make_state(version: int | None = 0, *, open: bool = True, **changes: Any) -> EngineState:  # noqa: A002
    """What a guard says: by default open and verified at the version."""
    given: dict[str, Any] = {
        "sequence": 1,
        "incarnation": "inc-1",
        "facts": FACTS,
        "alive": True,
        "gate": Gate.OPEN if open else Gate.CLOSED,
        "closed_reason": "" if open else "Updating",
        "ready": True,
        "epoch": 1,
        "weights": make_weights(version),
        "probe": None if version is None else make_probe(version),
    }
    return EngineState(**(given | changes))


def make_guard(state: EngineState | None = None, **changes: Any) -> GuardView:
    """A guard that answers."""
    given: dict[str, Any] = {"state": state or make_state(), "reachable": True, "last_contact": NOW}
    return GuardView(**(given | changes))


def make_observed(fleet: RolloutEngine | None = None, **changes: Any) -> Observed:
    """A snapshot. Without pods and guards: as many as replicas, all well at the committed version, children applied."""
    fleet = fleet or make_fleet()
    settings = changes.pop("settings", make_settings())
    version = fleet.status.committed.version if fleet.status.committed else 0
    pods = changes.pop("pods", None)
    if pods is None:
        made_from = template_hash(fleet, settings)
        pods = tuple(make_pod(ordinal, template_hash=made_from) for ordinal in range(fleet.spec.replicas))
    guards = changes.pop("guards", None)
    if guards is None:
        guards = {pod.uid: make_guard(make_state(version, incarnation=f"inc-{pod.ordinal}")) for pod in pods}
    given: dict[str, Any] = {"weight_versions": (), "ca_bundle": "Q0E=", "children": {}}
    return Observed(fleet=fleet, pods=pods, guards=guards, settings=settings, **(given | changes))
