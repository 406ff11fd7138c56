"""Commands outside an update: what one engine is told next on its way to the committed weights."""

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import Deadlines
from rollfleet_operator.core.work import Work
from rollfleet_operator.core.world import Engine, World
from rollfleet_protocol.commands import (
    Arm,
    Cancel,
    CheckpointRoot,
    CheckpointSource,
    Close,
    Open,
    Prepare,
    Transfer,
    Verify,
)
from rollfleet_protocol.state import EngineState

WHOLE_MODEL = "."


def source_of(committed: Committed) -> CheckpointSource | None:
    """Where the committed version can be read again. Version 0 is model.path; None: it is stored nowhere."""
    if committed.checkpoint is not None:
        return CheckpointSource(path=committed.checkpoint)
    if committed.version == 0:
        return CheckpointSource(root=CheckpointRoot.MODEL, path=WHOLE_MODEL)
    return None


def verify_initial(
    world: World, epoch: int, engine: Engine, state: EngineState, tokens: tuple[int, ...], work: Work
) -> None:
    """Ask for the probe under the weights that were loaded at start."""
    command = Verify(
        incarnation=state.incarnation,
        epoch=epoch,
        version=0,
        digest=None,
        probe_tokens=tokens,
        deadline_seconds=Deadlines().verify_seconds,
    )
    if engine.running() is None:
        work.give(engine, command)


def prepare(
    epoch: int, engine: Engine, state: EngineState, committed: Committed, deadlines: Deadlines, work: Work
) -> bool:
    """Stage the committed version again; False where nobody stored it."""
    source = source_of(committed)
    if source is None:
        return False
    command = Prepare(
        incarnation=state.incarnation,
        epoch=epoch,
        version=committed.version,
        source=source,
        digest=committed.digest,
        deadline_seconds=deadlines.prepare_seconds,
    )
    work.give(engine, command)
    return True


def close(
    world: World, epoch: int, engine: Engine, state: EngineState, version: int, deadlines: Deadlines, work: Work
) -> None:
    """Close and pause this engine."""
    command = Close(
        incarnation=state.incarnation,
        epoch=epoch,
        version=version,
        deadline_seconds=deadlines.quiesce_seconds,
        operator_silence_seconds=world.settings.operator_silence_s,
    )
    work.give(engine, command)


def arm(epoch: int, engine: Engine, state: EngineState, work: Work, *, at_once: bool) -> None:
    """From here on only we reopen it."""
    work.give(engine, Arm(incarnation=state.incarnation, epoch=epoch), at_once=at_once)


def transfer(
    epoch: int, engine: Engine, state: EngineState, version: int, digest: str, deadlines: Deadlines, work: Work
) -> None:
    """Load what was staged."""
    command = Transfer(
        incarnation=state.incarnation,
        epoch=epoch,
        version=version,
        digest=digest,
        deadline_seconds=deadlines.transfer_seconds,
    )
    work.give(engine, command)


def verify(
    epoch: int, engine: Engine, state: EngineState, tokens: tuple[int, ...], deadlines: Deadlines, work: Work
) -> None:
    """Reset caches and answer the probe under what was loaded."""
    command = Verify(
        incarnation=state.incarnation,
        epoch=epoch,
        version=state.weights.version or 0,
        digest=state.weights.digest,
        probe_tokens=tokens,
        deadline_seconds=deadlines.verify_seconds,
    )
    work.give(engine, command)


def let_in(epoch: int, engine: Engine, state: EngineState, work: Work) -> None:
    """Open on the verified weights that are held. Where the scheduler is paused Cancel resumes it first."""
    if state.paused:
        cancel(epoch, engine, state, work)
        return
    version, digest = state.weights.version or 0, state.weights.digest
    work.give(engine, Open(incarnation=state.incarnation, epoch=epoch, version=version, digest=digest))


def cancel(epoch: int, engine: Engine, state: EngineState, work: Work) -> None:
    """Give up what was staged, closed or armed and not touched."""
    work.give(engine, Cancel(incarnation=state.incarnation, epoch=epoch))
