"""All that can be learnt of one fleet at this moment, and what could not be: read once, judged by pure functions."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from rollfleet_cli.asking import ACCOUNT, RIGHT, Answer, Way, ask, engine_config
from rollfleet_cli.cluster import Access, Cluster
from rollfleet_cli.errors import CommandError, ForbiddenError, NotFoundError
from rollfleet_operator.api.meta import ANNOTATION_LEADER, LABEL_COMPONENT, LABEL_FLEET, node_of
from rollfleet_operator.api.rolloutengine import RolloutEngine, RouterMode
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.clients.podviews import node_view
from rollfleet_operator.core.leases import LeaseRecord
from rollfleet_operator.core.observed import NodeView
from rollfleet_operator.ports import CHILDREN, LEASES, NODES, PODS, Manifest, Resource
from rollfleet_protocol.state import EngineState

CORE_EVENTS = Resource("v1", "Event", "events")  # what kubelet and scheduler write, and ours too
OPERATOR_LABEL = "app.kubernetes.io/part-of=rollfleet"
LOG_LINES = 1000
LOG_S = 600  # what failed longer ago has been got over, or comes again
MOST_LOG_ENTRIES = 20
LOUD = ("warning", "error", "critical")
Read = TypeVar("Read")


@dataclass(frozen=True)
class EventNote:
    """An Event about the fleet, its WeightVersion or a pod."""

    about: str  # Kind/name
    type: str
    reason: str
    message: str
    count: int
    last: datetime


@dataclass(frozen=True)
class HelperPod:
    """A pod of the operator or of a router."""

    name: str
    namespace: str
    ready: bool
    restarts: int = 0
    message: str = ""


@dataclass(frozen=True)
class LogEntry:
    """A line of the operator's log about this fleet."""

    pod: str
    level: str
    message: str
    error: str


@dataclass(frozen=True)
class LeaseView:
    """Which process of the operator may act."""

    holder: str  # name of its pod where that is known; empty: nobody
    renewed: datetime | None


@dataclass(frozen=True)
class OperatorView:
    """What is known of the operator, from outside of it."""

    account: str = ""  # namespace/name of the ServiceAccount that the engines obey; empty where no pod tells
    pods: tuple[HelperPod, ...] = ()
    log: tuple[LogEntry, ...] = ()
    lease: LeaseView | None = None  # None: there is none, or it may not be read


@dataclass(frozen=True)
class Snapshot:
    """One look. `unknown` says what could not be learnt, and why."""

    now: datetime
    namespace: str
    name: str
    fleet: RolloutEngine | None
    versions: tuple[WeightVersion, ...] = ()  # that name the fleet
    pods: tuple[Manifest, ...] = ()  # of its engines
    routers: tuple[HelperPod, ...] | None = None  # None: there should be none, or they could not be listed
    answers: tuple[Answer[EngineState], ...] = ()
    events: tuple[EventNote, ...] = ()
    operator: OperatorView = OperatorView()
    unknown: tuple[str, ...] = ()

    @property
    def states(self) -> dict[str, EngineState]:
        """What guards said, by uid of the pod."""
        return {answer.uid: answer.said for answer in self.answers if answer.said is not None}


def engine_pods(cluster: Cluster, fleet: RolloutEngine) -> tuple[Manifest, ...]:
    """The fleet's own pods by name; ForbiddenError where they may not be listed."""
    selector = f"{LABEL_FLEET}={fleet.metadata.name},{LABEL_COMPONENT}=engine"
    listed = cluster.objects(PODS, fleet.metadata.namespace, labelSelector=selector)
    ours = [pod for pod in listed if _controller(pod) == fleet.metadata.uid]
    return tuple(sorted(ours, key=lambda pod: str(pod["metadata"]["name"])))


def leading(pods: Iterable[Manifest]) -> tuple[Manifest, ...]:
    """Those that have a guard: of engines of several pods the ones that lead."""
    return tuple(pod for pod in pods if node_of(str(pod["metadata"]["name"])) == 0)


def led_by(pods: Iterable[Manifest], leader: str) -> tuple[Manifest, ...]:
    """Of an engine of several pods the others."""
    return tuple(pod for pod in pods if (pod["metadata"].get("annotations") or {}).get(ANNOTATION_LEADER) == leader)


def router_pods(cluster: Cluster, fleet: RolloutEngine) -> tuple[HelperPod, ...] | None:
    """Pods of the fleet's router by name; None where its spec wants none."""
    if fleet.spec.router.mode is not RouterMode.ENABLED:
        return None
    selector = f"{LABEL_FLEET}={fleet.metadata.name},{LABEL_COMPONENT}=router"
    listed = cluster.objects(PODS, fleet.metadata.namespace, labelSelector=selector)
    views = (_helper_pod(pod) for pod in listed if "deletionTimestamp" not in pod["metadata"])
    return tuple(sorted(views, key=lambda pod: pod.name))


def children(cluster: Cluster, fleet: RolloutEngine) -> tuple[dict[str, Manifest], tuple[str, ...]]:
    """Services and the router's objects by "Kind/name", and the kinds that may not be listed."""
    selector = f"{LABEL_FLEET}={fleet.metadata.name}"
    found: dict[str, Manifest] = {}
    closed: list[str] = []
    for kind in CHILDREN:
        try:
            items = cluster.objects(kind, fleet.metadata.namespace, labelSelector=selector)
        except ForbiddenError:
            closed.append(kind.kind)
            continue
        ours = [item for item in items if _controller(item) == fleet.metadata.uid]
        found |= {f"{kind.kind}/{item['metadata']['name']}": item for item in ours}
    return found, tuple(closed)


def node_reader(cluster: Cluster) -> Callable[[str], NodeView | None]:
    """Nodes one by one, as the operator reads them; None for one that may not be read."""

    def read(name: str) -> NodeView | None:
        try:
            return node_view(cluster.object(NODES, None, name))
        except NotFoundError:
            return NodeView(name, exists=False)
        except ForbiddenError:
            return None

    return read


def ask_states(
    access: Access, fleet: RolloutEngine, pods: tuple[Manifest, ...], within_s: float, way: Way
) -> tuple[Answer[EngineState], ...]:
    """Every guard's state."""
    return tuple(ask(access, fleet, leading(pods), lambda client, endpoint: client.look(endpoint), within_s, way))


def collect(access: Access, namespace: str | None, name: str, within_s: float, way: Way) -> Snapshot:
    """Everything that may be read; UnreachableError only where the API server itself does not answer."""
    cluster = Cluster(access)
    where = namespace or cluster.namespace
    unknown: list[str] = []
    versions = tuple(each for each in cluster.versions(where) if each.spec.engine_ref.name == name)
    try:
        fleet = cluster.fleet(where, name)
    except NotFoundError:
        if not versions:
            raise
        return Snapshot(datetime.now(UTC), where, name, None, versions)
    pods = _or_unknown(unknown, "engines", lambda: engine_pods(cluster, fleet)) or ()
    routers = _or_unknown(unknown, "router", lambda: router_pods(cluster, fleet))
    answers = _or_unknown(unknown, "guards", lambda: ask_states(access, fleet, pods, within_s, way)) or ()
    denied = next((answer for answer in answers if answer.denied), None)
    if denied is not None:
        unknown.append(f"guards: {denied.error}. {RIGHT}")
    subjects = {name, *(each.metadata.name for each in versions), *(str(pod["metadata"]["name"]) for pod in pods)}
    subjects |= {pod.name for pod in routers or ()}
    events = _or_unknown(unknown, "events", lambda: _events(cluster, where, subjects)) or ()
    operator = _or_unknown(unknown, "operator", lambda: _operator(cluster, where, name, pods, unknown))
    return Snapshot(
        now=datetime.now(UTC),
        namespace=where,
        name=name,
        fleet=fleet,
        versions=versions,
        pods=pods,
        routers=routers,
        answers=answers,
        events=events,
        operator=operator or OperatorView(),
        unknown=tuple(unknown),
    )


def _or_unknown(unknown: list[str], what: str, read: Callable[[], Read]) -> Read | None:
    """A part that may fail without the rest; what failed is told."""
    try:
        return read()
    except CommandError as error:
        unknown.append(f"{what}: {error}")
        return None


def _controller(manifest: Manifest) -> str:
    owners = manifest["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _events(cluster: Cluster, namespace: str, subjects: set[str]) -> tuple[EventNote, ...]:
    """Oldest first."""
    listed = cluster.objects(CORE_EVENTS, namespace)
    notes = [_note(item) for item in listed if (item.get("involvedObject") or {}).get("name") in subjects]
    return tuple(sorted(notes, key=lambda note: note.last))


def _note(item: Manifest) -> EventNote:
    about, series = item["involvedObject"], item.get("series") or {}
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
    last = next((text for text in times if text), item["metadata"]["creationTimestamp"])
    return EventNote(
        about=f"{about.get('kind', '')}/{about.get('name', '')}",
        type=item.get("type", ""),
        reason=item.get("reason", ""),
        message=item.get("message", ""),
        count=int(series.get("count") or item.get("count") or 1),
        last=datetime.fromisoformat(last),
    )


def _operator(
    cluster: Cluster, namespace: str, name: str, pods: tuple[Manifest, ...], unknown: list[str]
) -> OperatorView:
    """By the account that the engines obey; where there are no engines, by the chart's label."""
    configs = [config for pod in pods if (config := engine_config(pod)) is not None]
    if configs:
        home, _, account = configs[-1].operator.subject.removeprefix(ACCOUNT).partition(":")
        found = [pod for pod in cluster.objects(PODS, home) if pod["spec"].get("serviceAccountName") == account]
        told = f"{home}/{account}"
    else:
        found, told = cluster.objects(PODS, None, labelSelector=OPERATOR_LABEL), ""
    views = tuple(_helper_pod(pod) for pod in found)
    log: list[LogEntry] = []
    for view in views:
        try:
            text = cluster.log(view.namespace, view.name, LOG_LINES, LOG_S)
        except CommandError as error:
            unknown.append(f"the operator's log: {error}")
        else:
            log += entries_about(f"{namespace}/{name}", view.name, text)
    uids = {str(pod["metadata"]["uid"]): str(pod["metadata"]["name"]) for pod in found}
    places = (
        [told.split("/")]
        if told
        else [
            [view.namespace, pod["spec"].get("serviceAccountName", "")]
            for view, pod in zip(views[:1], found[:1], strict=True)
        ]
    )
    lease = next((_lease(cluster, home, account, uids) for home, account in places if account), None)
    return OperatorView(told, views, tuple(log), lease)


def _lease(cluster: Cluster, home: str, account: str, uids: dict[str, str]) -> LeaseView | None:
    """The chart names the Lease after the operator's account."""
    try:
        record = LeaseRecord.of(cluster.object(LEASES, home, account))
    except (NotFoundError, ForbiddenError):
        return None
    renewed = datetime.fromisoformat(record.renewed) if record.renewed else None
    return LeaseView(uids.get(record.holder, record.holder), renewed)


def _helper_pod(pod: Manifest) -> HelperPod:
    status = pod.get("status") or {}
    conditions: dict[str, dict[str, Any]] = {each["type"]: each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    scheduled = conditions.get("PodScheduled", {})
    homeless = scheduled.get("message", "") if scheduled.get("status") == "False" else ""
    containers = status.get("containerStatuses") or ()
    waiting: list[dict[str, Any]] = [(each.get("state") or {}).get("waiting") or {} for each in containers]
    words = [": ".join(text for text in (one.get("reason"), one.get("message")) if text) for one in waiting if one]
    return HelperPod(
        name=pod["metadata"]["name"],
        namespace=pod["metadata"]["namespace"],
        ready=ready,
        restarts=sum(int(each.get("restartCount", 0)) for each in containers),
        message="; ".join(words) or homeless or status.get("message", "") or ("" if ready else status.get("phase", "")),
    )


def entries_about(key: str, pod: str, text: str) -> list[LogEntry]:
    """Warnings and errors about this fleet, the newest ones."""
    found: list[LogEntry] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # not a line of ours
            continue
        if isinstance(entry, dict) and entry.get("key") == key and entry.get("level") in LOUD:
            error = str(entry.get("error") or entry.get("exception") or "")
            found.append(LogEntry(pod, str(entry["level"]), str(entry.get("message", "")), error))
    return found[-MOST_LOG_ENTRIES:]
