"""Opening: the version is committed; gates open everywhere, by the same ladder that late joiners climb.

Active as soon as each target is open or known not to be able to: another process, no process, a dead core. One that
does not answer is waited for, but not for ever: the commit stands, and that engine opens as a late joiner when it is
back.
"""

from decimal import Decimal

from rollfleet_operator.api.rolloutengine import Outcome
from rollfleet_operator.api.weightversion import FailedEngine, Phase
from rollfleet_operator.core.changing import find_target
from rollfleet_operator.core.moves import Ending, Move, Update, hold_up, progress, with_record
from rollfleet_operator.core.policies import OPENING_S
from rollfleet_operator.core.probes import compare
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.state import Gate, ProbeResult

NO_LIMIT = Decimal("Infinity")


def opening(update: Update) -> Move:
    """One look at Opening. The record may still say Verifying: the commit is what counts."""
    if update.status.phase is not Phase.OPENING:
        update = with_record(update, update.enter(Phase.OPENING))
    deadline = update.deadline(OPENING_S)
    closed: list[FailedEngine] = []
    gone = 0
    for target in update.status.targets:
        engine, state = find_target(update, target)
        if engine is None:
            gone += 1
        elif state is None or state.gate is not Gate.OPEN:
            closed.append(hold_up(engine, Reason.OPENING, "does not answer" if state is None else "is not open yet"))
    total = len(update.status.targets) - gone
    status = update.status.model_copy(update={"progress": progress(total - len(closed), total, closed)})
    if closed and not deadline.passed(update.now):
        return Move(status)
    return Move(status, Ending(Outcome.ACTIVE, Reason.ACTIVE, _later(gone + len(closed))))


def _later(count: int) -> str:
    return f"{count} engines of the update join later" if count else ""


def largest_difference(update: Update) -> str:
    """Of the targets' probes, as far as they can still be asked."""
    probed: list[tuple[str, ProbeResult | None]] = []
    for target in update.status.targets:
        _, state = find_target(update, target)
        if state is not None and state.probe is not None and state.probe.version == update.version:
            probed.append((target.name, state.probe))
    found = compare(probed, NO_LIMIT)
    return found if isinstance(found, str) else ""
