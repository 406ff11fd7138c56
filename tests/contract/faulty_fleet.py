"""A fleet of faulty simulated engines, and who updates it: as small an operator as keeps the promises.

It prepares, closes, arms, transfers, verifies and opens all engines together, gives every command a few times, and
begins again under another epoch where an engine was touched. It knows nothing of the faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

import httpx

from rollfleet_protocol.state import EngineState, OperationStatus, WeightsState
from tests.contract.client import PROBE_TOKENS, SILENCE_S, Client, Operator
from tests.contract.faulty import FaultyEngine
from tests.contract.models import Models
from tests.contract.process import Kind, Site, until

TRIES = 5  # of one command: more than any fault lasts
ATTEMPTS = 6  # of one update
STEP_S = 20.0


class Outcome(Enum):
    """How an update ends."""

    ACTIVE = "Active"
    FAILED = "Failed"


class StepFailedError(Exception):
    """An engine did not take, or did not finish, a step."""


@dataclass
class Answered:
    """One request that was answered."""

    asked: float
    told: float
    version: int
    right: bool  # the text is that of the version


@dataclass
class Member:
    """One engine of the fleet; its process is started anew when it died, as a kubelet does."""

    name: str
    kind: Kind
    site: Site
    models: Models
    engine: FaultyEngine = field(init=False)
    operator: Operator = field(init=False)
    starts: int = 0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.starts += 1
        name = f"{self.name}-{self.starts}"
        self.engine = FaultyEngine(self.kind, self.site, name, self.models, proxied=False)
        self.operator = Operator(self.engine.process, self.site)

    def stop(self) -> None:
        """End it."""
        self.operator.close_client()
        self.engine.process.stop()

    def state(self) -> EngineState:
        """What its guard says; a dead one is started anew first."""

        def told() -> EngineState | None:
            if self.engine.process.ended():
                self.stop()
                self._start()
            try:
                return self.operator.state()
            except (httpx.TransportError, AssertionError):  # on its way up, or a fault of this very question
                return None

        found = until(told, 60, f"{self.name} says its state")
        assert found is not None
        return found

    def step(self, command: str, epoch: int, **fields: object) -> EngineState:
        """A command to its good end."""
        incarnation = self.state().incarnation
        for _ in range(TRIES):
            try:
                answer = self.operator.send(command, epoch, incarnation=incarnation, **fields)
            except httpx.TransportError:
                continue
            if answer.status_code < 500:
                break
        else:
            raise StepFailedError(f"{self.name}: {command} was answered by nobody")
        if answer.status_code >= 400:
            raise StepFailedError(f"{self.name}: {command}: {answer.text}")
        state = until(self._idle, STEP_S + 10, f"{self.name} ends {command}")
        operation = state.operation
        if operation is not None and operation.status is OperationStatus.FAILED and operation.epoch == epoch:
            raise StepFailedError(f"{self.name}: {operation.failure}")
        return state

    def _idle(self) -> EngineState | None:
        state = self.state()
        running = state.operation is not None and state.operation.status is OperationStatus.RUNNING
        return None if running else state


class Fleet:
    """All of them."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._pool = ThreadPoolExecutor(len(members))
        self.failures: list[str] = []

    def _all(self, act: Callable[[Member], EngineState]) -> list[EngineState]:
        """On all at once; all have ended when this returns or raises."""
        found = [self._pool.submit(act, member) for member in self.members]
        errors = [error for each in found if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return [each.result() for each in found]

    def states(self) -> list[EngineState]:
        """What all guards say."""
        return self._all(Member.state)

    def update(self, version: int, path: str, digest: str) -> Outcome:
        """Atomic, from a checkpoint whose digest is known."""
        for _ in range(ATTEMPTS):
            epoch = max(state.epoch for state in self.states()) + 1
            try:
                self._attempt(epoch, version, path, digest)
            except StepFailedError as error:
                self.failures.append(str(error))
                if self._given_up(epoch):
                    return Outcome.FAILED
            else:
                self._open(version, digest)
                return Outcome.ACTIVE
        return Outcome.FAILED

    def _attempt(self, epoch: int, version: int, path: str, digest: str) -> None:
        source = {"type": "Checkpoint", "root": "Checkpoints", "path": path}
        to = {"version": version, "digest": digest}
        timed = {"deadlineSeconds": STEP_S}
        self._all(lambda each: each.step("prepare", epoch, version=version, source=source, **timed))
        close = {"version": version, "operatorSilenceSeconds": SILENCE_S, **timed}
        self._all(lambda each: each.step("close", epoch, **close))
        self._all(lambda each: each.step("arm", epoch))
        self._all(lambda each: each.step("transfer", epoch, **to, **timed))
        self._all(lambda each: each.step("verify", epoch, **to, **timed, probeTokens=PROBE_TOKENS))
        verified = (WeightsState.VERIFIED, version, digest)
        if any(
            (state.weights.state, state.weights.version, state.weights.digest) != verified for state in self.states()
        ):
            raise StepFailedError("an engine was restarted before the commit")

    def _open(self, version: int, digest: str) -> None:
        """The update is committed. An engine that is lost from here on joins with the next one."""
        epoch = max(state.epoch for state in self.states())
        for member in self.members:
            try:
                member.step("open", epoch, version=version, digest=digest)
            except StepFailedError as error:
                self.failures.append(str(error))

    def _given_up(self, epoch: int) -> bool:
        """Untouched, everywhere: then all go back to what they served. Else the next attempt goes on."""
        untouched = (WeightsState.VERIFIED, WeightsState.INITIAL)
        states = self.states()
        if any(state.weights.state not in untouched for state in states):
            return False
        if len({state.weights.version for state in states if state.weights.state is WeightsState.VERIFIED}) > 1:
            return False
        try:
            self._all(lambda each: each.step("cancel", epoch))
        except StepFailedError as error:
            self.failures.append(str(error))
            return False
        return True

    def stop(self) -> None:
        """End all."""
        for member in self.members:
            member.stop()
        self._pool.shutdown()


class Load:
    """Clients who ask every engine all the time, past any router."""

    def __init__(self, fleet: Fleet, models: Models, steps: dict[int, int]) -> None:
        self._fleet = fleet
        self._models = models
        self._steps = steps  # version -> the step that it is of
        self._ended = threading.Event()
        self.answers: list[Answered] = []
        self._threads = [threading.Thread(target=self._ask, args=(each,), daemon=True) for each in fleet.members]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, member: Member) -> None:
        prompt = self._models.short_prompt
        engine, client = member.engine, Client(member.engine.process)
        while not self._ended.wait(0.02):
            if member.engine is not engine:
                client.close_client()
                engine, client = member.engine, Client(member.engine.process)
            try:
                asked = time.monotonic()
                answer = client.complete(prompt, 8)
            except (httpx.TransportError, ValueError):  # it is gone, or on its way up
                continue
            if answer.status == 200 and answer.version is not None:
                expected = self._models.answer(self._steps[answer.version], prompt)
                right = expected.startswith(answer.text)
                self.answers.append(Answered(asked, time.monotonic(), answer.version, right))
        client.close_client()
