"""Commands of a pass: built here, given at most as often as back-off allows, collected with the times to look again."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rollfleet_operator.core.actions import GuardCall
from rollfleet_operator.core.policies import RESEND_S, backoff_s
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.commands import Command
from rollfleet_protocol.state import EngineState, Operation, OperationName, OperationStatus


@dataclass
class Work:
    """What a pass wants of guards, and when it wants to look again."""

    now: datetime
    calls: list[GuardCall] = field(default_factory=list)
    wakes: list[datetime] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def give(self, engine: Engine, command: Command, *, at_once: bool = False) -> bool:
        """Send the command unless it is backing off. `at_once` where the caller counts the attempts itself."""
        due = None if at_once else back_off_until(engine, type(command).__name__, command.epoch)
        if due is not None and due > self.now:
            self.wake(due)
            return False
        self.calls.append(GuardCall(engine.name, engine.pod.uid, command))
        self.wake(self.now + timedelta(seconds=RESEND_S))
        return True

    def wake(self, when: datetime) -> None:
        """Look again then, if nothing happens before."""
        self.wakes.append(when)

    def note(self, text: str) -> None:
        """A line for the log."""
        self.notes.append(text)

    def next_wake(self) -> datetime | None:
        """The earliest."""
        return min(self.wakes, default=None)


def back_off_until(engine: Engine, name: str, epoch: int) -> datetime | None:
    """When a command that was refused, or whose operation failed, may be given again; None: at once.

    Under a newer epoch it is another command: nobody waits for what failed under an older one.
    """
    view = engine.guard
    if view is None or view.last_setback is None:
        return None
    if view.setback_epoch is not None and epoch > view.setback_epoch:
        return None
    refused = any(refused == name for refused, _ in view.refusals)
    operation = None if view.state is None else view.state.operation
    failed = operation is not None and operation.status is OperationStatus.FAILED and operation.name.value == name
    if not refused and not failed:
        return None
    return view.last_setback + timedelta(seconds=backoff_s(view.setbacks))


def operation_of(state: EngineState, name: OperationName, epoch: int, version: int) -> Operation | None:
    """The newest operation, if it is this one."""
    operation = state.operation
    if operation is None or (operation.name, operation.epoch, operation.version) != (name, epoch, version):
        return None
    return operation


def failed_operation(state: EngineState, name: OperationName, epoch: int, version: int) -> Operation | None:
    """This operation, if it is the newest and failed."""
    operation = operation_of(state, name, epoch, version)
    return operation if operation is not None and operation.status is OperationStatus.FAILED else None


def busy(state: EngineState, epoch: int) -> bool:
    """Whether a command of this epoch would be refused until something ends.

    A newer epoch stops whatever an older one began, except a transfer, which runs out. It waits for no trainer, though.
    """
    operation = state.operation
    if operation is None or operation.status is not OperationStatus.RUNNING:
        return False
    return operation.epoch >= epoch or (operation.name is OperationName.TRANSFER and not operation.pushed)


def own_words(engine: Engine) -> tuple[str, str]:
    """(reason, text) of what the engine, its guard or the kubelet said last about a fault; empty for none."""
    state, view = engine.state, engine.guard
    if view is not None and not view.reachable and view.error:
        return "", view.error
    operation = None if state is None else state.operation
    if operation is not None and operation.status is OperationStatus.FAILED and operation.failure is not None:
        return operation.failure.reason.value, operation.failure.message
    if view is not None and view.refusals:
        return "Refused", f"{view.refusals[-1][0]}: {view.refusals[-1][1]}"
    return "", engine.pod.message
