"""Random commands, reports, deaths and silences against the guard's machine: what must hold whatever happens."""

from collections.abc import Iterator
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollfleet_engine.guard.machine import decide
from rollfleet_engine.guard.states import (
    CancelOperation,
    Decision,
    DrainBegan,
    Ended,
    EngineDied,
    Event,
    Failed,
    GuardState,
    Heard,
    OperationRecord,
    Paused,
    Resumed,
    Slept,
    Start,
    Tick,
    Touching,
    Woken,
)
from rollfleet_protocol.commands import (
    Arm,
    Close,
    Command,
    Open,
    Prepare,
    Sleep,
    Transfer,
    Verify,
    Wake,
)
from rollfleet_protocol.sleep import ALL_TAGS, Tag
from rollfleet_protocol.state import (
    Gate,
    OperationName,
    Staged,
    Transferred,
    WeightsState,
)
from tests.unit.guard.machine_world import (
    FAILURE,
    KINDS,
    ME,
    MOSTLY,
    OTHER,
    SILENCE_S,
    VERSIONS,
    Task,
    World,
    command_of,
    digest_of,
    probe_of,
)


class GuardMachine(RuleBasedStateMachine):
    """Plays operator, shell and engine."""

    def __init__(self) -> None:
        super().__init__()
        self.state = GuardState(incarnation=ME)
        self.now = 100.0
        self.in_flight = 0
        self.world = World()
        self.goal = 0  # version that the operator leads to

    # --- helpers

    def apply(self, event: Event) -> Decision:
        before = self.state
        decision = decide(before, event, self.now, self.in_flight)
        self.state = decision.state
        self.watch_gate(before, event)
        for effect in decision.effects:
            if isinstance(effect, Start):
                task = Task(effect.operation, self.steps(effect.operation))
                self.world.tasks.append(task)
                command = effect.operation.command
                if isinstance(command, Transfer) and command.push is None:
                    self.world.touched = True
            if isinstance(effect, CancelOperation):
                for task in self.world.tasks:
                    task.cancelled |= task.operation.id == effect.operation_id
        return decision

    def watch_gate(self, before: GuardState, event: Event) -> None:
        world = self.world
        if before.gate is Gate.OPEN and self.state.gate is Gate.CLOSED:
            world.was_open, world.armed_since_closed = True, False
        if before.gate is Gate.CLOSED and self.state.gate is Gate.OPEN:
            assert isinstance(event, Open | Ended), event
            if isinstance(event, Ended):
                assert before.operation is not None
                assert before.operation.name is OperationName.REOPEN
                assert not before.armed
            world.was_open = False
        if self.state.armed and not before.armed:
            assert isinstance(event, Arm)
            world.armed_since_closed = True

    def steps(self, operation: OperationRecord) -> Iterator[Event]:
        """What the shell reports of an operation that goes well; it looks at `paused` when it gets there."""
        command = operation.command
        if isinstance(command, Prepare):
            digest = f"sha256:{command.source.path}"
            yield Ended(
                operation.id,
                Staged(
                    epoch=command.epoch, version=command.version, path="p", digest=digest, tensors=1, bytes=4, seconds=0
                ),
            )
        elif isinstance(command, Close):
            self.world.paused = True
            self.world.pauses += 1
            yield Paused()
            self.in_flight = 0
            yield Ended(operation.id)
        elif isinstance(command, Sleep):
            assert self.world.paused
            assert not self.world.asleep, "it sleeps already"
            self.world.asleep = frozenset(Tag)
            self.world.touched, self.world.was_open = True, False  # only the operator opens who has slept
            self.world.resident = "dropped" if command.level == 2 else self.world.resident
            yield Slept(command.level)
            yield Ended(operation.id)
        elif isinstance(command, Wake):
            tags = tuple(tag for tag in self.state.asleep if tag in command.tags)
            assert set(tags) <= self.world.asleep
            self.world.asleep -= set(tags)
            assert Tag.KV_CACHE in self.world.asleep or self.world.resident != "dropped", "no KV cache for no weights"
            yield Woken(tags)
            yield Ended(operation.id)
        elif isinstance(command, Transfer):
            assert Tag.WEIGHTS not in self.world.asleep, "weights that sleep cannot be loaded"
            if command.push is not None:
                self.world.touched = True
                yield Touching(operation.id)
            self.world.resident = command.digest
            yield Ended(
                operation.id,
                Transferred(
                    epoch=command.epoch,
                    version=command.version,
                    digest=command.digest,
                    tensors=1,
                    bytes=4,
                    layers=1,
                    seconds=0,
                    phase_seconds={},
                ),
            )
        else:
            if self.state.paused:
                assert self.world.paused, "resumed what was not paused"
                assert not self.world.asleep, "resumed what sleeps"
                self.world.paused = False
                self.world.resumes += 1
                yield Resumed()
            yield Ended(operation.id, probe_of(command) if isinstance(command, Verify) else None)

    # --- the operator

    def arguments(self, version: str, right_digest: bool) -> tuple[int, str | None]:
        weights = self.state.weights
        number = {"held": weights.version or 0, "goal": self.goal, "other": (self.goal + 1) % 3}[version]
        digest = weights.digest if number == weights.version else digest_of(number)
        return number, digest if right_digest else "sha256:wrong"

    @rule(kind=KINDS, ahead=st.sampled_from([0, 0, 0, 0, 0, 1]), version=VERSIONS, right_digest=MOSTLY)
    def commands_anything(self, kind: str, ahead: int, version: str, right_digest: bool) -> None:
        number, digest = self.arguments(version, right_digest)
        command = command_of(kind, max(1, self.state.epoch + ahead), ME, number, digest)
        self.apply(command)
        self.starts_nothing_again(command)

    @rule(level=st.sampled_from([1, 2]), tags=st.sampled_from([ALL_TAGS, (Tag.WEIGHTS,), (Tag.KV_CACHE,)]))
    def puts_to_sleep_or_wakes(self, level: Literal[1, 2], tags: tuple[Tag, ...]) -> None:
        if self.current() is not None:
            return
        epoch = max(1, self.state.epoch)
        if self.state.asleep:
            self.apply(Wake(incarnation=ME, epoch=epoch, tags=tags, deadline_seconds=9))
        else:
            self.apply(Sleep(incarnation=ME, epoch=epoch, level=level, deadline_seconds=9))
        self.finish_one()

    @rule(kind=st.sampled_from(["open", "cancel", "cancel", "close"]))
    def commands_what_moves_the_gate(self, kind: str) -> None:
        number, digest = self.arguments("held", right_digest=True)
        self.apply(command_of(kind, max(1, self.state.epoch), ME, number, digest))

    def starts_nothing_again(self, command: Command) -> None:
        again = decide(self.state, command, self.now, self.in_flight)
        assert not any(isinstance(effect, Start) for effect in again.effects), "repeated, it starts something anew"

    @rule(steps=st.integers(1, 3))
    def leads_a_little(self, steps: int) -> None:
        self.leads_on(steps)

    def leads_on(self, steps: int) -> None:
        """What a well-behaved operator does next, so that deep states are reached."""
        for _ in range(steps):
            if self.current() is not None:
                self.finish_one()
            else:
                self.command_next()

    @rule(steps=st.integers(3, 14))
    def leads_far(self, steps: int) -> None:
        self.leads_on(steps)

    def command_next(self) -> None:
        state = self.state
        if state.gate is Gate.OPEN and state.weights.version == self.goal:
            self.goal = (self.goal + 1) % 3
            self.apply(command_of("prepare", state.epoch + 1, ME, self.goal, None))
            return
        kind, version, digest = self.next_kind(), self.goal, digest_of(self.goal)
        if kind in ("verify", "open"):
            version, digest = state.weights.version or 0, state.weights.digest
        elif kind == "transfer" and state.staged is not None:
            digest = state.staged.digest
        self.apply(command_of(kind, max(1, state.epoch), ME, version, digest))

    def next_kind(self) -> str:
        state, weights = self.state, self.state.weights
        if state.asleep and not (Tag.WEIGHTS not in state.asleep and weights.state is WeightsState.ABSENT):
            return "wake"
        if weights.state in (WeightsState.LOADED, WeightsState.INITIAL):
            return "verify"
        arrived = weights.state is WeightsState.VERIFIED and (weights.version == self.goal or not state.opened_before)
        if arrived:
            return "verify" if state.paused else "open"
        if state.staged is None or (state.staged.epoch, state.staged.version) != (state.epoch, self.goal):
            return "prepare"
        if state.quiesced_epoch != state.epoch:
            return "close"
        return "transfer" if state.armed else "arm"

    @rule(kind=KINDS, behind=st.integers(1, 3), version=VERSIONS, another=st.booleans())
    def strangers_and_the_past_change_nothing(self, kind: str, behind: int, version: str, another: bool) -> None:
        number, digest = self.arguments(version, right_digest=True)
        epoch = self.state.epoch + behind if another else self.state.epoch - behind
        before = self.state
        if epoch >= 1:
            decision = self.apply(command_of(kind, epoch, OTHER if another else ME, number, digest))
            assert (decision.state, decision.effects) == (before, ())
            assert decision.rejection is not None
        foreign = self.state.operations + 1
        self.apply(Ended(foreign) if another else Failed(foreign, FAILURE, touched=True))
        assert self.state == before

    # --- the shell and the engine

    def current(self) -> Task | None:
        """Tasks run one after the other: a new one waits for the end of what was cancelled."""
        return self.world.tasks[0] if self.world.tasks else None

    @rule()
    def steps_once(self) -> None:
        self.step()

    def step(self) -> None:
        task = self.current()
        if task is None:
            return
        if task.cancelled:
            self.end_cancelled(task)
            return
        event = next(task.steps)
        if isinstance(event, Ended):
            self.world.tasks.pop(0)
        self.apply(event)
        if not isinstance(event, Ended) or task.operation.epoch != self.state.epoch:
            return
        if task.operation.name is OperationName.VERIFY:
            assert self.state.weights.state is WeightsState.VERIFIED
            self.world.touched = False
        if task.operation.command is not None:
            self.starts_nothing_again(task.operation.command)

    def finish_one(self) -> None:
        task = self.current()
        while task is not None and self.current() is task:
            self.step()

    @rule(touched=st.booleans())
    def fails(self, touched: bool) -> None:
        task = self.current()
        if task is None or task.cancelled:
            return
        self.world.tasks.pop(0)
        if task.operation.name is OperationName.TRANSFER and touched:
            self.world.resident = "some of it"
        if task.operation.name in (OperationName.SLEEP, OperationName.WAKE) and touched:
            self.world.touched, self.world.was_open = True, False
            if task.operation.name is OperationName.SLEEP:
                self.world.asleep = frozenset(Tag)  # as far as anybody knows
        self.apply(Failed(task.operation.id, FAILURE, touched))
        if task.operation.name is OperationName.VERIFY:
            self.world.was_open = False  # what failed the probe leaves the serving set: silence opens nothing
        if task.operation.name is OperationName.TRANSFER and not touched and task.operation.epoch == self.state.epoch:
            self.world.touched = self.state.weights.state is not WeightsState.VERIFIED

    def end_cancelled(self, task: Task) -> None:
        """A scheduler call that is under way comes to its end and is reported; then the task is gone."""
        self.world.tasks.pop(0)

    @rule(seconds=st.floats(0.1, 2 * SILENCE_S), polls=st.booleans())
    def time_goes_by(self, seconds: float, polls: bool) -> None:
        if polls:
            self.apply(Heard())
        self.now += seconds
        self.apply(Tick())

    @rule(chance=st.integers(0, 40))
    def load_and_rarely_the_end(self, chance: int) -> None:
        if self.state.gate is Gate.OPEN:
            self.in_flight = 2
        if chance < 2:
            self.apply((EngineDied(), DrainBegan())[chance])

    # --- what must hold

    @invariant()
    def open_only_when_verified(self) -> None:
        state = self.state
        if state.gate is Gate.OPEN:
            assert state.weights.state is WeightsState.VERIFIED
            assert state.weights.digest == self.world.resident
            assert not state.paused
            assert not self.world.paused
            assert not state.asleep
            assert not self.world.asleep
            assert state.alive
            assert not state.draining
            assert not state.armed

    @invariant()
    def never_open_between_touch_and_verification(self) -> None:
        assert not (self.state.gate is Gate.OPEN and self.world.touched)

    @invariant()
    def one_resume_per_pause(self) -> None:
        assert self.world.resumes <= self.world.pauses

    @invariant()
    def an_armed_guard_has_no_dead_mans_switch(self) -> None:
        if self.state.armed or self.world.armed_since_closed:
            assert self.state.reopen_at is None or self.state.gate is Gate.OPEN
            decision = decide(self.state, Tick(), self.now + 1e6, self.in_flight)
            assert decision.state == self.state
            assert decision.effects == ()

    @invariant()
    def silence_reopens_an_unarmed_guard_that_was_open(self) -> None:
        state, world = self.state, self.world
        if state.gate is Gate.OPEN or not world.was_open or world.armed_since_closed or world.touched:
            return
        if not state.alive or state.draining or state.weights.state is not WeightsState.VERIFIED:
            return
        if state.running is not None and state.running.name in (OperationName.SLEEP, OperationName.WAKE):
            return  # silence waits for its end
        later = self.now + 10 * SILENCE_S
        ticked = decide(state, Tick(), later, 0).state
        reopening = ticked.running
        assert reopening is not None
        assert reopening.name is OperationName.REOPEN
        resumed = decide(ticked, Resumed(), later, 0).state
        assert decide(resumed, Ended(reopening.id), later, 0).state.gate is Gate.OPEN


TestGuardMachine = GuardMachine.TestCase
TestGuardMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
