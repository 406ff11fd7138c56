"""A push inside an engine of the model: the guard's own checks of who calls and in which order, over modelled bytes.

The four calls take time, one at a time; what the engine holds afterwards is what really came: parts of one pass in
their order, or of several trainers in a jumble. A digest is that of the bytes that came.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.native import NativeRoutes
from rollfleet_engine.guard.pushing import OutOfOrderError, PushSession
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.guard.states import GuardState, OperationRecord
from rollfleet_protocol.commands import Push
from rollfleet_protocol.state import Failure, FailureReason
from tests.support.simulated_engine import fault

PATHS = {
    "init": "/init_weight_transfer_engine",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
}
Answer = Callable[[str], None]  # empty: done; else why not


@dataclass(frozen=True)
class Part:
    """Some of the tensors of one pass."""

    content: str  # digest of the whole pass
    number: int
    of: int


@dataclass(frozen=True)
class Call:
    """One of a trainer's four calls to one engine."""

    phase: str
    caller: Caller
    holder: str  # in the header
    version: int = 0  # label of the last one
    part: Part | None = None
    told: str | None = None  # digest of what was sent, in the last one
    misfits: bool = False  # of start and update: names a tensor that the model has not


MISFIT = fault(FailureReason.COVERAGE_FAILED, "tensor model.nom.weight: the model has no such tensor")


class _Going:
    """What stands for the tasks and futures of a session: whether they have ended."""

    def __init__(self, name: str = "", *, over: bool = False) -> None:
        self.name, self.over = name, over

    def done(self) -> bool:
        return self.over

    def get_name(self) -> str:
        return self.name


class _Service:
    """What the guard's routes ask its service."""

    is_sender = GuardService.is_sender
    state_of_push = GuardService.state_of_push

    def __init__(self, state: GuardState, push: "ModelSession | None") -> None:
        self._state, self.push = state, push


@dataclass
class Arrived:
    """The bytes of one session."""

    parts: list[Part] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether every tensor came."""
        return bool(self.parts) and {part.number for part in self.parts} == set(range(self.parts[0].of))

    @property
    def digest(self) -> str:
        """Of what came: the last word on each tensor counts."""
        newest = {part.number: part.content for part in self.parts}
        if len(set(newest.values())) == 1:
            return next(iter(newest.values()))
        return f"sha256:jumble-{hashlib.sha256(repr(sorted(newest.items())).encode()).hexdigest()[:12]}"


class ModelSession(PushSession):
    """The order of the calls is the guard's own."""

    def __init__(self, operation: OperationRecord, push: Push, breaks: Failure | None) -> None:
        self.operation = operation
        self.push_id = operation.id
        self.arrived = Arrived()
        self.breaks = breaks  # how the next part fails in the engine
        self.call: Call | None = None  # that runs in the engine
        self.ends = float("inf")
        self.answer: Answer = lambda _: None
        self._push = push
        self._outcome: Any = _Going()
        self._call: Any = _Going(over=True)
        self._started = self._over = False
        self._touched = False
        self._judging = None
        self._updates = 0
        self._reading = self._broke_off = self._superseded = ""

    @property
    def touched(self) -> bool:
        """Whether layers gave up their tensors."""
        return self._touched

    def touch(self) -> None:
        """They do: what is announced fits the model."""
        self._touched = True

    def begin(self, call: Call, ends: float, answer: Answer) -> None:
        """It was taken."""
        self._started = self._started or call.phase == "start"
        self._updates += call.phase == "update"
        self.call, self.ends, self.answer = call, ends, answer
        self._call = _Going(call.phase)

    def end(self) -> tuple[Call, Answer] | None:
        """The call that ran is over."""
        call, self.call, self.ends = self.call, None, float("inf")
        self._call = _Going(over=True)
        return None if call is None else (call, self.answer)

    @property
    def goes_on(self) -> bool:
        """Whether calls are taken."""
        return not self._over

    def finished(self, call: Call) -> Failure | None:
        """What is wrong with what came, by the engine's own checks."""
        if not self.arrived.is_whole:
            return fault(FailureReason.COVERAGE_FAILED, "layers were not fully loaded")
        if call.told is not None and call.told != self.arrived.digest:
            text = f"the workers received {self.arrived.digest}, announced was {call.told}"
            return fault(FailureReason.DIGEST_MISMATCH, text)
        return None


def refusal(state: GuardState, session: ModelSession | None, call: Call) -> str:
    """Why the guard does not take the call; empty where it does."""
    service: Any = _Service(state, session)
    routes = NativeRoutes(service)
    if not routes.takes(call.caller, PATHS[call.phase]):
        return "Forbidden"
    if words := routes.stranger(call.holder):
        return words
    if session is None:
        return "no transfer of this epoch is running"
    try:
        session._require_turn(call.phase)
        if call.phase == "finish":
            session._require(call.version == session.operation.version, f"weight_version is not {call.version} here")
    except OutOfOrderError as error:
        return str(error)
    return ""
