"""Updates in the simulated cluster: how tests begin them and look at their ends."""

import re
from typing import Any

from rollfleet_cli.diagnosing import Finding, diagnose
from rollfleet_cli.snapshot import Snapshot
from rollfleet_operator.api.meta import Condition
from rollfleet_operator.api.rolloutengine import Aftermath, Outcome
from rollfleet_operator.api.weightversion import Deadlines, FailureType, OnFailure, Phase
from rollfleet_operator.core.conditions import find
from rollfleet_protocol.state import FailureReason, OperationName
from tests.support.builders import make_fleet, make_weight_version
from tests.support.simulated_engine import fault
from tests.support.simulated_world import World, slow

DEADLINES = Deadlines(prepare_seconds=60, quiesce_seconds=30, transfer_seconds=40, verify_seconds=20)
SLACK_S = 5.0
ROLLBACK = OnFailure(type=FailureType.ROLLBACK)
HOLD = OnFailure(type=FailureType.HOLD)
BROKEN = fault(FailureReason.TRANSFER_FAILED, "rank 3:\n  out of memory")


def make_world(replicas: int = 3, version: int = 0, **options: Any) -> World:
    """A fleet that serves the version."""
    world = World(make_fleet(replicas=replicas), **options)
    assert world.run(60, lambda: world.all_serve(0))
    if version:
        bump(world, version)
        assert world.run(60, lambda: world.ended(version) and world.all_serve(version))
    return world


def bump(world: World, version: int, **spec: Any) -> None:
    """Ask for a version."""
    world.apply_weight_version(make_weight_version(version, **({"deadlines": DEADLINES} | spec)))


def condition(world: World, kind: str) -> tuple[str, str, str]:
    """(status, reason, message) of the WeightVersion's condition."""
    found = find(world.status().conditions, kind)
    assert found is not None
    return found.status.value, found.reason, found.message


def failed(world: World, version: int, reason: str) -> str:
    """The update failed for this reason, and everybody was told; the message."""
    status, told, message = condition(world, "Active")
    assert (status, told) == ("False", reason), message
    last = world.fleet.status.last_finished
    assert last is not None
    assert (last.version, last.outcome, last.reason) == (version, Outcome.FAILED, reason)
    assert world.status().history[-1].outcome is Outcome.FAILED
    assert world.status().history[-1].message == last.message
    assert_explained(world, version, reason)
    return message


def assert_explained(world: World, version: int, reason: str) -> None:
    """`kubectl get wv` in one line, `kubectl describe` by condition and event, `rollfleet diagnose` with a remedy."""
    status, told, message = condition(world, "Active")
    assert (status, told) == ("False", reason)
    assert message, "the column Message"
    assert not re.search(r"[\n\r\f]", message), "kubectl cuts a column at the end of its first line"
    events = [event for event in world.events if (event.kind, event.reason) == ("WeightVersion", reason)]
    assert any(f"version {version} failed: " in event.message for event in events)
    found = [finding for finding in diagnosed(world) if finding.subject == "WeightVersion/qwen-policy"]
    assert [(finding.reason, finding.words) for finding in found] == [(reason, message)]
    assert "docs/troubleshooting.md" not in found[0].remedy, "that is what it says of reasons it does not know"


def diagnosed(world: World) -> tuple[Finding, ...]:
    """What `rollfleet diagnose` finds in the objects."""
    meta = world.fleet.metadata
    versions = tuple(world.weight_versions.values())
    return diagnose(
        Snapshot(now=world.now, namespace=meta.namespace, name=meta.name, fleet=world.fleet, versions=versions)
    )


def phases(world: World) -> list[Phase]:
    """Phases in the order in which they were recorded."""
    seen: list[Phase] = []
    for decision in world.decisions:
        for write in decision.weight_version_statuses:
            if not seen or seen[-1] is not write.status.phase:
                seen.append(write.status.phase)
    return seen


def fail_once(world: World, ordinal: int, step: OperationName = OperationName.TRANSFER) -> None:
    world.pods[world.uid_of(ordinal)].temper.fails[step] = BROKEN


def fail_always(world: World, ordinal: int) -> None:
    """By a transfer that never ends within its time."""
    world.pods[world.uid_of(ordinal)].temper.seconds = slow(OperationName.TRANSFER, 1000.0)().seconds


def fleet_condition(world: World, kind: str) -> Condition:
    found = find(world.fleet.status.conditions, kind)
    assert found is not None
    return found


def aftermath(world: World) -> Aftermath | None:
    last = world.fleet.status.last_finished
    return None if last is None else last.aftermath
