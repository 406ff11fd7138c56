"""WeightsLost: nobody holds the committed version, and whoever tries to read it again says that it is not there.

That is certain only where every engine that can take part says so: one that has not tried yet may still find it. It
is tried again with back-off all the same, so a folder that comes back cures it.
"""

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.core.catch_up import Joiner, Obstacle
from rollfleet_operator.core.steps import source_of
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.state import EngineState, FailureReason, OperationName, OperationStatus

GONE = (
    FailureReason.CHECKPOINT_NOT_FOUND,
    FailureReason.CHECKPOINT_INCOMPLETE,
    FailureReason.CHECKPOINT_INVALID,
)
ASK_FOR_IT = "raise spec.version of the WeightVersion with a checkpoint that is there"
SEND_IT = (
    f"let a trainer send the next version, or {ASK_FOR_IT}; while the lost one is asked for, a copy of it in "
    "spec.recovery.checkpoint will do"
)


def weights_lost(world: World, committed: Committed | None, stuck: dict[str, Joiner], *, told: bool) -> str:
    """What is lost, and the cure; empty where nothing is. `told`: so it was said before, and is while it is tried."""
    if committed is None or not world.usable:
        return ""
    causes: list[str] = []
    for engine, state in world.usable:
        cause = "" if holds(state, committed) else _cause(engine, state, committed, stuck.get(engine.name), told=told)
        if not cause:
            return ""
        causes.append(cause)
    source = source_of(committed)
    version = f"no engine holds version {committed.version}"
    if source is None:
        return f"{version}, and it is stored nowhere: {SEND_IT}"
    where = f"it cannot be read again from {source.path!r} ({causes[0]})"
    return f"{version}, and {where}: put {source.path!r} back as it was, or {ASK_FOR_IT}"


def _cause(engine: Engine, state: EngineState, committed: Committed, joiner: Joiner | None, *, told: bool) -> str:
    """Why this engine cannot load it; empty where it may."""
    if joiner is not None:
        return joiner.text if joiner.obstacle in (Obstacle.NO_SOURCE, Obstacle.CHANGED) else ""
    operation = state.operation
    if operation is None or (operation.name, operation.version) != (OperationName.PREPARE, committed.version):
        return ""
    if operation.status is OperationStatus.FAILED and operation.failure is not None:
        return f"{engine.name}: {operation.failure.message}" if operation.failure.reason in GONE else ""
    trying = operation.status is OperationStatus.RUNNING and engine.guard is not None and engine.guard.setbacks > 0
    return f"{engine.name} tries again" if told and trying else ""
