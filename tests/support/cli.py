"""Small objects for the command line's tests."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rollfleet_operator.api.meta import Condition, ConditionStatus
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
UID = "uid-qwen"
CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}


def make_condition(kind: str, *, holds: bool = True, reason: str = "Because", message: str = "") -> Condition:
    status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=NOW)


def make_fleet(name: str = "qwen", namespace: str = "rl", **status: Any) -> RolloutEngine:
    return RolloutEngine.model_validate(
        {
            "metadata": {"name": name, "namespace": namespace, "uid": UID},
            "spec": {
                "replicas": 2,
                "image": "engine:1",
                "model": {"path": "base", "servedName": "policy"},
                "volumes": {"model": CLAIM},
            },
            "status": status,
        }
    )


def make_version(
    version: int,
    *,
    name: str = "qwen-policy",
    fleet: str = "qwen",
    generation: int = 1,
    age: timedelta = timedelta(0),
    **status: Any,
) -> WeightVersion:
    return WeightVersion.model_validate(
        {
            "metadata": {
                "name": name,
                "namespace": "rl",
                "generation": generation,
                "creationTimestamp": NOW - age,
            },
            "spec": {
                "engineRef": {"name": fleet},
                "version": version,
                "source": {"type": "Checkpoint", "checkpoint": {"path": f"step-{version}"}},
            },
            "status": {"observed_generation": generation, "version": version, **status},
        }
    )


def make_pod(
    fleet: str,
    ordinal: int,
    *,
    uid: str = UID,
    phase: str = "Running",
    serving: bool = True,
    deleting: bool = False,
    node: str = "node-0",
    restarts: int = 0,
) -> dict[str, Any]:
    labels = {"rollfleet.io/fleet": fleet, "rollfleet.io/engine": str(ordinal), "rollfleet.io/component": "engine"}
    metadata: dict[str, Any] = {
        "name": f"{fleet}-{ordinal}-0-abcde",
        "namespace": "rl",
        "labels": labels | ({"rollfleet.io/serving": "true"} if serving else {}),
        "ownerReferences": [{"kind": "RolloutEngine", "name": fleet, "uid": uid, "controller": True}],
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    return {
        "metadata": metadata,
        "spec": {"nodeName": node},
        "status": {"phase": phase, "containerStatuses": [{"name": "engine", "restartCount": restarts}]},
    }
