"""Opening: the version is committed; gates open everywhere, by the same ladder that late joiners climb.

Active as soon as each target is open or known not to be able to: another process, no process, a dead core, left out of
the update by its own failure. One that
does not answer is waited for, but not for ever: the commit stands, and that engine opens as a late joiner when it is
back.
"""

from decimal import Decimal

from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import FailedEngine, Phase
from rollfleet_operator.core.changing import find_target
from rollfleet_operator.core.conditions import clip
from rollfleet_operator.core.moves import Ending, Move, Update, hold_up, progress, tell, with_record
from rollfleet_operator.core.policies import OPENING_S
from rollfleet_operator.core.probes import compare
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.rolling import TOLD, roll_of, roll_on
from rollfleet_operator.core.work import own_words
from rollfleet_operator.core.world import holds
from rollfleet_protocol.state import EngineState, Gate, ProbeResult

NO_LIMIT = Decimal("Infinity")


def opening(update: Update) -> Move:
    """One look at Opening. The record may still say Verifying: the commit is what counts."""
    if update.status.phase is not Phase.OPENING:
        update = with_record(update, update.enter(Phase.OPENING))
    roll = roll_of(update.weight_version)
    if roll is not None:
        return roll_on(update, roll)
    deadline = update.deadline(OPENING_S)
    closed: list[FailedEngine] = []
    known = {each.name: each for each in update.status.progress.failed}
    left_out: list[FailedEngine] = []
    gone = 0
    for target in update.status.targets:
        engine, state = find_target(update, target)
        if engine is None:
            gone += 1
        elif state is not None and not _belongs(update, state):
            left_out.append(known.get(engine.name) or hold_up(engine, Reason.NOT_ALL_CURRENT, own_words(engine)[1]))
        elif state is None or state.gate is not Gate.OPEN:
            closed.append(hold_up(engine, Reason.OPENING, "does not answer" if state is None else "is not open yet"))
    total = len(update.status.targets) - gone - len(left_out)
    waited_for = progress(total - len(closed), total, closed + left_out)
    status = update.status.model_copy(update={"progress": waited_for})
    if closed and not deadline.passed(update.now):
        return Move(status)
    return Move(status, Ending(Outcome.ACTIVE, Reason.ACTIVE, _later(gone, left_out + closed)))


def _belongs(update: Update, state: EngineState) -> bool:
    """Whether it opens with the others: it holds what was committed, and was not excluded."""
    committed = update.record.committed
    return committed is not None and holds(state, committed) and state.incarnation not in committed.excluded


def _later(gone: int, closed: list[FailedEngine]) -> str:
    if not gone and not closed:
        return ""
    said = f"{gone + len(closed)} engines of the update join later: {tell(closed[:TOLD])}"
    return clip(said.rstrip(": "))


def largest_difference(update: Update) -> str:
    """Of the targets' probes, as far as they can still be asked, and of what the trainer expected of them."""
    probed: list[tuple[str, ProbeResult | None]] = []
    for target in update.status.targets:
        _, state = find_target(update, target)
        if (
            state is not None
            and state.probe is not None
            and state.probe.version == update.version
            and _belongs(update, state)
        ):
            probed.append((target.name, state.probe))
    found = compare(probed, NO_LIMIT, update.weight_version.spec.verify.probe.expected)
    return found if isinstance(found, str) else ""
