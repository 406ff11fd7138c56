"""Pods as the API server tells them."""

from typing import Any

from rollfleet_operator.api.meta import ANNOTATION_TEMPLATE, LABEL_COMPONENT, LABEL_ENGINE, LABEL_FLEET


def make_pod(
    *,
    uid: str = "p-1",
    name: str = "qwen-0-0-abcde",
    fleet: str = "qwen",
    namespace: str = "rl",
    revision: int = 1,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    container: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod of an engine, running at 198.18.64.7 unless the status says otherwise."""
    running = {"name": "engine", "state": {"running": {}}, "containerID": "c-1", "restartCount": 0}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "resourceVersion": str(revision),
            "creationTimestamp": "2026-11-29T12:00:00Z",
            "ownerReferences": [{"kind": "RolloutEngine", "name": fleet, "uid": "f-1", "controller": True}],
            "labels": {LABEL_FLEET: fleet, LABEL_COMPONENT: "engine", LABEL_ENGINE: "0"} | (labels or {}),
            "annotations": {ANNOTATION_TEMPLATE: "t-1"} | (annotations or {}),
        },
        "spec": {"nodeName": "node-0"},
        "status": {
            "phase": "Running",
            "podIP": "198.18.64.7",
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [running | (container or {})],
        }
        | status,
    }
