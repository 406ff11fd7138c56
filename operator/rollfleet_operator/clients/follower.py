"""What is known of one engine's guard: a long poll keeps it, and commands go the same way."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from rollfleet_operator.clients.ending import end_if_asked
from rollfleet_operator.clients.errors import Disowned, Refused, RollfleetError, StaleAttempt, Unguarded, clipped
from rollfleet_operator.clients.guards import Endpoint
from rollfleet_operator.clients.pace import Pace
from rollfleet_operator.core.observed import GuardView
from rollfleet_protocol.commands import Arm, Close, Command
from rollfleet_protocol.state import EngineState, OperationStatus

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 5.0
# Answers of one guard that are taken at once, and how fast more are allowed. An update makes some fifteen; a guard that
# always has news, or never any answer, must cost neither the loop nor the API server more than this.
MAX_ANSWERS, ANSWERS_PER_S = 30.0, 4.0
LOOK_EVERY_S = 2.0  # where a look is all there is
MAX_REFUSALS = 8
MAX_RETIRED = 64  # incarnations of one pod that are remembered
UNKNOWN = GuardView(state=None, reachable=False, last_contact=None)


class Guards(Protocol):
    """What followers need of the transport."""

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        """Long poll."""
        ...

    async def look(self, endpoint: Endpoint) -> EngineState:
        """The state at once, and no word of the operator."""
        ...

    async def canary(self, endpoint: Endpoint) -> None:
        """Raises Unguarded where a command without identity is not refused by a guard."""
        ...

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        """Give a command."""
        ...


async def _in_turn(pace: Pace) -> None:
    await asyncio.sleep(pace.take(asyncio.get_running_loop().time()))


class Follower:
    """What is known of one guard. `on_change` is called in the very turn of the loop that brought news."""

    def __init__(
        self, endpoint: Endpoint, guards: Guards, on_change: Callable[[], None], clock: Callable[[], datetime]
    ) -> None:
        self.endpoint = endpoint
        self.view = UNKNOWN
        self._guards = guards
        self._on_change = on_change
        self._clock = clock
        self._retired: dict[str, None] = {}  # incarnations that are over, oldest first
        self._commanded_epoch = 0  # of this incarnation: a new one may be led from epoch 1 by a record that began anew
        self._met_at = 0  # the epoch that this incarnation named when it was met
        self._recorded = 0  # the highest that the fleet's record has come to since
        self._pace = Pace(MAX_ANSWERS, ANSWERS_PER_S)
        self._command_pace = Pace(MAX_ANSWERS, ANSWERS_PER_S)
        self._hurry = asyncio.Event()
        self.heard = asyncio.Event()  # set once the guard answered or could not be reached
        self._failures = 0
        self._silent = False
        self._guarded = ""  # the incarnation that was seen to refuse a command without identity

    async def run(self) -> None:
        """Follow until cancelled."""
        after: int | None = None
        while True:
            end_if_asked()
            await _in_turn(self._pace)
            asked = time.monotonic()
            try:
                state = await self._poll(after)
            except RollfleetError as error:
                after = None  # the process behind the address may be another one now
                self.failed(error)
                await self._back_off()
                continue
            self._failures = 0
            if state is not None and state.sequence == after and time.monotonic() - asked < BACKOFF_MIN_S:
                await self._back_off()  # a guard that does not wait must not be asked in a tight loop
            after = state.sequence if state else None
            if self._silent:
                await self._rest(LOOK_EVERY_S)

    def be_silent(self, silent: bool) -> None:
        """Whether to look only: whoever can't act must not seem to live, or a closed guard waits for it for ever."""
        if silent is not self._silent:
            self._silent = silent
            self.hurry()

    def hurry(self) -> None:
        """Ask again now: the pod changed, or a command found the guard away."""
        self._failures = 0
        self._hurry.set()

    def told(self, state: EngineState) -> None:
        """Take a state from a poll or from a command's answer, unless a newer one is known."""
        known = self.view.state
        if state.incarnation in self._retired:
            return
        restarted = known is not None and known.incarnation != state.incarnation
        if known is not None and not restarted and state.sequence < known.sequence:
            return
        if known is not None and restarted:
            self._retire(known.incarnation)
            self._commanded_epoch = 0
        is_news = known is None or restarted or state.sequence != known.sequence or not self.view.reachable
        if restarted or (known is not None and state.epoch > known.epoch):
            self._start_over()
        if known is None:
            self._met_at = state.epoch
        elif restarted or state.epoch < known.epoch:  # a new process has heard of no epoch; an old one forgets none
            self._met_at = 0
        self.view = replace(
            self.view,
            state=state,
            reachable=True,
            last_contact=self._clock(),
            error="",
            disowned=False,
            unguarded=False,
            vouched=max(self._met_at, self._recorded),
        )
        if _failed_anew(known, state):
            self._set_back(state.epoch)
        self.heard.set()
        if is_news:
            self._on_change()

    def vouch(self, epoch: int) -> None:
        """The fleet's record has come so far, and with it the guard may."""
        if epoch > self._recorded:
            self._recorded = epoch
            self.view = replace(self.view, vouched=max(self._met_at, epoch))

    def failed(self, error: RollfleetError) -> None:
        """The guard could not be reached, would not listen to us, or answered what no guard answers."""
        text = str(error)
        is_news = self.view.reachable or self.view.error != text
        self.view = replace(
            self.view,
            reachable=False,
            error=text,
            disowned=isinstance(error, Disowned),
            unguarded=isinstance(error, Unguarded),
        )
        self.heard.set()
        if is_news:
            self._on_change()

    async def give_in_turn(self, command: Command) -> str:
        """The same, no faster than answers are taken: each answer may be news, and news may bring a command."""
        await _in_turn(self._command_pace)
        return await self.give(command)

    async def give(self, command: Command) -> str:
        """Send a command and take in what comes of it; the outcome in one word."""
        if command.epoch > self._commanded_epoch and command.incarnation not in self._retired:
            self._commanded_epoch = command.epoch
            self._start_over()
        try:
            self._answered(await self._guards.command(self.endpoint, command))
            if isinstance(command, Close):
                self._let_arm_again()
        except StaleAttempt as error:
            self.hurry()
            return f"stale: {error}"
        except Refused as error:
            self._refused(command, str(error))
            return f"refused: {error}"
        except RollfleetError as error:
            self.failed(error)
            self.hurry()
            return f"failed: {error}"
        return "ok"

    def _answered(self, state: EngineState) -> None:
        """A command's answer. A process that is not known yet is met by a poll, which asks for its guard first."""
        known = self.view.state
        if known is None or known.incarnation != state.incarnation or self.view.unguarded:
            self.hurry()
        else:
            self.told(state)

    def _refused(self, command: Command, text: str) -> None:
        known = self.view.state
        if known is None or known.incarnation != command.incarnation or command.epoch < self._commanded_epoch:
            return
        entry = (type(command).__name__, clipped(text))
        others = tuple(other for other in self.view.refusals if other != entry)
        self.view = replace(self.view, refusals=(*others, entry)[-MAX_REFUSALS:])
        self._set_back(command.epoch)
        self._on_change()

    def _let_arm_again(self) -> None:
        """Arm was refused because Close had not come before it, and now it has, also where nothing was left to do."""
        others = tuple(entry for entry in self.view.refusals if entry[0] != Arm.__name__)
        if others != self.view.refusals:
            self.view = replace(self.view, refusals=others)
            self._on_change()

    def _start_over(self) -> None:
        """Another process, or another epoch: what failed before says nothing any more."""
        self.view = replace(self.view, refusals=(), setbacks=0, last_setback=None, setback_epoch=None)

    def _set_back(self, epoch: int) -> None:
        view = self.view
        self.view = replace(
            view,
            setbacks=view.setbacks + 1,
            last_setback=self._clock(),
            setback_epoch=max(epoch, view.setback_epoch or 0),
        )

    async def _poll(self, after: int | None) -> EngineState | None:
        """One long poll; None where somebody was in a hurry.

        Before anything else, and again for each new process, a command without identity must be refused there: nothing
        is known of a process that does not, so it is never opened.
        """
        is_first = not self._guarded
        if is_first:
            await self._guards.canary(self.endpoint)
        self._hurry.clear()
        question = self._guards.look(self.endpoint) if self._silent else self._guards.state(self.endpoint, after)
        poll = asyncio.ensure_future(question)
        hurried = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait((poll, hurried), return_when=asyncio.FIRST_COMPLETED)
            if not poll.done():
                return None
            state = await poll
        finally:
            for task in (poll, hurried):
                task.cancel()
            await asyncio.gather(poll, hurried, return_exceptions=True)
        if not is_first and state.incarnation != self._guarded:
            await self._guards.canary(self.endpoint)
        self._guarded = state.incarnation
        self.told(state)
        return state

    async def _back_off(self) -> None:
        self._failures += 1
        ceiling = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._failures - 1, 10))
        await self._rest(ceiling * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

    async def _rest(self, seconds: float) -> None:
        """So long, unless somebody is in a hurry."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    def _retire(self, incarnation: str) -> None:
        self._retired[incarnation] = None
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]


def _failed_anew(known: EngineState | None, state: EngineState) -> bool:
    """Whether an operation was seen to fail that was not known as failed before."""
    operation = state.operation
    if operation is None or operation.status is not OperationStatus.FAILED or operation.epoch != state.epoch:
        return False
    before = None if known is None or known.incarnation != state.incarnation else known.operation
    return before != operation  # durations tell one failure from the next
