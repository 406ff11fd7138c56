"""From the JSON of pods and nodes to the views that decisions look at."""

import re
from datetime import datetime
from typing import Any

from rollfleet_operator.api.meta import (
    ANNOTATION_LEADER,
    ANNOTATION_STOPPED,
    ANNOTATION_TEMPLATE,
    LABEL_SERVING,
    node_of,
    ordinal_of,
)
from rollfleet_operator.clients.errors import clipped
from rollfleet_operator.core.observed import ContainerState, NodeView, PodView
from rollfleet_operator.core.vanished import TAINT
from rollfleet_operator.ports import Manifest
from rollfleet_protocol.termination import summary

ENGINE_CONTAINER = "engine"
UNSCHEDULABLE = "Unschedulable"  # v1.PodReasonUnschedulable
DEFAULT_GRACE_S = 30  # Kubernetes' own
CONTAINER_ID = re.compile(r"\b[0-9a-f]{64}\b")


def pod_view(pod: Manifest) -> PodView:
    """The view of one engine's pod."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    container = _engine_status(status)
    state = _container_state(container)
    last = _last_termination(container)
    # What the kubelet waits for says nothing of the cause: the engine's own last words stand beside it.
    message = "; ".join(text for text in (_words(_waiting(container)), _last_words(last)) if text)
    scheduled = _condition(status, "PodScheduled")
    ready = _condition(status, "Ready")
    is_ready = ready.get("status") == "True"
    unschedulable = scheduled.get("status") == "False"
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        ordinal=ordinal_of(metadata.get("labels") or {}),
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        template_hash=(metadata.get("annotations") or {}).get(ANNOTATION_TEMPLATE, ""),
        serving_label=(metadata.get("labels") or {}).get(LABEL_SERVING) == "true",
        phase=status.get("phase", "Unknown"),
        ip=status.get("podIP", ""),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        deleting="deletionTimestamp" in metadata,
        deleted_by=_time(metadata.get("deletionTimestamp")),
        ready=is_ready,
        ready_since=_time(ready.get("lastTransitionTime")) if is_ready else None,
        failed_from=_time(last.get("startedAt")),
        container=state,
        container_id=container.get("containerID", ""),
        restarts=container.get("restartCount", 0),
        exit_code=last.get("exitCode"),
        message=clipped(_schedulers_words(scheduled) if unschedulable else message or status.get("message", "")),
        unschedulable=unschedulable,
        started=container.get("started") is not False,
        running_since=_time(((container.get("state") or {}).get("running") or {}).get("startedAt")),
        stopped=(metadata.get("annotations") or {}).get(ANNOTATION_STOPPED, ""),
        node_index=node_of(metadata["name"]),
        leader=(metadata.get("annotations") or {}).get(ANNOTATION_LEADER, ""),
        grace_s=(pod.get("spec") or {}).get("terminationGracePeriodSeconds") or DEFAULT_GRACE_S,
    )


def node_view(node: Manifest) -> NodeView:
    """The view of a node."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = [one for one in conditions if one.get("type") == "Ready" and one.get("status") == "True"]
    since, heard = (ready[0].get(name) if ready else None for name in ("lastTransitionTime", "lastHeartbeatTime"))
    taints = (node.get("spec") or {}).get("taints") or ()
    return NodeView(
        name=node["metadata"]["name"],
        ready_since=_time(since),
        heard=_time(heard),
        out_of_service=any(taint.get("key") == TAINT for taint in taints),
    )


def _schedulers_words(condition: Manifest) -> str:
    """Without the reason, where it only says again that there is no place."""
    return (
        condition["message"]
        if condition.get("reason") == UNSCHEDULABLE and condition.get("message")
        else _words(condition)
    )


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _engine_status(status: Manifest) -> Manifest:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == ENGINE_CONTAINER:
            return dict(container)
    return {}


def _container_state(container: Manifest) -> ContainerState:
    state: dict[str, Any] = container.get("state") or {}
    known = {
        "running": ContainerState.RUNNING,
        "terminated": ContainerState.TERMINATED,
        "waiting": ContainerState.WAITING,
    }
    return next((known[name] for name in known if name in state), ContainerState.UNKNOWN)


def _waiting(container: Manifest) -> Manifest:
    return dict((container.get("state") or {}).get("waiting") or {})


def _last_termination(container: Manifest) -> Manifest:
    for name in ("state", "lastState"):
        terminated = (container.get(name) or {}).get("terminated")
        if terminated:
            return dict(terminated)
    return {}


def _last_words(terminated: Manifest) -> str:
    """Reason and the launcher's message, or whatever else stands in its place."""
    return _words({**terminated, "message": summary(terminated.get("message", ""))})


def _words(part: Manifest) -> str:
    """Reason and message, as far as they are there. Ids of containers differ in each try, and are no news."""
    text = ": ".join(text for text in (part.get("reason", ""), part.get("message", "")) if text)
    return CONTAINER_ID.sub("…", text)


def _condition(status: Manifest, kind: str) -> Manifest:
    return next((dict(entry) for entry in status.get("conditions") or () if entry.get("type") == kind), {})
