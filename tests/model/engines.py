"""An engine's process in the model: the real guard machine, over weights that can be damaged in every way."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rollfleet_engine.guard.states import EngineDied, OperationRecord, Rejection
from rollfleet_protocol.commands import CheckpointRoot, Command, Transfer
from rollfleet_protocol.state import (
    Failure,
    FailureReason,
    Gate,
    OperationName,
    ProbeResult,
    Staged,
    Transferred,
)
from tests.support.builders import digest_of
from tests.support.simulated_engine import EngineProcess, Store, Temper, fault

LONGEST_STEP_S = 10.0
SILENT = "!"  # appended to what an engine really holds where nothing but the probe can tell


@dataclass
class Shelf(Store):
    """Checkpoints that vanish, are half-written, and change."""

    changed: dict[str, str] = field(default_factory=dict)  # path -> digest of what is there now

    def read(self, root: CheckpointRoot, path: str) -> str | Failure:
        """Its digest, or what is wrong with it."""
        if root is CheckpointRoot.CHECKPOINTS and path in self.changed and path not in self.faults:
            return self.changed[path]
        return super().read(root, path)

    def heal(self, path: str | None, digest: str | None) -> None:
        """As it was; the committed checkpoint as it was committed."""
        self.faults.clear()
        self.changed.clear()
        if path is not None and digest is not None and digest != digest_of(path):
            self.changed[path] = digest


@dataclass
class Damage(Temper):
    """How the next transfer of an engine goes wrong."""

    wrong_digest: bool = False  # the workers received other bytes than were staged, and say so
    silent: bool = False  # a kernel layout is wrong: digest and coverage hold


class ModelEngine(EngineProcess):
    """One incarnation."""

    def __init__(self, incarnation: str, shelf: Shelf, damage: Damage, rng: random.Random) -> None:
        super().__init__(incarnation, shelf, damage, rng)
        self.on_command: Callable[[Command], None] = lambda _: None
        self._shelf = shelf
        self._damage = damage

    @property
    def open(self) -> bool:
        """Whether it answers clients."""
        return self.state.gate is Gate.OPEN

    def obey(self, command: Command, now: float) -> Rejection | None:
        """A command arrives."""
        self.on_command(command)
        return self.command(command, now)

    def unhang(self, now: float) -> None:
        """What would last past every deadline ends."""
        if self._pending is not None:
            self._pending.ends = min(self._pending.ends, now + LONGEST_STEP_S)

    def die(self, now: float) -> None:
        """The core is gone, the guard is not."""
        self.apply(EngineDied(), now)
        self.in_flight = 0

    def _finish(self, operation: OperationRecord, now: float) -> None:
        command, source = operation.command, self.state.staged_source
        if isinstance(command, Transfer) and source is not None:
            read = self._shelf.read(source.root, source.path)
            if isinstance(read, str) and read != command.digest:
                text = f"{source.path!r} is not what was staged"
                self._damage.fails[OperationName.TRANSFER] = fault(FailureReason.CHECKPOINT_CHANGED, text)
        super()._finish(operation, now)

    def _result(self, operation: OperationRecord, digest: str) -> Staged | Transferred | ProbeResult | None:
        result = super()._result(operation, digest)
        if isinstance(result, Transferred) and self._damage.wrong_digest:
            self._damage.wrong_digest = False
            self.resident = "sha256:other"
            return result.model_copy(update={"digest": self.resident})
        if isinstance(result, Transferred) and self._damage.silent:
            self._damage.silent = False
            self.resident += SILENT
        return result
