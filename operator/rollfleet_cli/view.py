"""What is worth telling of a fleet: pure functions from its objects to rows of text."""

from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rollfleet_operator.api.meta import LABEL_SERVING, Condition, ConditionStatus, node_of, ordinal_of
from rollfleet_operator.api.rolloutengine import Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import Phase, WeightVersion
from rollfleet_operator.core.moves import STEPS

# While one of these lasts, an engine that is not told of apart does what the whole fleet does.
MOVING = (Phase.PREPARING, Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING)


@dataclass(frozen=True)
class EngineView:
    """One engine."""

    name: str
    ordinal: int
    state: str
    since: datetime | None = None
    node: str = ""
    restarts: int = 0
    message: str = ""


@dataclass(frozen=True)
class HistoryView:
    """One ended update."""

    version: int
    step: str
    checkpoint: str
    outcome: str
    digest: str
    paused_seconds: str
    time: datetime
    message: str


@dataclass(frozen=True)
class UpdateView:
    """The WeightVersion of a fleet."""

    name: str
    version: int  # asked for
    step: str
    phase: str
    done: int
    total: int
    phase_started: datetime | None
    paused_seconds: str
    message: str  # why it does not move, or failed
    is_current: bool  # whether the operator has seen the newest spec
    held_up: tuple[tuple[str, str, str], ...] = ()  # (engine, reason, the engine's own text)
    retry_pending: bool = False  # a retry was asked for, and the operator has not begun it
    refused: str = ""  # why the operator does not accept the newest spec
    history: tuple[HistoryView, ...] = ()  # oldest first


@dataclass(frozen=True)
class FleetView:
    """One fleet."""

    namespace: str
    name: str
    desired: int
    ready: int
    serving: int
    committed: int | None
    state: str  # reason of Available
    message: str
    endpoint: str
    engines: tuple[EngineView, ...] = ()
    engines_known: bool = True  # False: the user may not list pods, so only those not well are here
    update: UpdateView | None = None
    last_failure: str = ""
    problems: tuple[str, ...] = field(default_factory=tuple)  # conditions that ask for somebody

    def to_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return asdict(self)


def build_view(fleet: RolloutEngine, versions: list[WeightVersion], pods: list[dict[str, Any]] | None) -> FleetView:
    """All that can be said of a fleet now. `versions` and `pods` may hold those of others."""
    version = choose_version(fleet, versions)
    update = None if version is None else _update(version)
    status = fleet.status
    available = find(status.conditions, "Available")
    return FleetView(
        namespace=fleet.metadata.namespace,
        name=fleet.metadata.name,
        desired=fleet.spec.replicas,
        ready=status.ready_replicas,
        serving=status.serving_replicas,
        committed=None if status.committed is None else status.committed.version,
        state=available.reason if available else "NotObserved",
        message=available.message if available else "the operator has not looked at this fleet yet: is it running?",
        endpoint=status.endpoint,
        engines=_engines(fleet, update, pods),
        engines_known=pods is not None,
        update=update,
        last_failure=_last_failure(fleet, update),
        problems=_problems(fleet, version),
    )


def choose_version(fleet: RolloutEngine, versions: list[WeightVersion]) -> WeightVersion | None:
    """The WeightVersion in charge: the accepted one, else the oldest that names the fleet."""
    place = (fleet.metadata.namespace, fleet.metadata.name)
    ours = [v for v in versions if (v.metadata.namespace, v.spec.engine_ref.name) == place]
    accepted = [v for v in ours if holds(find(v.status.conditions, "Accepted"))]
    by_age = sorted(accepted or ours, key=lambda v: (str(v.metadata.creation_timestamp), v.metadata.name))
    return by_age[0] if by_age else None


def find(conditions: tuple[Condition, ...], kind: str) -> Condition | None:
    """The condition of a type."""
    return next((condition for condition in conditions if condition.type == kind), None)


def holds(condition: Condition | None) -> bool:
    """Whether it is there and True."""
    return condition is not None and condition.status is ConditionStatus.TRUE


def _update(version: WeightVersion) -> UpdateView:
    status = version.status
    accepted, active = find(status.conditions, "Accepted"), find(status.conditions, "Active")
    failing = next((c for c in (accepted, active) if c is not None and not holds(c)), None)
    return UpdateView(
        name=version.metadata.name,
        version=version.spec.version,
        step=version.spec.step,
        phase=status.phase.value,
        done=status.progress.done,
        total=status.progress.total,
        phase_started=status.phase_started_at,
        paused_seconds=status.paused_seconds,
        message=failing.message if failing else "",
        is_current=version.metadata.generation <= status.observed_generation,
        held_up=tuple((each.name, each.reason, each.message) for each in status.progress.failed),
        retry_pending=version.spec.retry_request not in ("", status.retry_request),
        refused=_refusal(version, accepted),
        history=history_of(version),
    )


def history_of(version: WeightVersion) -> tuple[HistoryView, ...]:
    """Ended updates, oldest first."""
    return tuple(
        HistoryView(
            version=entry.version,
            step=entry.step,
            checkpoint=entry.checkpoint,
            outcome=entry.outcome.value,
            digest=entry.digest,
            paused_seconds=entry.paused_seconds,
            time=entry.time,
            message=entry.message,
        )
        for entry in version.status.history
    )


def _refusal(version: WeightVersion, accepted: Condition | None) -> str:
    """Of the spec as it is now, not of an older one."""
    if accepted is None or holds(accepted) or accepted.observed_generation < version.metadata.generation:
        return ""
    return f"{accepted.reason}: {accepted.message}"


def _engines(
    fleet: RolloutEngine, update: UpdateView | None, pods: list[dict[str, Any]] | None
) -> tuple[EngineView, ...]:
    """Every engine's (leading) pod, with what status says of it; without pods, only those that status tells of."""
    told = {detail.name: detail for detail in fleet.status.engines.details}
    rows = {
        detail.name: EngineView(detail.name, detail.ordinal, detail.state, detail.since, message=detail.message)
        for detail in told.values()
    }
    place = (fleet.metadata.namespace, fleet.metadata.uid)
    for pod in pods or []:
        if _owner(pod) == place and node_of(pod["metadata"]["name"]) == 0:
            row = _from_pod(pod, update)
            detail = rows.get(row.name)
            rows[row.name] = (
                EngineView(row.name, row.ordinal, detail.state, detail.since, row.node, row.restarts, detail.message)
                if detail
                else row
            )
    return tuple(sorted(rows.values(), key=lambda row: (row.ordinal, row.name)))


def _owner(pod: dict[str, Any]) -> tuple[str, str]:
    owners = pod["metadata"].get("ownerReferences") or [{}]
    return pod["metadata"]["namespace"], owners[0].get("uid", "")


def _from_pod(pod: dict[str, Any], update: UpdateView | None) -> EngineView:
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    containers = status.get("containerStatuses") or []
    moving = update.held_up if update and update.phase in MOVING else ()
    phase = update.phase if update else ""
    held_up = {name: text if reason == phase else f"{reason}: {text}" for name, reason, text in moving}
    return EngineView(
        name=metadata["name"],
        ordinal=ordinal_of(labels),
        state=_pod_state(pod, labels, update),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        restarts=sum(int(each.get("restartCount", 0)) for each in containers),
        message=held_up.get(metadata["name"], ""),
    )


def _pod_state(pod: dict[str, Any], labels: dict[str, str], update: UpdateView | None) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    phase = (pod.get("status") or {}).get("phase", "Unknown")
    if phase != "Running":
        return str(phase)
    if labels.get(LABEL_SERVING) != "true":
        return "NotServing"
    return update.phase if update and update.phase in MOVING else "Serving"


def _last_failure(fleet: RolloutEngine, update: UpdateView | None) -> str:
    """The newest failure in the words of who failed, as long as nothing has succeeded since."""
    finished = fleet.status.last_finished
    if finished is None or finished.outcome is not Outcome.FAILED:
        return ""
    held_up = update.held_up if update else ()
    told = finished.message
    failing = [each for each in held_up if each[1] not in STEPS and each[0] not in told and each[2] not in told]
    new = [f"{name}: {reason}: {text}" for name, reason, text in failing]
    return "; ".join([f"version {finished.version}: {finished.message}", *new])


def _problems(fleet: RolloutEngine, version: WeightVersion | None) -> tuple[str, ...]:
    """Conditions that are False where they should hold, or hold where they should not."""
    conditions = fleet.status.conditions
    wrong = [_problem(c) for c in conditions if c.type == "Accepted" and not holds(c)]
    wrong += [_problem(c) for c in conditions if c.type == "Degraded" and holds(c)]
    if version is not None:
        refused = [c for c in version.status.conditions if c.type == "Accepted" and not holds(c)]
        wrong += [f"{version.metadata.name}: {_problem(c)}" for c in refused]
    return tuple(wrong)


def _problem(condition: Condition) -> str:
    return f"{condition.type}={condition.status.value} ({condition.reason}): {condition.message}"
