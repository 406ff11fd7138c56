"""From a snapshot to findings: what is wrong, who says so, its likely cause, and what helps. Pure.

The nearer a finding is to the root of a fault, the earlier it comes: who is not there (the operator), what is not
accepted, what single engines say, what the update says, and what the fleet says as a whole.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from rollfleet_cli.remedies import (
    ENGINES,
    EXIT_CODES,
    FAILED,
    IGNORED,
    JOINING,
    NOT_ACCEPTED,
    OPERATOR,
    STEPS,
    UNAVAILABLE,
    VERSIONS,
    WAITING,
    Remedy,
)
from rollfleet_cli.snapshot import EventNote, HelperPod, LeaseView, Snapshot
from rollfleet_cli.view import find, holds
from rollfleet_operator.api.meta import Condition
from rollfleet_operator.api.rolloutengine import EngineDetail, Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import Phase, WeightVersion
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.accept import in_charge
from rollfleet_operator.core.engine_states import WAITING_IS_BROKEN, Doing
from rollfleet_operator.core.observed import ContainerState, PodView
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.world import judge_epochs
from rollfleet_protocol.state import EngineState, OperationStatus, WeightsState

ECHOES = {"EngineUnreachable": "Unreachable", "CannotBeFenced": "Unfenced"}  # of an engine, in an update's words
UNCERTAIN = Doing.UNCERTAIN.value
RUNNING, PENDING = "Running", "Pending"
STARTING = ("ContainerCreating", "PodInitializing", PENDING)  # what is said of a pod that is on its way
FAULT = re.compile(r"^[A-Z][A-Za-z]+: |^restarted ")  # a reason and its text, as core.engine_states writes it
LEASE_AGE = timedelta(seconds=60)  # renewed every 2 s; the rest is for the difference between clocks
SETTLED = (Phase.ACTIVE, Phase.FAILED)
OF_UPDATES = STEPS | WAITING | FAILED  # what an update waits in can be what it failed by
OF_ENGINES = JOINING | ENGINES


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    subject: str  # Kind/name
    reason: str
    words: str  # whose own, wherever somebody said something
    cause: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return asdict(self)


def diagnose(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Findings, each (subject, reason) once."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in _all(snapshot):
        known = found.get((finding.subject, finding.reason))
        if known is None or (not known.words and finding.words):
            found[finding.subject, finding.reason] = finding
    for subject, reason in list(found):  # the same, as the update says it
        if (subject, ECHOES.get(reason, "")) in found:
            del found[subject, reason]
    return tuple(found.values())


def _all(snapshot: Snapshot) -> Iterator[Finding]:
    fleet = snapshot.fleet
    if fleet is None:
        for version in snapshot.versions:
            words = f"there is no RolloutEngine {snapshot.name!r} in namespace {snapshot.namespace}"
            yield _finding(f"WeightVersion/{version.metadata.name}", "EngineNotFound", words, NOT_ACCEPTED)
        return
    yield from _operator(snapshot, fleet)
    yield from _refusals(snapshot, fleet)
    yield from _engines(snapshot, fleet)
    charge = in_charge(snapshot.versions, fleet.status.committed)
    yield from _last_failure(fleet) if charge is None else _update(fleet, charge)
    yield from _fleet(fleet)
    yield from _router(snapshot, fleet)


def _finding(subject: str, reason: str, words: str, table: dict[str, Remedy]) -> Finding:
    known = table.get(reason, Remedy("see the words beside it", "see docs/troubleshooting.md"))
    return Finding(subject, reason, words, known.cause, known.remedy)


def _operator(snapshot: Snapshot, fleet: RolloutEngine) -> Iterator[Finding]:
    view, subject = snapshot.operator, f"RolloutEngine/{fleet.metadata.name}"
    acting = view.lease is not None and _is_renewed(view.lease, snapshot.now)
    if view.account and not view.pods and not acting and _waits_for_operator(snapshot, fleet):
        words = f"no pod runs under ServiceAccount {view.account}, which the engines obey"
        yield _finding("Operator", "OperatorNotReady", f"{words} (unless it runs outside of the cluster)", OPERATOR)
    if view.pods and not any(pod.ready for pod in view.pods):
        words = "; ".join(_not_ready(pod) for pod in view.pods)
        yield _finding(f"Operator/{view.pods[0].namespace}", "OperatorNotReady", words, OPERATOR)
    elif view.pods and view.lease is not None and not acting:
        since = "never" if view.lease.renewed is None else f"last at {view.lease.renewed.isoformat()}"
        words = f"the Lease names {view.lease.holder or 'nobody'}, and was renewed {since}"
        yield _finding(f"Operator/{view.pods[0].namespace}", "NoLeader", words, OPERATOR)
    if not fleet.status.conditions:
        yield _finding(subject, "NotObserved", "its status is empty", OPERATOR)
    named: dict[str, RolloutEngine | WeightVersion] = {subject: fleet}
    named |= {f"WeightVersion/{each.metadata.name}": each for each in snapshot.versions}
    for name, thing in named.items():
        seen, newest = thing.status.observed_generation, thing.metadata.generation
        if seen < newest:
            yield _finding(name, "NotObserved", f"its status speaks of generation {seen} of {newest}", OPERATOR)
    for entry in view.log[::-1]:  # the newest words of each kind
        kind = {"pass failed": "PassFailed", "pass crashed": "PassCrashed"}.get(entry.message)
        if kind:
            yield _finding(f"Operator/{entry.pod}", kind, entry.error, OPERATOR)


def _is_renewed(lease: LeaseView, now: datetime) -> bool:
    """Lately, as far as this machine's clock can tell."""
    return bool(lease.holder) and lease.renewed is not None and now - lease.renewed < LEASE_AGE


def _waits_for_operator(snapshot: Snapshot, fleet: RolloutEngine) -> bool:
    """Whether something is as only a working operator would change it."""
    objects: tuple[RolloutEngine | WeightVersion, ...] = (fleet, *snapshot.versions)
    stale = any(each.status.observed_generation < each.metadata.generation for each in objects)
    moving = any(each.status.phase not in SETTLED for each in snapshot.versions)
    return stale or moving or not holds(find(fleet.status.conditions, "Available"))


def _not_ready(pod: HelperPod) -> str:
    restarts = f", restarted {pod.restarts} times" if pod.restarts else ""
    return f"pod {pod.namespace}/{pod.name} is not ready{restarts}{': ' + pod.message if pod.message else ''}"


def _refusals(snapshot: Snapshot, fleet: RolloutEngine) -> Iterator[Finding]:
    """What is not accepted, or has no effect."""
    accepted = find(fleet.status.conditions, "Accepted")
    if accepted is not None and not holds(accepted):
        yield _finding(f"RolloutEngine/{fleet.metadata.name}", accepted.reason, accepted.message, UNAVAILABLE)
    ignored = find(fleet.status.conditions, "SettingsIgnored")
    if ignored is not None and holds(ignored):
        yield _finding(f"RolloutEngine/{fleet.metadata.name}", ignored.reason, ignored.message, IGNORED)
    for version in snapshot.versions:
        said = find(version.status.conditions, "Accepted")
        if said is not None and not holds(said):
            yield _finding(f"WeightVersion/{version.metadata.name}", said.reason, said.message, NOT_ACCEPTED)


def _engines(snapshot: Snapshot, fleet: RolloutEngine) -> Iterator[Finding]:
    """What pods, guards and the fleet's status say of single engines."""
    states, told = snapshot.states, {detail.name: detail for detail in fleet.status.engines.details}
    epochs = {uid: state.epoch for uid, state in states.items()}
    absurd, _ = judge_epochs(fleet.status.epoch, epochs)
    available = find(fleet.status.conditions, "Available")
    held = available is not None and available.reason == Reason.HELD
    errors = {answer.uid: answer for answer in snapshot.answers if answer.error and not answer.denied}
    for pod in map(pod_view, snapshot.pods):
        subject = f"Pod/{pod.name}"
        yield from _of_pod(pod)
        yield from _of_kubelet(pod, snapshot.events)
        if pod.uid in absurd:
            words = f"epoch {epochs[pod.uid]}, far above {fleet.status.epoch}"
            yield _finding(subject, "Quarantined", words, FAILED)
        answer = errors.get(pod.uid)
        if answer is not None and pod.phase == RUNNING and (pod.started or answer.disowned):
            yield _finding(subject, "Unreachable", answer.error, ENGINES)
        if pod.uid in states:
            yield from _of_state(subject, states[pod.uid], held=held)
        detail = told.pop(pod.name, None)
        if detail is not None:
            yield from _of_detail(detail, held=held)
    for detail in told.values():  # pods that are gone, or may not be read
        yield from _of_detail(detail, held=held)


def _of_detail(detail: EngineDetail, *, held: bool) -> Iterator[Finding]:
    """What the operator says of an engine. Who only comes up is no fault, unless it says what keeps it."""
    stumbled = detail.state in JOINING and FAULT.search(detail.message)
    if held and detail.state == UNCERTAIN:
        return  # told of the fleet, with what ends it: nothing is restored by itself
    if detail.state in ENGINES or stumbled:
        yield _finding(f"Pod/{detail.name}", detail.state, detail.message, OF_ENGINES)


def _of_pod(pod: PodView) -> Iterator[Finding]:
    if pod.unschedulable:
        yield _finding(f"Pod/{pod.name}", "Unschedulable", pod.message, ENGINES)
    if pod.exit_code in EXIT_CODES and not pod.ready:
        known = EXIT_CODES[pod.exit_code]
        yield Finding(f"Pod/{pod.name}", f"ExitCode{pod.exit_code}", pod.message, known.cause, known.remedy)
    elif pod.message and not pod.ready and not pod.unschedulable and _has_stumbled(pod):
        yield _finding(f"Pod/{pod.name}", "Broken", pod.message, ENGINES)


def _has_stumbled(pod: PodView) -> bool:
    """Whether its words tell of a fault: a pod that is being created has words too."""
    failed = pod.phase == "Failed" or pod.exit_code is not None or pod.container is ContainerState.TERMINATED
    return failed or (pod.phase in (PENDING, RUNNING) and pod.message.startswith(WAITING_IS_BROKEN))


def _of_kubelet(pod: PodView, events: tuple[EventNote, ...]) -> Iterator[Finding]:
    """Why a pod with a node does not get as far as to a container: only Events tell, of volumes mostly."""
    if pod.phase != PENDING or pod.unschedulable or _has_stumbled(pod):
        return
    warnings = [each for each in events if each.about == f"Pod/{pod.name}" and each.type == "Warning"]
    told = [each for each in warnings if each.reason != "FailedScheduling"]
    if told:
        yield _finding(f"Pod/{pod.name}", "NotCreated", f"{told[-1].reason}: {told[-1].message}", ENGINES)


def _of_state(subject: str, state: EngineState, *, held: bool) -> Iterator[Finding]:
    if not state.alive:
        yield _finding(subject, "EngineDead", "its guard says that the engine core is dead", FAILED)
    if state.weights.state is WeightsState.UNCERTAIN and not held:
        yield _finding(subject, UNCERTAIN, f"weights {state.weights.source or 'unknown'}", ENGINES)
    operation = state.operation
    if operation is not None and operation.status is OperationStatus.FAILED and operation.failure is not None:
        words = f"{operation.name.value} of version {operation.version}: {operation.failure.message}"
        yield _finding(subject, operation.failure.reason.value, words, FAILED)


def _update(fleet: RolloutEngine, version: WeightVersion) -> Iterator[Finding]:
    status, subject = version.status, f"WeightVersion/{version.metadata.name}"
    active, accepted = find(status.conditions, "Active"), find(status.conditions, "Accepted")
    if accepted is not None and not holds(accepted):
        return  # told already
    if status.phase is not Phase.ACTIVE:
        over = STEPS if status.phase is Phase.FAILED else {}  # nobody waits for who was only slow
        for failed in (each for each in status.progress.failed if each.reason not in over):
            yield _finding(f"Pod/{failed.name}", failed.reason, failed.message, STEPS | FAILED)
    for kind in VERSIONS:
        said = find(status.conditions, kind)
        if said is not None and holds(said):
            yield _finding(subject, kind, said.message, VERSIONS)
    if active is None or holds(active):
        return
    if status.phase is Phase.PENDING:
        if active.reason in WAITING:
            yield _finding(subject, active.reason, active.message, WAITING)
        return
    yield from _failure(fleet, version, subject, active)


def _failure(fleet: RolloutEngine, version: WeightVersion, subject: str, active: Condition) -> Iterator[Finding]:
    """Why an update failed, or what its phase says of a failure that it may still get over."""
    ended = fleet.status.last_finished
    mine = ended is not None and ended.version == version.spec.version and ended.outcome is Outcome.FAILED
    if version.status.phase is Phase.FAILED and ended is not None and mine and ended.reason:
        yield _finding(subject, ended.reason, ended.message, OF_UPDATES)
    elif version.status.phase is Phase.FAILED or active.reason in FAILED:
        yield _finding(subject, active.reason, active.message, OF_UPDATES)
    elif (last := version.status.last_attempt) is not None and last.attempt:
        yield _finding(subject, last.reason, f"attempt {last.attempt}: {last.message}", OF_UPDATES)


def _last_failure(fleet: RolloutEngine) -> Iterator[Finding]:
    """Of a WeightVersion that is gone: only the fleet remembers it."""
    ended = fleet.status.last_finished
    if ended is not None and ended.outcome is Outcome.FAILED:
        words = f"version {ended.version}: {ended.message}"
        yield _finding(f"RolloutEngine/{fleet.metadata.name}", ended.reason, words, OF_UPDATES)


def _router(snapshot: Snapshot, fleet: RolloutEngine) -> Iterator[Finding]:
    """A router that runs is ready as soon as an engine serves; before that it is no fault of its own."""
    if snapshot.routers is None or not fleet.status.conditions:
        return
    serves = holds(find(fleet.status.conditions, "Available"))
    lost = [pod for pod in snapshot.routers if not pod.ready and (serves or pod.message != RUNNING)]
    for pod in (pod for pod in lost if pod.message not in STARTING):
        yield _finding(f"Pod/{pod.name}", "RouterNotReady", _not_ready(pod), UNAVAILABLE)
    if serves and not snapshot.routers:
        yield _finding(f"RolloutEngine/{fleet.metadata.name}", "RouterNotReady", "no pod of it exists", UNAVAILABLE)


def _fleet(fleet: RolloutEngine) -> Iterator[Finding]:
    subject = f"RolloutEngine/{fleet.metadata.name}"
    available = find(fleet.status.conditions, "Available")
    if available is not None and not holds(available):
        yield _finding(subject, available.reason, available.message, UNAVAILABLE)
    degraded = find(fleet.status.conditions, "Degraded")
    if degraded is not None and holds(degraded) and degraded.reason != Reason.ENGINES_NOT_WELL:  # those are told above
        yield _finding(subject, degraded.reason, degraded.message, UNAVAILABLE)
