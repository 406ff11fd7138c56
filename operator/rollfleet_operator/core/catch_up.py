"""Late joiners: every engine that does not hold the committed weights, verified, is led to them and then opened.

New and restarted engines, those that a failed update touched, and those that an update closed and did not touch are
all one case. Each pass looks where the engine is and gives the next command of Prepare, Close, Arm, Transfer, Verify,
Open. A failure is repeated with back-off for as long as the engine is there; the fleet's status tells it in the
engine's own words.

Before an engine opens, its answer to the probe is compared with that of an engine that serves already.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from rollfleet_operator.api.rolloutengine import Committed
from rollfleet_operator.api.weightversion import Deadlines, WeightVersion
from rollfleet_operator.core import steps
from rollfleet_operator.core.ending import UpdatePlan
from rollfleet_operator.core.moves import just_closed, quiet
from rollfleet_operator.core.references import References
from rollfleet_operator.core.rolling import behind
from rollfleet_operator.core.work import Work, back_off_until, busy, failed_operation, own_words
from rollfleet_operator.core.world import Engine, World, holds
from rollfleet_protocol.state import (
    EngineState,
    FailureReason,
    Gate,
    Operation,
    OperationName,
    Staged,
    WeightsState,
)

DISAGREES_CURE = "it stays closed until the next version; delete the pod to have it load this one anew"
NEXT = "it waits for the next one, or for a copy in spec.recovery.checkpoint of the WeightVersion that asks for it"
HELD_TEXT = "stays closed as it is: an update failed, and its onFailure is Hold"


class Obstacle(StrEnum):
    """Why a late joiner gets no further by itself."""

    NO_SOURCE = "NoSource"
    CHANGED = "Changed"
    DISAGREES = "Disagrees"
    HELD = "Held"


@dataclass(frozen=True)
class Joiner:
    """What is said of a late joiner that is stuck."""

    obstacle: Obstacle
    text: str


@dataclass
class CatchUp:
    """Leads engines to the committed version under one epoch. `stuck`: by pod name, who gets no further and why."""

    world: World
    committed: Committed
    epoch: int
    tokens: tuple[int, ...]
    deadlines: Deadlines
    work: Work
    references: References
    rolling: bool = False  # engines that serve the version before the committed one may go on
    held: str = ""  # why nothing is loaded or verified now: who holds the committed version opens all the same
    stuck: dict[str, Joiner] = field(default_factory=dict)
    # An engine holds on to something under this very epoch that must go: files that changed since they were staged, or
    # the rest of an update that was given up. Only a new epoch, recorded first, may take it away: what looks given up
    # to an operator that reads an old WeightVersion may be another's update under way.
    burn: bool = False

    def run(self, *, update_under_way: bool) -> None:
        """Give each engine its next command."""
        for engine, state in self.world.usable:
            if state.epoch > self.epoch:
                continue  # it follows the update that is under way
            if engine.serves(self.committed) and (self.rolling or holds(state, self.committed)):
                if holds(state, self.committed) and not update_under_way:
                    self._tidy(engine, state)
            elif not busy(state, self.epoch):
                self._lead(engine, state)
            elif self._is_abandoned(state):
                self._give_up(engine, state, state.operation)

        for engine in behind(self.world, self.committed, self.epoch):
            if engine.usable is None and engine.answering is not None:
                self._shut(engine, engine.answering)

    def _shut(self, engine: Engine, state: EngineState) -> None:
        """An engine that leaves, or has left already, while it answers from the version before."""
        if quiet(engine, state, self.epoch):
            steps.arm(self.epoch, engine, state, self.work, at_once=just_closed(state, self.epoch))
        elif not busy(state, self.epoch):
            steps.close(self.world, self.epoch, engine, state, self.committed.version, self.deadlines, self.work)

    def _is_abandoned(self, state: EngineState) -> bool:
        """Whether what runs belongs to an update that was given up. A transfer runs out; its end is waited for."""
        running = state.operation
        if running is None or running.name not in (OperationName.PREPARE, OperationName.CLOSE):
            return False
        return running.version != self.committed.version or holds(state, self.committed)

    def _tidy(self, engine: Engine, state: EngineState) -> None:
        """An engine that serves holds on to nothing of an update that was given up."""
        running = engine.running()
        if running is not None and running.name is OperationName.PREPARE:
            self._give_up(engine, state, running)
        elif state.staged is not None and state.staged.version != self.committed.version:
            self._give_up(engine, state, state.staged)

    def _give_up(self, engine: Engine, state: EngineState, what: Operation | Staged | None) -> None:
        if what is not None and what.epoch < self.world.fleet.status.epoch:
            steps.cancel(self.epoch, engine, state, self.work)
        else:
            self.burn = True

    def _lead(self, engine: Engine, state: EngineState) -> None:
        if holds(state, self.committed):
            self._let_in(engine, state)
        elif self.held and state.gate is Gate.CLOSED:
            self.stuck[engine.name] = Joiner(Obstacle.HELD, HELD_TEXT)
        elif state.gate is Gate.OPEN:  # open on other weights than the committed ones: that comes before all else
            steps.close(self.world, self.epoch, engine, state, self.committed.version, self.deadlines, self.work)
        elif self.committed.version == 0 and state.weights.state is WeightsState.INITIAL:
            steps.verify_initial(self.world, self.epoch, engine, state, self.tokens, self.work)
        elif self._is_loaded(state):
            steps.verify(self.epoch, engine, state, self.tokens, self.deadlines, self.work)
        else:
            self._load(engine, state)

    def _is_loaded(self, state: EngineState) -> bool:
        weights = state.weights
        if weights.state is not WeightsState.LOADED or weights.version != self.committed.version:
            return False
        return self.committed.digest is None or weights.digest == self.committed.digest

    def _load(self, engine: Engine, state: EngineState) -> None:
        found = state.staged
        if found is None or not self._is_wanted(found):
            if not steps.prepare(self.epoch, engine, state, self.committed, self.deadlines, self.work):
                text = f"version {self.committed.version} is stored nowhere: {NEXT}"
                self.stuck[engine.name] = Joiner(Obstacle.NO_SOURCE, text)
            elif self._has_changed(state, OperationName.PREPARE):
                self.stuck[engine.name] = Joiner(Obstacle.CHANGED, own_words(engine)[1])
        elif self._has_changed(state, OperationName.TRANSFER):
            self.stuck[engine.name] = Joiner(Obstacle.CHANGED, own_words(engine)[1])
            due = back_off_until(engine, OperationName.TRANSFER.value, self.epoch)
            stale = due is None or due <= self.work.now
            self.burn = self.burn or stale
            if due is not None and not stale:
                self.work.wake(due)
        else:
            self._apply(engine, state, found)

    def _is_wanted(self, found: Staged) -> bool:
        right = self.committed.digest in (None, found.digest)
        return right and (found.epoch, found.version) == (self.epoch, self.committed.version)

    def _has_changed(self, state: EngineState, step: OperationName) -> bool:
        """Whether the files were others than before. They are read again with back-off: they may be put back."""
        broken = failed_operation(state, step, self.epoch, self.committed.version)
        failure = None if broken is None else broken.failure
        return failure is not None and failure.reason is FailureReason.CHECKPOINT_CHANGED

    def _apply(self, engine: Engine, state: EngineState, found: Staged) -> None:
        version = self.committed.version
        if not quiet(engine, state, self.epoch):
            steps.close(self.world, self.epoch, engine, state, version, self.deadlines, self.work)
        elif not state.armed:
            steps.arm(self.epoch, engine, state, self.work, at_once=just_closed(state, self.epoch))
        else:
            steps.transfer(self.epoch, engine, state, version, found.digest, self.deadlines, self.work)

    def _let_in(self, engine: Engine, state: EngineState) -> None:
        if not engine.settled:
            return  # the kubelet's word comes within seconds, and is news
        if state.incarnation in self.committed.excluded:
            text = f"answered the probe of version {self.committed.version} unlike the others: delete the pod"
            self.stuck[engine.name] = Joiner(Obstacle.DISAGREES, text)
            return
        difference = self.references.difference(engine, state)
        if difference is not None:
            self.stuck[engine.name] = Joiner(Obstacle.DISAGREES, f"{difference}: {DISAGREES_CURE}")
            return
        if state.probe is not None:
            self.references.add(engine.name, state.probe)
        steps.let_in(self.epoch, engine, state, self.work)


def build_catch_up(
    world: World, committed: Committed, epoch: int, weight_version: WeightVersion | None, work: Work, plan: UpdatePlan
) -> CatchUp:
    """With the operator's own probe and limits; those of the WeightVersion may widen them, never narrow them.

    The same spec may have made an update fail, by a token that the model does not have or a deadline that is too short:
    that must not keep the version before from being restored. A fleet that rolls moves within the spec's own deadlines.
    """
    deadlines = Deadlines()
    if weight_version is not None:
        spec = weight_version.spec
        deadlines = spec.deadlines if plan.rolling else _longer(deadlines, spec.deadlines)
    references = References.of(world, committed, weight_version)
    tokens = references.tokens(world.settings.probe_tokens)
    return CatchUp(world, committed, epoch, tokens, deadlines, work, references, plan.rolling, plan.held)


def _longer(one: Deadlines, other: Deadlines) -> Deadlines:
    return Deadlines(**{name: max(getattr(one, name), getattr(other, name)) for name in Deadlines.model_fields})
