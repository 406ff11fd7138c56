"""Which engines are stopped, because starting them again cures nothing or has failed too often.

The kubelet restarts a container that ended, with its own back-off (up to five minutes). What is counted is how often
it ended since the engine served last, or was up for as long as the kubelet forgets its back-off after. Past
spec.startup.restartBudget, or at once after exit code 78, the pod is stopped and stays as it is: status, termination
message and log can be read. It keeps its place until the template changes or somebody deletes it.

Of an engine of several pods what the leading one says counts, which ends with every other; exit code 78 of any.

Not stopped is
- whoever ended with exit code 75: by the launcher's own word a restart may find the cause cured;
- whoever comes of a template that has served, unless it failed while another engine of it was up: a cause which all
  share may be at work, a volume that is away for instance, and when it passes the fleet must come back by itself.
"""

from datetime import datetime, timedelta

from rollfleet_operator.api.members import Member
from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.core.actions import StopPod
from rollfleet_operator.core.observed import ContainerState
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.record import Record
from rollfleet_operator.core.world import Engine, World
from rollfleet_protocol.termination import EXIT_CONFIGURATION, EXIT_TEMPORARY

PROVEN_S = 600  # after which the kubelet's back-off begins anew (MaxContainerBackOff doubled, Kubernetes 1.36)


def has_succeeded(engine: Engine, committed: Committed | None, now: datetime) -> bool:
    """Whether what failed before counts no more."""
    since = engine.pod.running_since
    lasts = engine.settled and since is not None and now >= since + timedelta(seconds=PROVEN_S)
    return engine.serves(committed) or (lasts and engine.usable is not None)


def failures(engine: Engine, members: tuple[Member, ...]) -> int:
    """How often its container ended since it succeeded."""
    before = next((member.restarts for member in members if member.uid == engine.pod.uid), 0)
    return engine.pod.restarts - before + _has_ended(engine)


def plan_stops(world: World, record: Record) -> tuple[StopPod, ...]:
    """Who is stopped in this pass, and why."""
    found = ((engine, _why(world, record, engine)) for engine in world.engines)
    return tuple(StopPod(engine.name, engine.pod.uid, f"{why}; {_cure(world, engine)}") for engine, why in found if why)


def is_spared(world: World, record: Record, engine: Engine) -> bool:
    """Whether it would be stopped if another engine of its template were up."""
    return bool(_over(world, record, engine)) and _is_shared(world, record, engine)


def _why(world: World, record: Record, engine: Engine) -> str:
    over = _over(world, record, engine)
    return "" if over and _is_shared(world, record, engine) else over


def _over(world: World, record: Record, engine: Engine) -> str:
    pod = engine.pod
    if pod.vanished or pod.deleting or pod.ended or pod.stopped or engine.settled:
        return ""
    hopeless = next((peer for peer in engine.peers if peer.exit_code == EXIT_CONFIGURATION and not peer.deleting), None)
    if hopeless is not None:
        words = f"pod {hopeless.name}: exit code {hopeless.exit_code}: {hopeless.message}".rstrip(": ")
        return f"{Reason.CANNOT_START}: a restart cures nothing; {words}"
    if pod.exit_code is None:
        return ""
    words = f"exit code {pod.exit_code}: {pod.message}".rstrip(": ")
    if pod.exit_code == EXIT_CONFIGURATION:
        return f"{Reason.CANNOT_START}: a restart cures nothing; {words}"
    budget, count = world.fleet.spec.startup.restart_budget, failures(engine, record.members)
    if pod.exit_code == EXIT_TEMPORARY or count <= budget or not _has_ended(engine):
        return ""
    text = f"it failed {count} times without serving in between (spec.startup.restartBudget {budget})"
    return f"{Reason.RESTART_BUDGET_SPENT}: {text}; {words}"


def _is_shared(world: World, record: Record, engine: Engine) -> bool:
    template = engine.pod.template_hash
    if template != record.proven_template:
        return False
    return not _was_one_up(world, engine)


def _was_one_up(world: World, engine: Engine) -> bool:
    """Whether it failed beside another of its template that was well: in a run that began after that one was Ready.

    When a shared cause passes the engines come back one after another; each gets a run of its own.
    """
    since, began = world.up_since.get(engine.pod.template_hash), engine.pod.failed_from
    return since is not None and began is not None and since <= began


def _has_ended(engine: Engine) -> bool:
    ended = engine.pod.container in (ContainerState.WAITING, ContainerState.TERMINATED)
    return ended and engine.pod.exit_code is not None


def _cure(world: World, engine: Engine) -> str:
    again = f"kubectl delete pod {engine.name} -n {world.fleet.metadata.namespace}"
    return f"change the fleet's spec, or try again by: {again}"
