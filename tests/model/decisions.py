"""What operators decide, judged by what they knew: whom a roll closes, and who is stopped for good."""

from collections.abc import Collection
from datetime import datetime, timedelta

from rollfleet_operator.api.weightversion import Phase, StrategyType, WeightVersion
from rollfleet_operator.core.accept import LONG_AGO, in_charge
from rollfleet_operator.core.actions import Decision, GuardCall, StopPod
from rollfleet_operator.core.objects.pod import template_hash
from rollfleet_operator.core.observed import Observed, PodView
from rollfleet_operator.core.rolling import roll_seconds
from rollfleet_protocol.commands import Close
from rollfleet_protocol.state import Gate, WeightsState
from rollfleet_protocol.termination import EXIT_CONFIGURATION
from tests.model.books import BrokenPromise


def judge_decision(observed: Observed, decision: Decision, now: datetime) -> None:
    """Never more at once than maxUnavailable, never fewer serving than minServing, until the roll's deadline."""
    committed = observed.fleet.status.committed
    charge = in_charge(observed.weight_versions, committed)
    if charge is None or committed is None or charge.spec.strategy.type is not StrategyType.ROLLING:
        return
    status, spec = charge.status, charge.spec
    if status.version != spec.version or status.phase not in (Phase.QUIESCING, Phase.OPENING):
        return
    if status.phase is Phase.OPENING and now >= _ends(observed, charge):
        return
    serving = _serving(observed)
    told = (action for action in decision.actions if isinstance(action, GuardCall))
    closed = {call.pod_uid for call in told if isinstance(call.command, Close)} & serving
    if not closed:
        return
    left = len(serving) - len(closed)
    if len(closed) > spec.strategy.max_unavailable or left < spec.min_serving:
        text = f"closes {len(closed)} of {len(serving)} that serve, spec.minServing is {spec.min_serving}"
        raise BrokenPromise("minServing", f"{text}, maxUnavailable {spec.strategy.max_unavailable}")


def judge_stops(observed: Observed, decision: Decision, proven: Collection[str]) -> None:
    """Of a template that has served nobody is stopped for a cause that all may share: only beside one that is up."""
    pods = {pod.uid: pod for pod in observed.pods}
    for action in decision.actions:
        if not isinstance(action, StopPod) or action.uid not in pods:
            continue
        pod = pods[action.uid]
        template = template_hash(observed.fleet, observed.settings)
        if pod.template_hash != template or template not in proven or pod.exit_code == EXIT_CONFIGURATION:
            continue
        if not any(_is_up_beside(observed, other, pod) for other in observed.pods if other.template_hash == template):
            raise BrokenPromise("restarts", f"{pod.name} is stopped, and no engine of its proven template is up")


def _is_up_beside(observed: Observed, other: PodView, pod: PodView) -> bool:
    view = observed.guards.get(other.uid)
    answers = view is not None and view.reachable and view.state is not None and view.state.alive
    since, began = other.ready_since, pod.failed_from
    return answers and other.uid != pod.uid and since is not None and began is not None and since <= began


def _ends(observed: Observed, charge: WeightVersion) -> datetime:
    """When the roll's deadline is over at the earliest."""
    since = [each for each in (charge.status.phase_started_at, observed.settings.up_since) if each is not None]
    engines = max(observed.fleet.spec.replicas, len(observed.pods))
    return max(since, default=LONG_AGO) + timedelta(seconds=roll_seconds(charge, engines))


def _serving(observed: Observed) -> set[str]:
    """By pod uid: who answered from the committed version or the one before when it was heard of last."""
    committed = observed.fleet.status.committed
    if committed is None:
        return set()
    versions = {committed.version} | ({committed.previous.version} if committed.previous is not None else set())
    found = set()
    for pod in observed.pods:
        view = observed.guards.get(pod.uid)
        if pod.deleting or view is None or not view.reachable or view.state is None:
            continue
        weights = view.state.weights
        if view.state.gate is Gate.OPEN and weights.state is WeightsState.VERIFIED and weights.version in versions:
            found.add(pod.uid)
    return found
