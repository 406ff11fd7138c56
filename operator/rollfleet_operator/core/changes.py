"""Events: what changed between two statuses and is worth telling a person. Never anything for a pass as such."""

from rollfleet_operator.api.meta import Condition
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import Phase, WeightVersionStatus
from rollfleet_operator.core.actions import Event
from rollfleet_operator.core.conditions import clip, find
from rollfleet_operator.core.moves import causes, tell
from rollfleet_operator.core.reasons import Reason

NORMAL, WARNING = "Normal", "Warning"
TOLD_PHASES = {
    Phase.PREPARING: Reason.PREPARING,
    Phase.QUIESCING: Reason.QUIESCING,
    Phase.ACTIVE: Reason.ACTIVE,
}


def fleet_events(name: str, old: RolloutEngineStatus, new: RolloutEngineStatus) -> tuple[Event, ...]:
    """Of a RolloutEngine."""
    events: list[Event] = []
    before = None if old.committed is None else (old.committed.version, old.committed.digest)
    if new.committed is not None and (new.committed.version, new.committed.digest) != before:
        events.append(_event("RolloutEngine", name, NORMAL, "Committed", f"version {new.committed.version}"))
    for kind, bad in (("Accepted", "False"), ("Degraded", "True")):
        was, now = find(old.conditions, kind), find(new.conditions, kind)
        if now is not None and now.status == bad and (was is None or _differ(was, now)):
            events.append(_event("RolloutEngine", name, WARNING, now.reason, now.message))
    was, now = find(old.conditions, "Available"), find(new.conditions, "Available")
    if now is not None and (was is None or was.status is not now.status) and (was is not None or now.status == "True"):
        updating = now.reason == Reason.UPDATING or now.status == "True"
        events.append(_event("RolloutEngine", name, NORMAL if updating else WARNING, now.reason, now.message))
    return tuple(events)


def _differ(was: Condition, now: Condition) -> bool:
    return (was.status, was.reason) != (now.status, now.reason)


def weight_version_events(name: str, old: WeightVersionStatus, new: WeightVersionStatus) -> tuple[Event, ...]:
    """Of a WeightVersion."""
    events: list[Event] = []
    was, now = find(old.conditions, "Accepted"), find(new.conditions, "Accepted")
    if now is not None and now.status == "False" and (was is None or _differ(was, now)):
        events.append(_event("WeightVersion", name, WARNING, now.reason, now.message))
    last = new.last_attempt
    if last is not None and new.version == old.version and new.attempt > max(old.attempt, 1):
        text = f"version {new.version}: attempt {last.attempt} failed, tried again: {last.message}"
        events.append(_event("WeightVersion", name, WARNING, last.reason, text))
    if (old.phase, old.version) == (new.phase, new.version):
        return (*events, *_tried_again(name, old, new))
    if old.version not in (0, new.version) and old.phase not in (Phase.ACTIVE, Phase.FAILED):
        text = f"version {old.version}: version {new.version} was asked for"
        events.append(_event("WeightVersion", name, NORMAL, Reason.SUPERSEDED, text))
    if new.phase is Phase.FAILED:
        active = find(new.conditions, "Active")
        reason, text = (Reason.UPDATE_FAILED.value, "") if active is None else (active.reason, active.message)
        events.append(_event("WeightVersion", name, WARNING, reason, f"version {new.version} failed: {text}"))
    elif new.phase in TOLD_PHASES:
        reason = TOLD_PHASES[new.phase]
        text = f"version {new.version}: {reason.sentence} {_left_out(new)}".rstrip()
        events.append(_event("WeightVersion", name, NORMAL, reason, text))
    return tuple(events)


def _tried_again(name: str, old: WeightVersionStatus, new: WeightVersionStatus) -> tuple[Event, ...]:
    """That the checkpoint can't be read, when it is read the second time: it may go on until the deadline."""
    found = causes(new.progress.failed)
    if not found or new.phase is not Phase.PREPARING or not old.prepare_attempt <= 1 < new.prepare_attempt:
        return ()
    text = f"version {new.version}: Preparing is tried again: {tell(found)}"
    return (_event("WeightVersion", name, WARNING, found[0].reason, text),)


def _left_out(status: WeightVersionStatus) -> str:
    """Who does not serve it yet, as the end of the update tells."""
    if status.phase is not Phase.ACTIVE or not status.history or status.history[-1].version != status.version:
        return ""
    return status.history[-1].message


def _event(kind: str, name: str, severity: str, reason: str, message: str) -> Event:
    return Event(kind, name, severity, str(reason), clip(message))
